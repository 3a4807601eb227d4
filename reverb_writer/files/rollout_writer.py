"""Write the steps of environments as trajectories on disk."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.episodes import Episode
from reverb_writer.errors import ClosedError, SpecError, StructureError
from reverb_writer.files.manifest import End, Manifest, RowLayout
from reverb_writer.files.trajectory_file import PREFIX, SUFFIX, remove_abandoned, write_trajectory
from reverb_writer.leaves import env_flags
from reverb_writer.nests import common_length, fields_of
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.steps import StepStructure

Array = npt.NDArray[Any]

_Outcome: TypeAlias = Mapping[str, bool | None]
"""`terminated` and `truncated`, where the caller gave them."""

_FIRST_LENGTH = 64  # initial capacity, in steps per environment


class RolloutWriter:
    """Write each episode as one trajectory, which readers see as soon as it is complete.

    Any number of writers, in any number of processes, may write to one directory. The current episode of each
    environment is in memory until it ends; call `end_episode` if it never ends by itself. Steps are copied. Call the
    writer, a context manager, from one thread at a time.

    Example:
        with RolloutWriter("demos", metadata={"env": "CartPole-v1"}) as writer:
            for step in episode:
                writer(step)
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        num_envs: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the directory if it does not exist, and remove partial files of killed writers.

        Args:
            data_dir: the directory of the trajectories.
            num_envs: N if steps have leaves [N, ...], one row per environment, as for `TrajectoryObserver`.
            metadata: JSON to store with each trajectory, such as the environment's name.

        Raises:
            SpecError: an argument is out of range or of the wrong type.
            OSError: the directory cannot be made.
        """
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        try:
            self._metadata = json.loads(json.dumps(dict(metadata or {})))
        except (TypeError, ValueError) as error:
            raise SpecError(f"`metadata` must be JSON: {error}") from error
        self.data_dir = Path(data_dir)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.data_dir)
        self._id = secrets.token_hex(4)
        self._last_ns = 0
        self._num_steps = 0
        self._num_written = 0
        self._is_open = True
        self._steps: tuple[StepStructure, RowLayout] | None = None  # None before the first step
        self._all_envs = np.arange(self.num_envs or 1)
        self._blocks: list[Array] = []  # steps of the current episodes, [N, capacity, ...] per leaf
        self._lengths = np.zeros(self.num_envs or 1, np.intp)  # [N], steps of each current episode

    def __repr__(self) -> str:
        return f"<RolloutWriter to {self.data_dir}: {self._num_written} trajectories, {self._num_steps} steps>"

    def __call__(
        self,
        step: Any,
        *,
        end_of_episode: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        final_observation: Any = None,
        env_mask: Any = None,
    ) -> None:
        """Write a step.

        Args:
            step: any nest of arrays; leaves [N, ...] with `num_envs`.
            end_of_episode: whether the step is the last of its episode, [N] with `num_envs`; None to read it from
                `terminated` and `truncated`, or from the step's `step_type` or `is_last`.
            terminated: whether the environment ended the episode, [N] with `num_envs`.
            truncated: whether a limit ended the episode, [N] with `num_envs`.
            final_observation: the observation after the step, like `observation`. Where an episode ends, a boundary
                step follows, with this observation and zeros in the other leaves, as in RLDS.
            env_mask: whether each environment has a step, [N] with `num_envs`; None for all.

        Raises:
            StructureError: a leaf, named by path, differs from the first step's. Nothing changed.
            SpecError: `env_mask` without `num_envs`. Nothing changed.
            ClosedError: after `close()`.
            OSError: the disk failed, for example because it is full. Episodes that were not written are dropped; other
                environments continue.
        """
        self._check_open()
        num_envs = self.num_envs
        flags = {"end_of_episode": end_of_episode, "terminated": terminated, "truncated": truncated}
        given = {name: env_flags(name, flag, num_envs) for name, flag in flags.items() if flag is not None}
        known = self._steps or self._learn(step)
        structure, _ = known
        leaves = structure.flatten(step, self._num_steps)
        last = given.get("end_of_episode")
        if last is None and given:
            last = np.logical_or.reduce([*given.values()])
        elif last is None:
            last = np.atleast_1d(np.asarray(structure.ends_episode(leaves), bool))
        final = None if final_observation is None else self._boundary_step(structure, final_observation)
        env_ids = self._all_envs
        present: Any = True  # [N], whether each environment has a step; True for all
        if env_mask is not None:
            if num_envs is None:
                raise SpecError("`env_mask` is for steps of several environments. Pass `num_envs` to `RolloutWriter`.")
            present = env_flags("env_mask", env_mask, num_envs)
            last, env_ids = last & present, np.flatnonzero(present)
        ended = last.nonzero()[0].tolist()
        outcomes: dict[int, _Outcome] = {
            env: {name: bool(flag[env]) for name, flag in given.items() if name != "end_of_episode"} for env in ended
        }
        self._steps = known
        self._put(leaves, env_ids)
        self._num_steps += 1
        if not ended:
            self._lengths += present
            return
        try:
            self._lengths += present
            if final is not None:
                self._put(final, np.array(ended))
                self._lengths[ended] += 1
            self._write(outcomes, End.STEP, has_boundary=final is not None)
        finally:
            self._lengths[ended] = 0  # also after an interrupt: the next step begins an episode

    def end_episode(self, *, end: End | str = End.CUT, env_ids: Sequence[int] | None = None) -> None:
        """End the current episodes of the environments `env_ids`, or of all, as the observer's `reset` does.

        `end` is the kind of their end: by default they were cut.

        Raises:
            OSError: the disk failed; episodes that were not written are dropped.
        """
        how, last = End(end), len(self._lengths) - 1
        chosen = [integer("env_ids", env, minimum=0, maximum=last) for env in env_ids or ()]
        ended = self._all_envs.tolist() if env_ids is None else chosen
        try:
            self._write({env: {} for env in ended}, how)
        finally:
            self._lengths[ended] = 0

    def save(
        self,
        steps: Any,
        *,
        terminated: bool | None = None,
        truncated: bool | None = None,
        has_boundary: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a whole trajectory at once, and return its file.

        Args:
            steps: nest with leaves [T, ...], T >= 1, whose steps are like this writer's first step.
            terminated: whether the environment ended the trajectory.
            truncated: whether a limit ended the trajectory.
            has_boundary: whether the last step is a boundary step, even if it has no field for that.
            metadata: JSON, in addition to the writer's.

        Raises:
            ClosedError: the writer is closed.
            StructureError: the leaves differ in length, or from earlier steps. Nothing changed.
            OSError: the disk failed, for example because it is full.
        """
        self._check_open()
        num_steps = common_length(steps, "`steps`")
        if not num_steps:
            raise StructureError("`steps` must have one step or more, got leaves without rows.")
        structure = StepStructure(steps, batch_size=num_steps)
        example = tree.map_structure(lambda leaf: np.asarray(leaf)[0], steps)
        known = self._steps or self._learn(example, is_spec=True)
        found, expected = ([*zip(each.paths, each.dtypes, each.shapes, strict=True)] for each in (structure, known[0]))
        if found != expected:
            raise StructureError(f"`steps` has leaves {found}, this writer's are {expected}.")
        self._steps = known
        columns = [np.asarray(leaf) for leaf in structure.flatten(steps, self._num_steps)]
        self._num_steps += num_steps
        outcome = {"terminated": terminated, "truncated": truncated}
        return self._write_columns(columns, End.STEP, outcome, metadata or {}, has_boundary=has_boundary)

    def write_episode(self, episode: Episode) -> Path:
        """Write `episode`, whole or a cut chunk, as one trajectory, and return its file.

        Raises:
            ReverbWriterError, OSError: as for `save`; IncompleteError if the episode has no step.
        """
        terminated = episode.is_terminated
        truncated = episode.is_truncated or not terminated  # a cut episode has a next state
        return self.save(episode.steps(), terminated=terminated, truncated=truncated, has_boundary=True)

    def close(self) -> None:
        """Write the unfinished episodes, marked as cut, and close. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.end_episode()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError("the writer is closed. Make another one for the same directory to continue.")

    def _learn(self, example: Any, *, is_spec: bool = False) -> tuple[StepStructure, RowLayout]:
        """Return the structure of all steps, given an example: the first step, or a spec without N."""
        structure = StepStructure(example, batch_size=self.num_envs, is_spec=is_spec)
        specs = [ArraySpec(shape, dtype) for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)]
        return structure, RowLayout.of(structure.pack(specs))

    def _put(self, leaves: Sequence[Any], env_ids: Array) -> None:
        """Append a step of some environments, leaves [N, ...], without a change of `_lengths`."""
        if self.num_envs is None:  # integers index faster than arrays
            at = int(self._lengths[0])
            self._make_room(at)
            for block, leaf in zip(self._blocks, leaves, strict=True):
                block[0, at] = leaf
            return
        self._make_room(int(self._lengths.max()))
        ends, is_all = self._lengths[env_ids], len(env_ids) == len(self._lengths)
        for block, leaf in zip(self._blocks, leaves, strict=True):
            block[env_ids, ends] = leaf if is_all else leaf[env_ids]

    def _make_room(self, length: int) -> None:
        """Allocate the blocks, or double them if they are full; the new half is overwritten later."""
        assert self._steps is not None  # noqa: S101  # because there is a step
        if self._blocks and length < self._blocks[0].shape[1]:
            return
        structure, _ = self._steps
        room = len(self._lengths), max(2 * length, _FIRST_LENGTH)
        of_leaves = zip(structure.dtypes, structure.shapes, strict=True)
        blocks = [np.zeros(room + shape, dtype) for dtype, shape in of_leaves]  # unused rows take no memory
        for block, former in zip(blocks, self._blocks, strict=bool(self._blocks)):
            block[:, :length] = former
        self._blocks = blocks

    def _write(self, outcomes: Mapping[int, _Outcome], end: End, *, has_boundary: bool = False) -> None:
        """Write the non-empty episodes of some environments; after an OSError the others are still written."""
        errors = []
        for env, outcome in outcomes.items():
            length = int(self._lengths[env])
            if length:
                try:
                    columns = [block[env, :length] for block in self._blocks]
                    self._write_columns(columns, end, outcome, {}, has_boundary=has_boundary)
                except OSError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _write_columns(
        self,
        columns: Sequence[Array],
        end: End,
        outcome: _Outcome,
        metadata: Mapping[str, Any],
        *,
        has_boundary: bool = False,
    ) -> Path:
        assert self._steps is not None  # noqa: S101  # because there is a step
        structure, layout = self._steps
        last_rows = structure.pack([column[-2:] for column in columns])
        metadata = {**self._metadata, **metadata}
        manifest = Manifest.of(len(columns[0]), last_rows, end, layout, metadata, **outcome, has_boundary=has_boundary)
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        path = self.data_dir / f"{PREFIX}{self._last_ns:020d}_{self._id}_{self._num_written:08d}{SUFFIX}"
        write_trajectory(path, manifest, columns)
        self._num_written += 1
        return path

    def _boundary_step(self, structure: StepStructure, observation: Any) -> Sequence[Any]:
        """Return the leaves of a padding step with this observation, [...], or [N, ...] with `num_envs`."""
        batch = () if self.num_envs is None else (self.num_envs,)
        step = structure.pack([np.broadcast_to(leaf, batch + np.shape(leaf)) for leaf in structure.padding_step()])
        fields = fields_of(step) or {}
        if "observation" not in fields:
            raise StructureError(f"`final_observation` needs `observation` in steps, got {', '.join(fields) or step}.")
        replaced = {**fields, "observation": observation}
        return structure.flatten(type(step)(**replaced) if isinstance(step, tuple) else replaced, self._num_steps)
