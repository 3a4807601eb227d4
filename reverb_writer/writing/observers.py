"""Observers: call one with every environment step, and its windows appear in the replay server's tables.

    observer(step) -> same structure as the first step? -> room in flight? -> writer -> at a boundary step: end episode

Call an observer from one thread at a time; threads of its stream send the items. A call that raises has changed
nothing: the next good step continues the episode.

Source: TF-Agents 0.19, `tf_agents/replay_buffers/reverb_utils.py`; docs/compatibility.md lists the differences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reverb_writer.arguments import integer
from reverb_writer.episodes import Episode
from reverb_writer.errors import SpecError
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.observer_base import SingleObserver
from reverb_writer.writing.priorities import Priority
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.stream_options import StreamKeywords, StreamOptions
from reverb_writer.writing.window_targets import WindowTarget, table_names, window_targets

if TYPE_CHECKING:
    from typing_extensions import Unpack

_LOG = logging.getLogger(__package__)


class EpisodeTooLongError(SpecError):
    """An episode has become too long for its observer, which drops it: this step, those before and those to come."""


class WindowObserver(SingleObserver):
    """An observer of one environment that writes fixed-length windows."""

    def __init__(
        self,
        client: Any,
        table: str | Sequence[str] | None = None,
        sequence_length: int | None = None,
        stride_length: int = 1,
        priority: Priority = 1.0,
        *,
        end_of_episode: EndOfEpisode | str = EndOfEpisode.DROP,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables and open the stream.

        Args:
            client: a `Client`, an address or a `reverb.Client`.
            table: the table, or several that get the same windows.
            sequence_length: L, steps in a window, >= 1.
            stride_length: S, steps from one window's start to the next one's, >= 1.
            priority: of every item, finite and >= 0; a function of the window (a nest of arrays [L, ...]), which also
                gets the mask [L] of real steps if it has a parameter `mask`; or "max", the largest priority seen so far
                of the tables: 1 at first, then what learners set, in this process at once, in others within a second.
            end_of_episode: what becomes of the last steps of an episode, see `EndOfEpisode`.
            windows: several kinds of windows from one stream, each step stored once: a `WindowSpec` for each table, or
                a `WindowTarget` for each name, with tables and a priority of its own. They add to the
                arguments above, or replace them.
            spec: nest of array specs or arrays that steps must look like; None for what the first step looks like.
            mask: write one more column, after the leaves, that is True for real steps and False for padding.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.

        Raises:
            SpecError: an argument can never work.
            StructureError: a table is not there; names those that are.
            ServerUnavailableError: no server answers within the time-out.
        """
        targets = window_targets(table, sequence_length, stride_length, end_of_episode, priority, windows)
        super().__init__(client, targets, spec=spec, mask=mask, options=StreamOptions(**options))


class TrajectoryObserver(WindowObserver):
    """Write fixed-length windows that never cross an episode's end.

    The default drops the steps that no full window holds at the end of an episode; `end_of_episode` has other ways.
    Successor of TF-Agents' `ReverbAddTrajectoryObserver`. Called from one thread at a time; a context manager.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, stride_length=10)
        for step in episode:
            observer(step)
        observer.close()
    """


class SequenceObserver(WindowObserver):
    """Write fixed-length windows over the whole stream of steps, across the ends of episodes.

    A boundary step only sends complete windows. `end_of_episode` applies at `reset()`, where the stream ends.
    Successor of TF-Agents' `ReverbTrajectorySequenceObserver`; Acme's CONTINUE.
    """

    _spans_episodes = True


class EpisodeObserver(SingleObserver):
    """Write each episode as one item of its own length.

    Successor of TF-Agents' `ReverbAddEpisodeObserver`.
    """

    def __init__(
        self,
        client: Any,
        table: str | Sequence[str],
        max_sequence_length: int,
        priority: Priority = 1.0,
        bypass_partial_episodes: bool = False,
        *,
        spec: Any = None,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables and open the stream; errors as for `TrajectoryObserver`.

        Args:
            client: a `Client`, an address or a `reverb.Client`.
            table: the table, or several.
            max_sequence_length: steps in an episode at most, boundary step included, >= 1.
            priority: of every item, finite and >= 0, a function of the episode (a nest of arrays [T, ...]), or "max".
            bypass_partial_episodes: what becomes of a longer episode: dropped, counted and logged once (True), or a
                ValueError at its first step too many, after which `reset()` or the next episode continues (False).
            spec: nest of array specs or arrays that steps must look like; None for what the first step looks like.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.
        """
        self._max_length = integer("max_sequence_length", max_sequence_length, minimum=1)
        self._bypass = bypass_partial_episodes
        targets = [WindowTarget(WindowSpec.whole_episode(), table_names(table), priority)]
        super().__init__(client, targets, spec=spec, mask=False, options=StreamOptions(**options))

    def __call__(self, step: Any, *, end_of_episode: bool | None = None) -> None:
        """Write `step`; the boundary step of the episode writes the item.

        Raises:
            SpecError: the episode is too long, once; its further steps are dropped and counted until it ends.
            StructureError, ReplayTimeoutError, ClosedError: as for `TrajectoryObserver`.
        """
        writer = self._session.writer
        if writer is not None:
            writer.finish_pending()
        if writer is None or (writer.num_steps < self._max_length and not writer.num_skipped):
            super().__call__(step, end_of_episode=end_of_episode)
        else:
            self._skip(writer, step, end_of_episode)

    def check_episode(self, episode: Episode) -> None:
        """Check whether `write_episode` could write `episode` as an item now; see `TrajectoryObserver.check_episode`.

        Raises:
            SpecError: it is longer than `max_sequence_length`, or the observer is in the middle of another one.
        """
        if len(episode) + 1 > self._max_length and not self._bypass:
            raise SpecError(
                f"the episode has {len(episode) + 1} steps, boundary step included, which is more than "
                f"max_sequence_length={self._max_length}. Raise `max_sequence_length`, or slice the episode."
            )
        super().check_episode(episode)

    def _fits_at_once(self, steps: Any, leaves: Sequence[Any]) -> bool:
        writer = self._writer
        fits = writer is None or (not writer.num_skipped and writer.num_steps + len(leaves[0]) <= self._max_length)
        return fits and super()._fits_at_once(steps, leaves)

    def _skip(self, writer: SequenceWriter, step: Any, end_of_episode: bool | None) -> None:
        """Drop a step of an episode that has become too long."""
        layout = self._layout
        assert layout is not None  # noqa: S101  # an episode overflows after its first step only
        self._session.stream.check()
        leaves = layout.flatten(step, self._num_before + writer.total_steps)
        last = layout.structure.ends_episode(leaves) if end_of_episode is None else end_of_episode
        first = not writer.num_skipped
        writer.skip(last=bool(last))
        if last:
            self._session.change_shard()
        if first:
            text = (
                f"the episode is longer than max_sequence_length={self._max_length} steps, boundary step included: it "
                "is not written, and its steps up to the next episode are dropped. Raise `max_sequence_length`."
            )
            if not self._bypass:
                raise EpisodeTooLongError(text)
            _LOG.error("%s", text)

    def update_priority(self, priority: Priority) -> None:
        """Set the priority of the items still to come.

        Raises:
            SpecError: it is not a number >= 0, or it becomes a function in the middle of an episode. Nothing
                changed.
        """
        target = WindowTarget(WindowSpec.whole_episode(), self._session.targets[0].tables, priority)
        if self._writer is not None:
            self._writer.set_priority(0, priority)
        self._session.targets = (target,)
