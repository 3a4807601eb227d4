"""Observers: call one with every environment step, and its windows appear in the replay server's tables.

    observer(step) -> same structure as the first step? -> room in flight? -> writer -> at a boundary step: end episode

An observer is called from one thread at a time; what it sends is sent by threads of its stream. A call that raises has
changed nothing: the next good step continues the episode.

Source: TF-Agents 0.19, `tf_agents/replay_buffers/reverb_utils.py`; where we differ is told in docs/compatibility.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from reverb_writer.arguments import integer
from reverb_writer.episodes import Episode
from reverb_writer.errors import SpecError
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.observer_base import SingleObserver
from reverb_writer.writing.priorities import Priority
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.session import StreamOptions
from reverb_writer.writing.window_targets import WindowTarget, end_of_episode_mode, window_targets

__all__ = ["EpisodeObserver", "SequenceObserver", "TrajectoryObserver"]

_LOG = logging.getLogger("reverb_writer")


class TrajectoryObserver(SingleObserver):
    """Write fixed-length windows that never cross an episode's end.

    The default drops what no full window holds at the end of an episode; `end_of_episode` says what else to do.
    Successor of TF-Agents' `ReverbAddTrajectoryObserver`. Called from one thread at a time; a context manager.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, stride_length=10)
        for step in episode:
            observer(step)
        observer.close()
    """

    def __init__(
        self,
        client: Any,
        table_name: str | Sequence[str] | None = None,
        sequence_length: int | None = None,
        stride_length: int = 1,
        priority: Priority = 1.0,
        pad_end_of_episodes: bool = False,
        tile_end_of_episodes: bool = False,
        *,
        end_of_episode: EndOfEpisode | str | None = None,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream.

        Args:
            client: a `Client`, an address or a `reverb.Client`.
            table_name: the table, or several that get the same windows.
            sequence_length: L, steps in a window, >= 1.
            stride_length: S, steps from one window's start to the next one's, >= 1.
            priority: of every item, finite and >= 0, or a function of the window (a nest of arrays [L, ...]).
            pad_end_of_episodes: for compatibility: `end_of_episode="pad"`.
            tile_end_of_episodes: for compatibility, with the former: `end_of_episode="tile"`.
            end_of_episode: what becomes of the last steps of an episode, see `EndOfEpisode`.
            windows: several kinds of windows from one stream, each step stored once: a `WindowSpec` for each table, or
                a `WindowTarget` for each name, with tables and a priority of its own. Beside or instead of the
                arguments above.
            spec: nest of array specs or arrays that steps must look like; None for what the first step looks like.
            mask: write one more column, after the leaves, that is True for real steps and False for padding.
            timeout_s: how long a step waits while nothing moves, any other call in all, seconds; None for the client's.
            **options: bounds and policies of the stream, see `StreamOptions`.

        Raises:
            SpecError: an argument can never work.
            StructureError: a table is not there; names those that are.
            ServerUnavailableError: no server answers within the time-out.
        """
        mode = end_of_episode_mode(end_of_episode, pad=pad_end_of_episodes, tile=tile_end_of_episodes)
        targets = window_targets(table_name, sequence_length, stride_length, mode, priority, windows)
        super().__init__(client, targets, spec=spec, mask=mask, options=StreamOptions(timeout_s=timeout_s, **options))

    def reset(self, write_cached_steps: bool = True) -> None:
        """End the episode here.

        Args:
            write_cached_steps: whether to do as at the end of an episode; without padding, also write the last L steps
                if no window holds the last one yet. If False, only windows that were complete already are written.

        Raises:
            SpecError: steps should be written, but there are fewer than L. Nothing changed.
        """
        self._reset(write_cached_steps)


class SequenceObserver(SingleObserver):
    """Write fixed-length windows over the whole stream of steps, across the ends of episodes.

    A boundary step only sends what is due. Successor of TF-Agents' `ReverbTrajectorySequenceObserver`; Acme's CONTINUE.
    """

    _spans_episodes = True

    def __init__(
        self,
        client: Any,
        table_name: str | Sequence[str] | None = None,
        sequence_length: int | None = None,
        stride_length: int = 1,
        priority: Priority = 1.0,
        pad_end_of_episodes: bool = False,
        tile_end_of_episodes: bool = False,
        *,
        end_of_episode: EndOfEpisode | str | None = None,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream; arguments as for `TrajectoryObserver`.

        The mode for the end counts at `reset()` only: that is where a spanning stream ends.
        """
        mode = end_of_episode_mode(end_of_episode, pad=pad_end_of_episodes, tile=tile_end_of_episodes)
        targets = window_targets(table_name, sequence_length, stride_length, mode, priority, windows)
        super().__init__(client, targets, spec=spec, mask=mask, options=StreamOptions(timeout_s=timeout_s, **options))

    def reset(self, write_cached_steps: bool = True) -> None:
        """End the stream of windows here; see `TrajectoryObserver.reset`."""
        self._reset(write_cached_steps)


class EpisodeObserver(SingleObserver):
    """Write each episode as one item of its own length.

    Successor of TF-Agents' `ReverbAddEpisodeObserver`.
    """

    def __init__(
        self,
        client: Any,
        table_name: str | Sequence[str],
        max_sequence_length: int,
        priority: Priority = 1.0,
        bypass_partial_episodes: bool = False,
        *,
        spec: Any = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream.

        Args:
            client: a `Client`, an address or a `reverb.Client`.
            table_name: the table, or several.
            max_sequence_length: steps in an episode at most, boundary step included, >= 1.
            priority: of every item, finite and >= 0, or a function of the episode (a nest of arrays [T, ...]).
            bypass_partial_episodes: what becomes of a longer episode: dropped, counted and logged once (True), or a
                ValueError at its first step too many, after which `reset()` or the next episode continues (False).
            spec: nest of array specs or arrays that steps must look like.
            timeout_s: how long a step waits while nothing moves, any other call in all, seconds; None for the client's.
            **options: see `StreamOptions`.
        """
        self._max_length = integer("max_sequence_length", max_sequence_length, minimum=1)
        self._bypass = bypass_partial_episodes
        tables = (table_name,) if isinstance(table_name, str) else tuple(table_name)
        if not tables:
            raise SpecError("`table_name` must be a name or several different ones, got none.")
        super().__init__(
            client,
            [WindowTarget(WindowSpec.whole_episode(), tables, priority)],
            spec=spec,
            mask=False,
            options=StreamOptions(timeout_s=timeout_s, **options),
        )

    def __call__(self, step: Any, *, end_of_episode: bool | None = None) -> None:
        """Write a step; its boundary step writes the item.

        Raises:
            SpecError: the episode is too long, once; its further steps are dropped and counted until it ends.
            StructureError, ReplayTimeoutError, ClosedError: as for `TrajectoryObserver`.
        """
        writer = self._writer
        if writer is not None:
            writer.finish_pending()
        if writer is None or (writer.num_steps < self._max_length and not writer.num_skipped):
            super().__call__(step, end_of_episode=end_of_episode)
        else:
            self._skip(writer, step, end_of_episode)

    def write_episode(self, episode: Episode) -> None:
        """Write a whole episode, or a chunk that was cut, as an item; see `SingleObserver.write_episode`."""
        if len(episode) + 1 > self._max_length and not self._bypass:
            raise SpecError(
                f"the episode has {len(episode) + 1} steps, boundary step included, which is more than "
                f"max_sequence_length={self._max_length}. Raise `max_sequence_length`, or slice the episode."
            )
        super().write_episode(episode)

    def _takes_at_once(self, steps: Any, leaves: Sequence[Any]) -> bool:
        writer = self._writer
        fits = writer is None or (not writer.num_skipped and writer.num_steps + len(leaves[0]) <= self._max_length)
        return fits and super()._takes_at_once(steps, leaves)

    def _skip(self, writer: SequenceWriter, step: Any, end_of_episode: bool | None) -> None:
        """Drop a step of an episode that has become too long."""
        structure = self._structure
        assert structure is not None  # noqa: S101  # an episode overflows after its first step only
        self._session.stream.check()
        leaves = structure.flatten(step, self._num_before + writer.total_steps)
        last = structure.ends_episode(leaves) if end_of_episode is None else end_of_episode
        first = not writer.num_skipped
        writer.skip(last=bool(last))
        if first:
            text = (
                f"the episode is longer than max_sequence_length={self._max_length} steps, boundary step included: it "
                "is not written, and its steps up to the next episode are dropped. Raise `max_sequence_length`."
            )
            if not self._bypass:
                raise SpecError(text)
            _LOG.error("%s", text)

    def reset(self, write_cached_steps: bool = True) -> None:
        """End the episode here.

        Args:
            write_cached_steps: whether to write what there is of it as an item; never that of one that was too long.
        """
        self._reset(write_cached_steps)

    def update_priority(self, priority: Priority) -> None:
        """Set the priority of the items still to come.

        Raises:
            SpecError: it is no number >= 0, or becomes a function in the middle of an episode. Nothing changed.
        """
        target = WindowTarget(WindowSpec.whole_episode(), self._session.targets[0].tables, priority)
        if self._writer is not None:
            self._writer.set_priority(0, priority)
        self._session.targets = (target,)
