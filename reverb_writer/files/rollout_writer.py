"""Write the steps of environments as trajectories on disk."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.arguments import integer
from reverb_writer.episodes import Episode
from reverb_writer.errors import ClosedError, SpecError, StructureError
from reverb_writer.files.episode_kinds import kinds_of_episode
from reverb_writer.files.manifest import Manifest, RowLayout, end_of
from reverb_writer.files.trajectory_file import PREFIX, SUFFIX, remove_abandoned, write_trajectory
from reverb_writer.leaves import env_flags
from reverb_writer.nests import common_length, with_texts
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.rows.kinds import checked_kinds
from reverb_writer.rows.layouts import checked_last_row
from reverb_writer.steps import StepStructure
from reverb_writer.writing.step_kinds import START, Ends, Row, StepKinds, env_ends

Array = npt.NDArray[Any]

_Known: TypeAlias = tuple[StepStructure, RowLayout]

_FIRST_LENGTH = 64  # initial capacity, in steps per environment


class RolloutWriter:
    """Write each episode as one trajectory, which readers see as soon as it is complete.

    Any number of writers, in any number of processes, may write to one directory. The current episode of each
    environment is in memory until it ends; call `end_episode` if it never ends by itself. Steps are copied. Call the
    writer, a context manager, from one thread at a time.

    Example:
        with RolloutWriter("demos", metadata={"env": "CartPole-v1"}) as writer:
            for step in episode:
                writer(step, terminated=terminated, truncated=truncated, final_observation=observation)
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        *,
        num_envs: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        last_row: rows.LastRow | None = None,
    ) -> None:
        """Make the directory if it does not exist, and remove partial files of killed writers.

        Args:
            data_dir: the directory of the trajectories.
            num_envs: N if steps have leaves [N, ...], one row per environment, as for `TrajectoryObserver`.
            metadata: JSON to store with each trajectory, such as the environment's name.
            last_row: "action" if leaves that flag an end stand beside the last action, "boundary" if they stand on a
                row of their own for the final observation; None if their names show it. Needed for Gymnasium's
                `terminated` and `truncated` as leaves.

        Raises:
            SpecError: an argument is out of range or of the wrong type.
            OSError: the directory cannot be made.
        """
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        try:
            self._metadata = json.loads(json.dumps(dict(metadata or {})))
        except (TypeError, ValueError) as error:
            raise SpecError(f"`metadata` must be JSON: {error}") from error
        self.last_row = checked_last_row(last_row)
        self.data_dir = Path(data_dir)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.data_dir)
        self._id = secrets.token_hex(4)
        self._last_ns = 0
        self._num_steps = 0
        self._num_written = 0
        self._is_open = True
        self._known: _Known | None = None  # None before the first step
        self._rule: StepKinds | None = None
        count = self.num_envs or 1
        self._all_envs = np.arange(count)
        self._blocks: list[Array] = []  # rows of the current episodes: each leaf [N * capacity, ...], and their kinds
        self._capacity = self._longest = 0  # rows for which there is room per environment; no episode has more rows
        self._lengths = np.zeros(count, np.intp)  # [N], rows of each current episode
        self._starts = np.zeros(count, np.intp)  # [N], the first row of each environment in the blocks
        # The state after the row before, as `StepKinds` has it, or [N]; never changed in place.
        self._before: Any = START if self.num_envs is None else np.full(count, START, np.uint8)

    def __repr__(self) -> str:
        return f"<RolloutWriter to {self.data_dir}: {self._num_written} trajectories, {self._num_steps} steps>"

    def __call__(
        self,
        step: Any,
        end_of_episode: Any = None,
        env_mask: Any = None,
        *,
        terminated: Any = None,
        truncated: Any = None,
        final_observation: Any = None,
    ) -> None:
        """Write a step, and where an episode ends, a boundary row with the final observation and zeros.

        Args:
            step: any nest of arrays; leaves [N, ...] with `num_envs`.
            end_of_episode: whether the step is the last of its episode, [N] with `num_envs`; None to read it from
                `terminated` and `truncated`, or from the step's own flags.
            env_mask: whether each environment has a step, [N] with `num_envs`; None for all.
            terminated: whether the environment ended the episode, [N] with `num_envs`.
            truncated: whether a limit ended the episode, [N] with `num_envs`.
            final_observation: the observation after the step, like `observation`; read only where an episode ends.
                Without it, a terminated episode repeats its last observation, and the last action of a truncated one
                is no transition.

        Raises:
            StructureError: a leaf, named by path, differs from the first step's; the end contradicts the step; or the
                names of the step's flags do not show whose row they stand on, and `last_row` is None. Nothing changed.
            SpecError: `env_mask` without `num_envs`, or an end is given twice. Nothing changed.
            ClosedError: after `close()`.
            OSError: the disk failed, for example because it is full. Episodes that were not written are dropped; other
                environments continue.
        """
        known, leaves, env_ids = self._examine(step, env_mask)
        rule = self._rule or StepKinds(known[0], self.last_row)
        ends: Ends = end_of_episode, terminated, truncated, final_observation
        if self.num_envs is not None:
            ends = env_ends(self.num_envs, *ends)
        row = rule.row(leaves, self._before, env_ids, ends)
        self._known, self._rule = known, rule
        self._take(leaves, row, env_ids)

    def write_row(self, step: Any, kinds: Any, env_mask: Any = None) -> None:
        """Write a row of known kind as it is; a LAST row ends the episode.

        Args:
            step: as for a call of the writer.
            kinds: the row's kind (`reverb_writer.rows`), an int, or uint8 [N] with `num_envs`.
            env_mask: whether each environment has a row, [N] with `num_envs`; None for all.

        Raises:
            ReverbWriterError, OSError: as for a call of the writer.
        """
        known, leaves, env_ids = self._examine(step, env_mask)
        checked = checked_kinds(np.broadcast_to(kinds, len(self._all_envs)), len(self._all_envs))
        self._known = known
        kind = int(checked[0]) if self.num_envs is None else checked
        self._take(leaves, Row(kind, kind, (kind & rows.LAST) != 0), env_ids)

    def end_episode(self, *, end: Literal["cut", "reset"] = "cut", env_ids: Sequence[int] | None = None) -> None:
        """End the current episodes of the environments `env_ids`, or of all, although their last row is missing.

        An import calls `reset()` of its observer after a trajectory whose `end` is "reset", and `reset(discard=True)`
        after one that was "cut".

        Raises:
            SpecError: an argument is out of range.
            OSError: the disk failed; episodes that were not written are dropped.
        """
        if end not in ("cut", "reset"):
            raise SpecError(f"`end` must be 'cut' or 'reset', got {end!r}.")
        last = len(self._all_envs) - 1
        chosen = [integer("env_ids", env, minimum=0, maximum=last) for env in env_ids or ()]
        ended = self._all_envs if env_ids is None else np.array(chosen, np.intp)
        with self._dropping(ended):
            self._write(ended, is_reset=end == "reset")

    def save(
        self,
        steps: Any,
        *,
        kinds: Any = None,
        terminated: bool | None = None,
        truncated: bool | None = None,
        last_row: rows.LastRow | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a whole trajectory at once, and return its file.

        Args:
            steps: nest with leaves [T, ...], T >= 1, whose steps are like this writer's first step. A list of strings
                is a leaf [T].
            kinds: the kinds of the rows (`reverb_writer.rows`), uint8 [T]; None if `terminated` and `truncated` or the
                leaves show them. If nothing shows an end, the trajectory was cut.
            terminated: whether the environment ended the episode with the last row.
            truncated: whether a limit ended the episode with the last row.
            last_row: "boundary" if the last row only holds the final observation, "action" if it has the last action;
                None for the writer's, or if the leaves show it. Without such leaves it has an action.
            metadata: JSON, in addition to the writer's.

        Raises:
            ClosedError: the writer is closed.
            StructureError: the leaves differ in length, or from earlier steps; or they contradict themselves or the
                arguments, or do not show whose row their flags stand on. Nothing changed.
            OSError: the disk failed, for example because it is full.
        """
        steps = with_texts(steps, "`steps`")
        num_rows = common_length(steps, "`steps`")
        if kinds is not None:
            found = checked_kinds(kinds, num_rows)
        else:
            found = kinds_of_episode(steps, num_rows, terminated, truncated, last_row or self.last_row)
        return self.save_rows(steps, found, metadata or {})

    def save_rows(self, steps: Any, kinds: Array | None, metadata: Mapping[str, Any]) -> Path:
        """Write rows whose kinds are known or unknown, and return their file.

        Args:
            steps: nest with leaves [T, ...], T >= 1.
            kinds: the kinds of the rows, uint8 [T], stored as they are; None if they are unknown.
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
        known = self._known or self._learn(example, is_spec=True)
        found, expected = ([*zip(each.paths, each.dtypes, each.shapes, strict=True)] for each in (structure, known[0]))
        if found != expected:
            raise StructureError(f"`steps` has leaves {found}, this writer's are {expected}.")
        self._known = known
        columns = [np.asarray(leaf) for leaf in structure.flatten(steps, self._num_steps)]
        self._num_steps += num_steps
        return self._write_columns(columns, kinds, metadata, is_reset=True)

    def write_episode(self, episode: Episode) -> Path:
        """Write `episode`, whole or a cut chunk, as one trajectory, and return its file.

        Raises:
            ReverbWriterError, OSError: as for `save`; IncompleteError if the episode has no step.
        """
        return self.save(episode.steps(), kinds=episode.kinds())

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

    def _examine(self, step: Any, env_mask: Any) -> tuple[_Known, Sequence[Any], Array]:
        """Return the structure, the step's leaves, and the numbers of the environments that have a step."""
        self._check_open()
        if env_mask is not None and self.num_envs is None:
            raise SpecError("`env_mask` is for steps of several environments. Pass `num_envs` to `RolloutWriter`.")
        known = self._known or self._learn(step)
        leaves = known[0].flatten(step, self._num_steps)
        if env_mask is None:
            return known, leaves, self._all_envs
        return known, leaves, np.flatnonzero(env_flags("env_mask", env_mask, len(self._all_envs)))

    def _learn(self, example: Any, *, is_spec: bool = False) -> tuple[StepStructure, RowLayout]:
        """Return the structure of all steps, given an example: the first step, or a spec without N."""
        structure = StepStructure(example, batch_size=self.num_envs, is_spec=is_spec)
        specs = [ArraySpec(shape, dtype) for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)]
        return structure, RowLayout.of(structure.pack(specs))

    def _take(self, leaves: Sequence[Any], row: Row, env_ids: Array) -> None:
        """Append the rows of a step, and write the episodes that they end."""
        ended, with_boundary = self._ended(row, env_ids)
        self._put(leaves, row.kind, env_ids)
        self._num_steps += 1
        before = row.state
        if len(env_ids) < len(self._all_envs):
            before = self._before.copy()
            before[env_ids] = row.state[env_ids]
        self._before = before
        if not len(ended):
            self._count(env_ids)
            return
        with self._dropping(ended):
            self._count(env_ids)
            if row.boundary is not None:
                self._put(row.boundary.leaves, row.boundary.kind, with_boundary)
                self._count(with_boundary)
            self._write(ended)

    def _ended(self, row: Row, env_ids: Array) -> tuple[Array, Array]:
        """Return the environments whose episodes a step ends, and the environments that have a boundary row."""
        of_boundary = None if row.boundary is None else row.boundary.env_ids
        if self.num_envs is None:
            with_boundary = self._all_envs[: row.boundary is not None]
            return (self._all_envs if row.is_last else with_boundary), with_boundary
        with_boundary = self._all_envs[:0] if of_boundary is None else np.asarray(of_boundary, np.intp)
        if row.is_last is None:
            return with_boundary, with_boundary
        return np.union1d(env_ids[row.is_last[env_ids]], with_boundary), with_boundary

    def _put(self, leaves: Sequence[Any], kinds: Any, env_ids: Array) -> None:
        """Append a row of some environments, leaves [N, ...], without a change of `_lengths`."""
        if self._longest == self._capacity:
            self._make_room()
        if self.num_envs is None:  # integers index faster than arrays
            at = int(self._lengths[0])
            for block, leaf in zip(self._blocks, [*leaves, kinds], strict=True):
                block[at] = leaf
            return
        is_all = len(env_ids) == len(self._all_envs)
        numbers = (self._starts + self._lengths)[... if is_all else env_ids]
        for block, leaf in zip(self._blocks, [*leaves, kinds], strict=True):
            block[numbers] = leaf if is_all else leaf[env_ids]

    def _count(self, env_ids: Array) -> None:
        """Count a row of some environments, which has been put."""
        self._longest += 1
        if len(env_ids) == len(self._all_envs):
            self._lengths += 1
        else:
            self._lengths[env_ids] += 1

    def _make_room(self) -> None:
        """Allocate the blocks, or double them if an episode fills its part; the new half is overwritten later."""
        assert self._known is not None  # noqa: S101  # because there is a step
        count, length = len(self._lengths), int(self._lengths.max())
        if length == self._capacity:
            structure, _ = self._known
            capacity = max(2 * length, _FIRST_LENGTH)
            of_columns = zip([*structure.dtypes, np.dtype(np.uint8)], [*structure.shapes, ()], strict=True)
            # Unused rows take no memory.
            blocks = [np.zeros((count, capacity, *shape), dtype) for dtype, shape in of_columns]
            for block, former in zip(blocks, self._blocks, strict=bool(self._blocks)):
                block[:, :length] = former.reshape(count, length, *former.shape[1:])
            flat = [block.reshape(count * capacity, *block.shape[2:]) for block in blocks]
            starts = np.arange(count) * capacity
            self._blocks, self._capacity, self._starts = flat, capacity, starts  # no call, so no interrupt between
        self._longest = length

    @contextlib.contextmanager
    def _dropping(self, ended: Array) -> Iterator[None]:
        """Let the next step of these environments begin an episode, also after an error or an interrupt."""
        try:
            yield
        finally:
            self._lengths[ended] = 0
            if self.num_envs is None:
                self._before = START
            else:
                self._before = self._before.copy()
                self._before[ended] = START

    def _write(self, env_ids: Array, *, is_reset: bool = False) -> None:
        """Write the non-empty episodes of some environments; after an OSError the others are still written."""
        errors = []
        for env in env_ids.tolist():
            length = int(self._lengths[env])
            if length:
                try:
                    start = int(self._starts[env])
                    *columns, kinds = (block[start : start + length] for block in self._blocks)
                    self._write_columns(columns, kinds, {}, is_reset=is_reset)
                except OSError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _write_columns(
        self, columns: Sequence[Array], kinds: Array | None, metadata: Mapping[str, Any], *, is_reset: bool
    ) -> Path:
        assert self._known is not None  # noqa: S101  # because there is a step
        _, layout = self._known
        end = None if kinds is None else end_of(kinds)
        manifest = Manifest(len(columns[0]), end, is_reset, layout, {**self._metadata, **metadata})
        self._last_ns = max(self._last_ns + 1, time.time_ns())
        path = self.data_dir / f"{PREFIX}{self._last_ns:020d}_{self._id}_{self._num_written:08d}{SUFFIX}"
        write_trajectory(path, manifest, columns, kinds)
        self._num_written += 1
        return path
