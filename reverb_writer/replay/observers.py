"""Observers: call one with every environment step, and the windows appear in the replay server's tables.

Call an observer from one thread at a time; the sender's thread sends the items. A failed call changes nothing: the
next valid step continues the episode.

Source: TF-Agents 0.19, `tf_agents/replay_buffers/reverb_utils.py`; docs/how-to/from-tf-agents.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reverb_writer.arguments import check_priority, integer, table_names
from reverb_writer.keywords import takes
from reverb_writer.replay.connection import ReplayConnection
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.observer import Observer
from reverb_writer.writing.stream_options import StreamKeywords, StreamOptions
from reverb_writer.writing.window_target import Priority, WindowTarget

if TYPE_CHECKING:
    from typing_extensions import Unpack


class WindowObserver(Observer):
    """An observer that writes fixed-length windows."""

    @takes(StreamOptions)
    def __init__(
        self,
        replay: Any,
        table: str | Sequence[str],
        sequence_length: int,
        stride_length: int = 1,
        priority: Priority = 1.0,
        *,
        end_of_episode: EndOfEpisode | str = EndOfEpisode.DROP,
        spec: Any = None,
        num_envs: int | None = None,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables; the first complete item opens the stream.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: the table, or several tables that get the same windows.
            sequence_length: L, steps in a window, >= 1.
            stride_length: S, steps between the starts of two windows, >= 1.
            priority: number for each item, finite and >= 0; or a function of the window (a nest of arrays [L, ...]),
                and of the kinds of its rows (uint8 [L]) if it takes two arguments; or "max", the largest priority that
                this process, or the learner whose `Variables` it reads, has set so far in the tables, 1.0 at first.
                The observer's own thread calls the function
                when it encodes the window; if the function fails, the window is lost and counted. The first is logged.
            end_of_episode: treatment of the last steps of an episode, see `EndOfEpisode`.
            spec: nest of array specs or arrays that the steps of one environment must fit; None for the
                structure of the first step.
            num_envs: N, for environments that step together: leaves are [N, ...], and each environment has its own
                episodes. None for steps without a batch dimension.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.

        Raises:
            SpecError: an argument is invalid.
            StructureError: a table does not exist; names the tables that exist.
            ServerUnavailableError: no server answers within the time-out.
        """
        length = integer(
            "sequence_length", sequence_length, minimum=1, hint="An `EpisodeObserver` writes whole episodes."
        )
        window = WindowSpec(length, stride_length, end_of_episode)
        target = WindowTarget(window, table_names(table), priority, spans_episodes=self._spans_episodes)
        super().__init__(replay, ReplayConnection, target, spec=spec, num_envs=num_envs, options=options)


class TrajectoryObserver(WindowObserver):
    """Write fixed-length windows that never cross an episode's end.

    By default the last steps of an episode are dropped if they fill no window; `end_of_episode` changes this.
    Successor of TF-Agents' `ReverbAddTrajectoryObserver`. Call it from one thread at a time; a context manager.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, stride_length=10)
        for step in episode:
            observer(step)
        observer.close()

        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20, num_envs=64)
        observer(
            {"observation": observation, "action": action, "reward": reward},
            terminated=terminated, truncated=truncated, final_observation=next_observation,
        )
    """


class SequenceObserver(WindowObserver):
    """Write fixed-length windows over the whole stream of steps, across the ends of episodes.

    The stream ends at `reset()`, where `end_of_episode` applies. Successor of TF-Agents'
    `ReverbTrajectorySequenceObserver`; Acme's CONTINUE.
    """

    _spans_episodes = True


class EpisodeObserver(Observer):
    """Write each episode as one item of its own length; its boundary step writes the item.

    The call with which an episode becomes too long raises `SpecError`; the episode's later steps are dropped and
    counted. Successor of TF-Agents' `ReverbAddEpisodeObserver`.
    """

    @takes(StreamOptions)
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
        """Find the tables; errors as for `TrajectoryObserver`.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: the table, or several tables.
            max_sequence_length: largest number of steps in an episode, including the boundary step, >= 1.
            priority: number for each item, finite and >= 0; or a function of the episode (a nest of arrays [T, ...]);
                or "max".
            bypass_partial_episodes: if True, a longer episode is dropped, counted and logged once. If False, its first
                excess step raises `SpecError`; `reset()` or the next episode continues.
            spec: nest of array specs or arrays that the steps of one environment must fit; None for the
                structure of the first step.
            num_envs: as for `TrajectoryObserver`.
            **options: time-out, bounds and policies of the stream: the fields of `StreamOptions`.
        """
        self._max_steps = integer("max_sequence_length", max_sequence_length, minimum=1)
        self._bypass = bypass_partial_episodes
        window = WindowSpec.whole_episode()
        target = WindowTarget(window, table_names(table), priority, max_steps=self._max_steps)
        super().__init__(replay, ReplayConnection, target, spec=spec, num_envs=num_envs, options=options)

    def update_priority(self, priority: float) -> None:
        """Set the priority of all episodes that have not ended yet.

        Raises:
            SpecError: the priority is not a number >= 0. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
        """
        number = check_priority(priority)
        self._check(self._sender)
        self._target = replace(self._target, priority=number)
        if self._sender is not None:
            self._mark(self._sender, number)
