"""Observers: call one with every environment step, and its windows appear in the replay server's tables.

Call an observer from one thread at a time; its sender's thread sends the items. A call that raises has changed
nothing: the next good step continues the episode.

Source: TF-Agents 0.19, `tf_agents/replay_buffers/reverb_utils.py`; docs/how-to/from-tf-agents.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reverb_writer.arguments import check_priority, integer
from reverb_writer.errors import SpecError
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.observer import Observer
from reverb_writer.writing.ring import NewPriority
from reverb_writer.writing.stream_options import StreamKeywords
from reverb_writer.writing.window_kinds import Priority, WindowTarget, window_targets

if TYPE_CHECKING:
    from typing_extensions import Unpack


class WindowObserver(Observer):
    """An observer that writes fixed-length windows."""

    def __init__(
        self,
        replay: Any,
        table: str | Sequence[str] | None = None,
        sequence_length: int | None = None,
        stride_length: int = 1,
        priority: Priority = 1.0,
        *,
        end_of_episode: EndOfEpisode | str = EndOfEpisode.DROP,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        num_envs: int | None = None,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables and open the stream.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: the table, or several that get the same windows.
            sequence_length: L, steps in a window, >= 1.
            stride_length: S, steps from one window's start to the next one's, >= 1.
            priority: of every item, finite and >= 0; a function of the window (a nest of arrays [L, ...]), which also
                gets the mask [L] of real steps if it has a parameter `mask`; or "max", the largest priority that this
                process has set so far in the tables, 1.0 at first. A function is called by the observer's own thread,
                when its window is encoded; if it fails, the window is lost, counted, and the first one is logged.
            end_of_episode: treatment of the last steps of an episode, see `EndOfEpisode`.
            windows: several kinds of windows from one stream, each step stored once: a `WindowSpec` for each table, or
                a `WindowTarget` for each name, with tables and a priority of its own. They add to the
                arguments above, or replace them.
            spec: nest of array specs or arrays that the steps of one environment must fit; None for the
                structure of the first step.
            mask: write one more column, after the leaves, that is True for real steps and False for padding.
            num_envs: N, for environments that step together: leaves are [N, ...], and each environment has its own
                episodes. None for steps without a batch dimension.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.

        Raises:
            SpecError: an argument can never work.
            StructureError: a table does not exist; names the tables that exist.
            ServerUnavailableError: no server answers within the time-out.
        """
        is_given = [table is not None, sequence_length is not None]
        if any(is_given) != all(is_given) or not (any(is_given) or windows):
            raise SpecError(
                f"`table` and `sequence_length` belong together, got {table!r} and {sequence_length!r}. Give both, "
                "or `windows` alone."
            )
        window = None if sequence_length is None else WindowSpec(sequence_length, stride_length, end_of_episode)
        targets = window_targets(table, window, priority, windows)
        super().__init__(replay, targets, spec=spec, mask=mask, num_envs=num_envs, options=options)


class TrajectoryObserver(WindowObserver):
    """Write fixed-length windows that never cross an episode's end.

    The default drops the steps that no full window holds at the end of an episode; `end_of_episode` has other ways.
    Successor of TF-Agents' `ReverbAddTrajectoryObserver`. Called from one thread at a time; a context manager.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, stride_length=10)
        for step in episode:
            observer(step)
        observer.close()

        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, num_envs=64)
        observer({"obs": obs, "reward": reward}, end_of_episode=terminated | truncated)
    """


class SequenceObserver(WindowObserver):
    """Write fixed-length windows over the whole stream of steps, across the ends of episodes.

    `end_of_episode` applies at `reset()`, where the stream ends. Successor of TF-Agents'
    `ReverbTrajectorySequenceObserver`; Acme's CONTINUE.
    """

    _spans_episodes = True


class EpisodeObserver(Observer):
    """Write each episode as one item of its own length; its boundary step writes the item.

    A call also raises `SpecError` when the episode has become too long, once; its further steps are dropped and counted
    until it ends. Successor of TF-Agents' `ReverbAddEpisodeObserver`.
    """

    def __init__(
        self,
        replay: Any,
        table: str | Sequence[str],
        max_sequence_length: int,
        priority: Priority = 1.0,
        bypass_partial_episodes: bool = False,
        *,
        spec: Any = None,
        num_envs: int | None = None,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables and open the stream; errors as for `TrajectoryObserver`.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: the table, or several.
            max_sequence_length: steps in an episode at most, boundary step included, >= 1.
            priority: of every item, finite and >= 0, a function of the episode (a nest of arrays [T, ...]), or "max".
            bypass_partial_episodes: treatment of a longer episode: dropped, counted and logged once (True), or a
                ValueError at its first step too many, after which `reset()` or the next episode continues (False).
            spec: nest of array specs or arrays that the steps of one environment must fit; None for the
                structure of the first step.
            num_envs: as for `TrajectoryObserver`.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.
        """
        self._max_steps = integer("max_sequence_length", max_sequence_length, minimum=1)
        self._bypass = bypass_partial_episodes
        targets = window_targets(table, WindowSpec.whole_episode(), priority)
        super().__init__(replay, targets, spec=spec, mask=False, num_envs=num_envs, options=options)

    def update_priority(self, priority: float) -> None:
        """Set the priority of the episodes that have not ended yet.

        Raises:
            SpecError: it is not a number >= 0. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
        """
        number = check_priority(priority)
        self._check(self._sender)
        self._targets = tuple(replace(target, priority=number) for target in self._targets)
        if self._sender is not None:
            self._mark(self._sender, NewPriority(number))
