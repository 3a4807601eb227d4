"""TF-Agents' three Reverb observers by name, for a one-line migration: no TensorFlow, the same windows.

    from tf_agents.replay_buffers.reverb_utils import ReverbAddTrajectoryObserver    # before
    from reverb_writer.tf_agents import ReverbAddTrajectoryObserver                  # after

Arguments, properties and messages are the same as in TF-Agents 0.19. Further options of this package's observers are
keyword arguments: `timeout_s`, `end_of_episode`, `windows`, ...

    name here                          subclass of
    ---------------------------------  -------------------
    ReverbAddTrajectoryObserver        TrajectoryObserver
    ReverbTrajectorySequenceObserver   SequenceObserver
    ReverbAddEpisodeObserver           EpisodeObserver

The same calls write the same items, except for four faults of TF-Agents; docs/how-to/from-tf-agents.md has an example
per fault.

Source: TF-Agents 0.19, `tf_agents/replay_buffers/reverb_utils.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from reverb_writer.errors import ClosedError, SpecError, StructureError
from reverb_writer.nests import named_leaves, packer
from reverb_writer.replay.client import as_client
from reverb_writer.replay.observers import EpisodeObserver, SequenceObserver, TrajectoryObserver, WindowObserver
from reverb_writer.windows import EndOfEpisode
from reverb_writer.writing.observer import Observer, TooFewStepsError
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.stream_life import Connection
from reverb_writer.writing.window_target import Priority

__all__ = [
    "FlattenedTrajectoryError",
    "NoWriterError",
    "ReverbAddEpisodeObserver",
    "ReverbAddTrajectoryObserver",
    "ReverbTrajectorySequenceObserver",
]


class NoWriterError(ClosedError, ValueError):
    """The observer is closed; also a ValueError, as in TF-Agents."""


class FlattenedTrajectoryError(StructureError, TypeError):
    """A trajectory is a flat list of leaves, and its structure is unknown."""


class _ReverbObserver(Observer):
    """The common part of TF-Agents' observers; must precede one of this package's observers among the bases."""

    @property
    def py_client(self) -> Any:
        """The client that the caller passed."""
        return self.client

    def get_table_signature(self) -> Any:
        """Return the signature of the first table from `py_client`.

        Returns:
            A nest of `tf.TensorSpec` from a `reverb.Client`, otherwise of `ArraySpec`; None for a table without one.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: no answer in time. A `reverb.Client` has its own errors.
        """
        with contextlib.ExitStack() as own:
            client = self.py_client
            if not hasattr(client, "server_info"):
                client = own.enter_context(as_client(client)[0])
            # The time-out is the first argument of both methods, under different names; dm-reverb wants an integer.
            tables = client.server_info(math.ceil(self._timeout_s))
            return tables[self._target.tables[0]].signature

    def __call__(self, step: Any, end_of_episode: Any = None, env_mask: Any = None, **ends: Any) -> None:
        """Write a step.

        Args:
            step: TF-Agents' or this package's `Trajectory`, without batch dimension. A list or tuple is a flattened
                trajectory: leaves in the order of `tree.flatten`, which are packed into the structure of the first
                step or of the table's signature.
            end_of_episode: whether the step is the last of its episode; None to read `step_type`.
            env_mask: as for `TrajectoryObserver`, with `num_envs`.
            **ends: `terminated`, `truncated` and `final_observation`, as for `TrajectoryObserver`.

        Raises:
            NoWriterError: the observer is closed.
            FlattenedTrajectoryError: the step is flat, and its structure is unknown or has other leaves.
            StructureError: a leaf, named by path, differs from the first step's.
            ReplayTimeoutError: no room in flight, and no progress until the time-out.
        """
        if type(step) in (list, tuple):
            step = self._unflatten(step)
        super().__call__(step, end_of_episode, env_mask, **ends)

    def reset(
        self, write_cached_steps: bool = True, *, discard: bool = False, env_ids: Sequence[int] | None = None
    ) -> None:
        """End the episode here; open the observer if it is closed.

        Args:
            write_cached_steps: whether to write the steps that are in no window yet.
            discard: the opposite, as in this package's observers.
            env_ids: as for `TrajectoryObserver`, with `num_envs`.

        Raises:
            SpecError: too few steps are cached for a window, without padding. Nothing changed.
        """
        self.open()
        try:
            super().reset(discard=discard or not write_cached_steps, env_ids=env_ids)
        except TooFewStepsError as error:
            raise SpecError(
                "write_cached_steps is True, but not enough steps remain in the cache to write an item with "
                f"sequence_length={self._target.length}, consider enabling pad_end_of_episodes."
            ) from error

    def _check(self, sender: Sender | None) -> Connection:
        try:
            return super()._check(sender)
        except ClosedError as error:
            raise NoWriterError(f"Could not obtain writer from py_client. {error}") from error

    def _unflatten(self, leaves: Sequence[Any]) -> Any:
        example = self.get_table_signature() if self._structure is None else self._structure.example
        if not hasattr(example, "step_type"):
            raise FlattenedTrajectoryError(
                f"a flattened trajectory of {len(leaves)} leaves, but which leaf is the step type is not known. Pass a "
                "`Trajectory` first, or give the table a signature."
            )
        paths, _ = named_leaves(example, "first step")
        if len(leaves) != len(paths):
            raise FlattenedTrajectoryError(
                f"a flattened trajectory of {len(leaves)} leaves, expected {len(paths)}: {', '.join(paths)}."
            )
        return packer(example)(leaves)


class _ReverbWindowObserver(_ReverbObserver, WindowObserver):
    """The constructor of TF-Agents' observers of fixed-length windows."""

    def __init__(
        self,
        py_client: Any,
        table_name: str | Sequence[str],
        sequence_length: int,
        stride_length: int = 1,
        priority: Priority = 1,
        pad_end_of_episodes: bool = False,
        tile_end_of_episodes: bool = False,
        *,
        end_of_episode: EndOfEpisode | str | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream.

        Args:
            py_client: a `reverb.Client`, an `rw.Client` or an address.
            table_name: the table, or several that get the same windows.
            sequence_length: L, steps in a window, >= 1.
            stride_length: S, steps from one window's start to the next one's, >= 1.
            priority: priority of every item, finite and >= 0, or a function of the window.
            pad_end_of_episodes: whether to pad an episode that is shorter than L.
            tile_end_of_episodes: whether to pad until the last window begins with the last step; needs the former.
            end_of_episode: one of this package's other modes, instead of the two booleans.
            **options: the other keyword arguments of `TrajectoryObserver`.

        Raises:
            SpecError: an argument can never work; a ValueError.
            StructureError: a table does not exist; a ValueError.
            ServerUnavailableError: no server answers within the time-out.
        """
        mode = _end_of_episode_mode(end_of_episode, pad=pad_end_of_episodes, tile=tile_end_of_episodes)
        super().__init__(
            py_client, table_name, sequence_length, stride_length, priority, end_of_episode=mode, **options
        )


class ReverbAddTrajectoryObserver(_ReverbWindowObserver, TrajectoryObserver):
    """Write fixed-length windows that never cross an episode's end; see `TrajectoryObserver`."""


class ReverbTrajectorySequenceObserver(_ReverbWindowObserver, SequenceObserver):
    """Write fixed-length windows over the whole stream of steps, across ends of episodes; see `SequenceObserver`."""


class ReverbAddEpisodeObserver(_ReverbObserver, EpisodeObserver):
    """Write each episode as one item of its own length; see `EpisodeObserver`."""

    def __init__(
        self,
        py_client: Any,
        table_name: str | Sequence[str],
        max_sequence_length: int,
        priority: Priority = 1,
        bypass_partial_episodes: bool = False,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream.

        Args:
            py_client: a `reverb.Client`, an `rw.Client` or an address.
            table_name: the table, or several.
            max_sequence_length: maximum number of steps in an episode, including the boundary step, >= 1.
            priority: priority of every item, finite and >= 0, or a function of the episode.
            bypass_partial_episodes: whether a longer episode is dropped, not refused.
            **options: further arguments of `EpisodeObserver`.

        Raises:
            SpecError, StructureError, ServerUnavailableError: as for `ReverbAddTrajectoryObserver`.
        """
        super().__init__(py_client, table_name, max_sequence_length, priority, bypass_partial_episodes, **options)


def _end_of_episode_mode(mode: EndOfEpisode | str | None, *, pad: bool, tile: bool) -> EndOfEpisode:
    """Return the mode for TF-Agents' two booleans.

    >>> _end_of_episode_mode(None, pad=True, tile=True)
    <EndOfEpisode.TILE: 'tile'>
    """
    if tile and not pad:
        raise SpecError("Must set `pad_end_of_episodes=True` when using `tile_end_of_episodes`")
    if mode is None:
        return EndOfEpisode.TILE if tile else EndOfEpisode.PAD if pad else EndOfEpisode.DROP
    if pad:
        raise SpecError(
            f"`end_of_episode` {mode!r} and `pad_end_of_episodes` say the same thing twice. Leave the boolean out."
        )
    return EndOfEpisode(mode)
