"""Write the steps of environments as trajectories on disk."""

from __future__ import annotations

import functools
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import ClosedError, SpecError, StructureError
from reverb_writer.files.column_encoding import choose_encodings
from reverb_writer.files.episode_files import EpisodeFiles, Layout, Outcome
from reverb_writer.files.manifest import Encoding, End, encode_nest
from reverb_writer.nests import common_length
from reverb_writer.protocol.tensors import dtype_number
from reverb_writer.steps import StepStructure, step_bytes

_T = TypeVar("_T")

_PART_BYTES = 4 << 20
_BUFFER_BYTES = 256 << 20  # of all environments together
_MIN_PART_LENGTH, _MAX_PART_LENGTH = 16, 1024


class PlannedStep(NamedTuple):
    """A step that was checked and not written yet."""

    leaves: Sequence[Any]  # [...], or [N, ...] with `num_envs`
    outcomes: Mapping[int, Outcome]  # how the episodes end that end with this step, by environment
    final: Sequence[Any] | None  # leaves [N, ...] of a boundary step that follows where an episode ends, or None
    first: tuple[StepStructure, Layout] | None  # of all steps, if none was written yet
    env_ids: npt.NDArray[np.signedinteger[Any]] | None  # the environments that have a step; None for all
    is_boundary: bool = False  # whether it is a boundary step itself, though its leaves may not tell


class RolloutWriter:
    """Write each episode as one trajectory, which readers see as soon as it is complete.

    Any number of writers, in any number of processes, may write to one directory. At most `part_length` steps of each
    environment are in memory. Steps are copied. Call it from one thread at a time. It is a context manager.

    Example:
        with RolloutWriter("demos", metadata={"env": "CartPole-v1"}) as writer:
            for step in episode:
                writer(step)

    Source: the savers of legged-robot training also make one folder per trajectory, and one file per fixed number of
    frames.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        num_envs: int | None = None,
        spec: Any = None,
        encodings: Mapping[str, str | Encoding] | None = None,
        metadata: Mapping[str, Any] | None = None,
        part_length: int | None = None,
    ) -> None:
        """Make the directory if it does not exist.

        Args:
            data_dir: the directory of the trajectories.
            num_envs: N if steps have leaves [N, ...], one row per environment, as for `TrajectoryObserver`.
            spec: nest of array specs or arrays that steps must look like, without N; None to learn them from the first
                step.
            encodings: by leaf name, such as `{"observation/depth": "normalized_image"}`: "raw", "deflate", lossless, or
                "normalized_image", floats in [0, 1] as uint8, within 1/255. The default for images of uint8
                is "deflate".
            metadata: JSON to store with each trajectory, such as the environment's name.
            part_length: steps in a file, which is what a reader holds in memory; None for 4 MiB, at most 1024.

        Raises:
            SpecError: an argument is out of range or of the wrong type.
            OSError: the directory cannot be made.
        """
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._part_length = None if part_length is None else integer("part_length", part_length, minimum=1)
        self._encodings = dict(encodings or {})
        try:
            self._metadata = json.loads(json.dumps(dict(metadata or {})))
        except (TypeError, ValueError) as error:
            raise SpecError(f"`metadata` must be JSON: {error}") from error
        self.data_dir = Path(data_dir)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._id = secrets.token_hex(4)
        self._last_ns = 0
        self._num_steps = 0
        self._num_written = 0
        self._is_open = True
        self._structure: StepStructure | None = None
        self._layout = Layout(None, (), 0)
        self._episodes: list[EpisodeFiles] = []
        self._blocks: list[npt.NDArray[Any]] = []
        if spec is not None:
            self._start(*self._new_layout(spec, is_spec=True))

    def __repr__(self) -> str:
        return f"<RolloutWriter to {self.data_dir}: {self._num_written} trajectories, {self._num_steps} steps>"

    @property
    def num_trajectories(self) -> int:
        """The number of trajectories that are complete on disk."""
        return self._num_written

    def __call__(self, step: Any, **end: Any) -> None:
        """Write a step.

        Args:
            step: any nest of arrays; leaves [N, ...] with `num_envs`.
            **end: as for `plan`.

        Raises:
            StructureError: a leaf differs from the first step's; named by path. Nothing changed.
            OSError: the disk failed, for example because it is full. The current episode is dropped.
            ClosedError: after `close()`.
        """
        self.write(self.plan(step, **end))

    def plan(
        self,
        step: Any,
        *,
        end_of_episode: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        final_observation: Any = None,
        env_mask: Any = None,
    ) -> PlannedStep:
        """Check a step without writing it.

        Args:
            step: any nest of arrays; leaves [N, ...] with `num_envs`.
            end_of_episode: whether it is the last of its episode, [N] with `num_envs`; None to read `step_type`,
                `is_last`, or the next two arguments.
            terminated: whether the environment ended the episode, [N] with `num_envs`.
            truncated: whether a limit ended it.
            final_observation: the observation after the step, like `observation`, where an episode ends: a boundary
                step with it and zeros in the other leaves follows, as in RLDS.
            env_mask: which environments have a step here, [N] with `num_envs`; None for all.

        Raises:
            StructureError, ClosedError: as for a call. Nothing changed.
            SpecError: `env_mask` without `num_envs`. Nothing changed.
        """
        if not self._is_open:
            raise ClosedError("the writer is closed. Call `open()` to write again.")
        flags = {"end_of_episode": end_of_episode, "terminated": terminated, "truncated": truncated}
        given = {name: self._flags(name, flag) for name, flag in flags.items() if flag is not None}
        structure = self._structure
        first: tuple[StepStructure, Layout] | None = None
        if structure is None:
            first = self._new_layout(step)
            structure = first[0]
        leaves = structure.flatten(step, self._num_steps)
        last = given.get("end_of_episode")
        if last is None and given:
            last = np.logical_or.reduce([*given.values()])
        if last is None:
            last = np.atleast_1d(np.asarray(structure.ends_episode(leaves), bool))
        final = None if final_observation is None else self._boundary_step(structure, final_observation)
        env_ids = None
        if env_mask is not None:
            if self.num_envs is None:
                raise SpecError("`env_mask` is for steps of several environments. Pass `num_envs` to `RolloutWriter`.")
            present = self._flags("env_mask", env_mask)
            last, env_ids = last & present, np.flatnonzero(present)
        outcomes = {
            int(env): Outcome(*(bool(given[key][env]) if key in given else None for key in ("terminated", "truncated")))
            for env in np.flatnonzero(last)
        }
        return PlannedStep(leaves, outcomes, final, first, env_ids)

    def write(self, planned: PlannedStep) -> None:
        """Write `planned`, a step that `plan` has checked.

        Raises:
            OSError: the disk failed, for example because it is full. The episodes that it refused are dropped, those of
                other environments go on.
        """
        if self._structure is None and planned.first is not None:
            self._start(*planned.first)
        self._num_steps += 1
        episodes = self._episodes
        if self.num_envs is None:
            for block, leaf in zip(self._blocks, planned.leaves, strict=True):
                block[0, episodes[0].fill] = leaf
        else:
            env_ids = np.arange(self.num_envs)
            if planned.env_ids is not None:
                env_ids, episodes = planned.env_ids, [episodes[env] for env in planned.env_ids]
            fills = [episode.fill for episode in episodes]
            for block, leaf in zip(self._blocks, planned.leaves, strict=True):
                block[env_ids, fills] = leaf if planned.env_ids is None else leaf[env_ids]
        try:
            _for_each(EpisodeFiles.advance, episodes)
        finally:
            if planned.outcomes:
                _for_each(functools.partial(self._end_with, planned), planned.outcomes)

    def _end_with(self, planned: PlannedStep, env: int) -> None:
        """End the episode of an environment after this step."""
        episode, has_final = self._episodes[env], planned.final is not None
        try:
            if planned.final is not None:
                for block, leaf in zip(self._blocks, planned.final, strict=True):
                    block[env, episode.fill] = leaf[env]
                episode.advance()
        finally:
            self._finish(episode, End.STEP, planned.outcomes[env], boundary_step=planned.is_boundary or has_final)

    def end_episode(self, *, end: End | str = End.CUT, env_ids: Sequence[int] | None = None) -> None:
        """End the current episodes of the environments `env_ids`, or of all, as the observer's `reset` does.

        `end` says how they ended: by default they were cut.
        """
        last = max(len(self._episodes) - 1, 0)
        chosen = (
            range(len(self._episodes))
            if env_ids is None
            else [integer("env_ids", n, minimum=0, maximum=last) for n in env_ids]
        )
        how, outcome = End(end), Outcome(None, None)
        _for_each(lambda index: self._finish(self._episodes[index], how, outcome), chosen)

    def save(
        self,
        steps: Any,
        *,
        end: End | str = End.STEP,
        terminated: bool | None = None,
        truncated: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a whole trajectory at once, and return its folder.

        Args:
            steps: nest with leaves [T, ...], T >= 1, each like this writer's first step.
            end: how it ended.
            terminated: whether the environment ended it.
            truncated: whether a limit ended it.
            metadata: JSON, in addition to the writer's.

        Raises:
            ClosedError: the writer is closed.
            StructureError: the leaves differ in length, or from what was written before. Nothing changed.
            OSError: the disk failed, for example because it is full.
        """
        if not self._is_open:
            raise ClosedError("the writer is closed. Call `open()` to write again.")
        num_steps = common_length(steps, "`steps`")
        if not num_steps:
            raise StructureError("`steps` must have one step or more, got leaves without rows.")
        structure = StepStructure(steps, batch_size=num_steps)
        if self._structure is None:
            example = tree.map_structure(lambda leaf: np.asarray(leaf)[0], steps)
            self._start(*self._new_layout(example, is_spec=True))
        specs = [(leaf.name, leaf.dtype, leaf.shape) for leaf in self._layout.leaves]
        found = list(zip(_names(structure), structure.dtypes, structure.shapes, strict=True))
        if found != specs:
            raise StructureError(f"`steps` has leaves {found}, this writer's are {specs}.")
        episode = EpisodeFiles(self.data_dir, self._name, self._layout, ())
        episode.extend([np.asarray(leaf) for leaf in structure.flatten(steps, self._num_steps)])
        self._num_steps += num_steps
        path = self._finish(episode, End(end), Outcome(terminated, truncated), metadata=metadata)
        assert path is not None  # noqa: S101  # there is a step
        return path

    def open(self) -> None:
        """Open the writer again after `close()`; does nothing if it is open."""
        self._is_open = True

    def close(self) -> None:
        """Write the unfinished episodes, marked as cut, and close. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.end_episode()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_layout(self, example: Any, *, is_spec: bool = False) -> tuple[StepStructure, Layout]:
        """Return what all steps have in common with `example`: the first step, or a spec without N."""
        structure = StepStructure(example, batch_size=self.num_envs, is_spec=is_spec)
        names = _names(structure)
        if len(set(names)) != len(names):
            raise StructureError(f"leaves need different names, got {', '.join(names)}. Rename a key that has a slash.")
        for name in names:
            if "\0" in name:
                raise StructureError(f"leaf {name!r}: an .npz file cannot name it. Rename the key that has a NUL.")
        for dtype in structure.dtypes:
            dtype_number(dtype)  # what Reverb cannot store could not be imported
        leaves = choose_encodings(names, structure.dtypes, structure.shapes, self._encodings)
        size = max(step_bytes(structure.dtypes, structure.shapes), 1)
        room = min(_PART_BYTES, _BUFFER_BYTES // (self.num_envs or 1)) // size
        length = self._part_length or min(max(room, _MIN_PART_LENGTH), _MAX_PART_LENGTH)
        return structure, Layout(encode_nest(example), leaves, length)

    def _start(self, structure: StepStructure, layout: Layout) -> None:
        """Set what all steps have in common."""
        num_envs = self.num_envs or 1
        self._blocks = [
            np.zeros((num_envs, layout.part_length, *shape), dtype)
            for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)
        ]
        self._episodes = [
            EpisodeFiles(self.data_dir, self._name, layout, [block[env] for block in self._blocks])
            for env in range(num_envs)
        ]
        self._structure, self._layout = structure, layout

    def _name(self) -> str:
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        return f"trajectory_{self._last_ns:020d}_{self._id}_{self._num_written:08d}"

    def _finish(
        self,
        episode: EpisodeFiles,
        end: End,
        outcome: Outcome,
        *,
        metadata: Mapping[str, Any] | None = None,
        boundary_step: bool = False,
    ) -> Path | None:
        path = episode.finish(end, outcome, {**self._metadata, **(metadata or {})}, boundary_step=boundary_step)
        self._num_written += path is not None
        return path

    def _flags(self, name: str, flags: Any) -> npt.NDArray[np.bool_]:
        array = np.asarray(flags, bool)
        shape = () if self.num_envs is None else (self.num_envs,)
        if array.shape != shape:
            raise StructureError(f"`{name}` has shape {array.shape}, expected {shape}.")
        return array.reshape(-1)

    def _boundary_step(self, structure: StepStructure, observation: Any) -> list[Any]:
        """Return a padding step's leaves with this observation, [N, ...]."""
        inner = [index for index, path in enumerate(structure.paths) if path.split("/")[0] == "observation"]
        values = tree.flatten(observation)
        if len(inner) != len(values):
            raise StructureError(f"`final_observation` has {len(values)} leaves, `observation` of a step {len(inner)}.")
        num_envs = self.num_envs or 1
        leaves = [np.broadcast_to(leaf, (num_envs, *np.shape(leaf))) for leaf in structure.padding_step()]
        for index, value in zip(inner, values, strict=True):
            dtype, shape = structure.dtypes[index], (num_envs, *structure.shapes[index])
            array = np.asarray(value) if self.num_envs is not None else np.asarray(value)[None]
            if array.dtype != dtype or array.shape != shape:
                path = structure.paths[index]
                raise StructureError(
                    f"`final_observation`, leaf `{path}`: {array.dtype} {array.shape}, expected {dtype} {shape}."
                )
            leaves[index] = array
        return leaves


def _for_each(do: Callable[[_T], Any], these: Iterable[_T]) -> None:
    """Do something for each of these, though the disk fails for some; then raise the first error."""
    errors = []
    for one in these:
        try:
            do(one)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _names(structure: StepStructure) -> list[str]:
    return [path or "step" for path in structure.paths]
