"""One observer for many environments that step together: lanes of independent episodes over one stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import StructureError
from reverb_writer.steps import StepStructure
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.observer_base import Observer, columns_of, packer, spec_of
from reverb_writer.writing.priorities import Priority
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.session import StreamOptions
from reverb_writer.writing.vector_writer import VectorWriter
from reverb_writer.writing.window_targets import WindowTarget, end_of_episode_mode, window_targets

__all__ = ["VectorObserver"]

_REQUEST_ITEMS = 128
"""Windows of a lane that are encoded together: smaller than one observer's, for there are many lanes."""


class VectorObserver(Observer):
    """Write the windows of N environments; each is a lane with episodes of its own.

    A call takes leaves [N, ...] and costs little more than one for a single environment: a leaf is copied to all lanes
    at once. Called from one thread at a time; a context manager.

    Example:
        observer = rw.VectorObserver(client, "replay", sequence_length=20, num_envs=64)
        observer({"obs": obs, "reward": reward}, end_of_episode=terminated | truncated)
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
        num_envs: int,
        end_of_episode: EndOfEpisode | str | None = None,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        timeout_s: float | None = None,
        **options: Any,
    ) -> None:
        """Find the tables and open the stream; arguments and errors as for `TrajectoryObserver`, but for two.

        `num_envs` is N, the environments that step together, >= 1. `spec` is of one of them, without N.
        """
        self._num_envs = integer("num_envs", num_envs, minimum=1)
        self._all = np.arange(self._num_envs)
        self._lanes: VectorWriter | None = None
        mode = end_of_episode_mode(end_of_episode, pad=pad_end_of_episodes, tile=tile_end_of_episodes)
        targets = window_targets(table_name, sequence_length, stride_length, mode, priority, windows)
        super().__init__(client, targets, mask=mask, options=StreamOptions(timeout_s=timeout_s, **options))
        if spec is not None:
            self._start(spec, is_spec=True)

    @property
    def num_envs(self) -> int:
        """N, the environments that step together."""
        return self._num_envs

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Write a step of every environment, or of some.

        Args:
            step: a `Trajectory`, or any nest, with leaves [N, ...]; copied.
            end_of_episode: [N] booleans, which of them are the last of their episode; None to read `step_type` or
                `is_last`.
            env_mask: [N] booleans, which environments have a step here; the rows of the others are not read. None for
                all.

        Raises:
            StructureError: a leaf differs from the first step's; named by path. Nothing changed.
            ReplayTimeoutError: no room in flight, and nothing moved for the time-out; names the cause. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
        """
        session = self._session
        session.wait_for_room()
        last = None if end_of_episode is None else self._one_each("end_of_episode", end_of_episode)
        chosen = self._all if env_mask is None else np.flatnonzero(self._one_each("env_mask", env_mask))
        structure, writer = self._structure, self._lanes
        if structure is None or writer is None:
            structure, writer = self._start(step)
        leaves = structure.flatten(step, self._num_before + writer.num_calls)
        if last is None:
            last = structure.ends_episode(leaves)
        if self._mask:
            leaves = [*leaves, np.ones(self._num_envs, bool)]
        session.tell(writer.append(leaves, last, chosen))

    def reset(self, write_cached_steps: bool = True, env_ids: Sequence[int] | None = None) -> None:
        """End the episodes of some environments here.

        Args:
            write_cached_steps: as for `TrajectoryObserver.reset`; fewer steps than a window are dropped and counted.
            env_ids: numbers of the environments, 0..N-1; None for all.
        """
        self._session.stream.check()
        last = self._num_envs - 1
        env_ids = range(last + 1) if env_ids is None else env_ids
        chosen = [integer("env_ids", n, minimum=0, maximum=last) for n in env_ids]
        if self._lanes is not None:
            self._session.wait_for_room()
            ended = self._lanes.end_episodes(chosen, align=write_cached_steps, discard=not write_cached_steps)
            self._session.tell(ended)

    def _start(self, example: Any, *, is_spec: bool = False) -> tuple[StepStructure, VectorWriter]:
        structure = self._structure or StepStructure(example, batch_size=self._num_envs, is_spec=is_spec)
        columns = columns_of(structure, self._mask)
        self._session.check_columns(columns)
        self._session.store_spec(spec_of(structure, self._mask))
        options, targets = self._session.options, self._session.targets
        writers = [
            SequenceWriter(
                self._session.stream,
                columns.dtypes,
                columns.shapes,
                targets,
                padding_step=[*structure.padding_step(), *([np.False_] if self._mask else [])],
                pack=packer(structure, self._mask),
                chunk_length=options.chunk_length,
                request_items=_REQUEST_ITEMS,
            )
            for _ in range(self._num_envs)
        ]
        lanes = VectorWriter(writers)
        self._session.add_writer(lanes)
        self._num_before = self._session.num_steps // self._num_envs
        self._structure, self._lanes = structure, lanes
        return structure, lanes

    def _one_each(self, name: str, flags: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(flags, bool)
        if array.shape != (self._num_envs,):
            raise StructureError(f"`{name}` has shape {array.shape}, expected ({self._num_envs},): one an environment.")
        return array

    def _end_all(self) -> None:
        if self._lanes is not None:
            self._session.tell(self._lanes.end_episodes(range(self._num_envs), discard=True))
        self._lanes = None
