"""The files of one environment's current episode: a buffer of steps, the parts on disk, and the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.files.manifest import End, Leaf, Manifest, decode_nest
from reverb_writer.files.trajectory_folder import TrajectoryFolder
from reverb_writer.nests import packer
from reverb_writer.slices.markers import read_markers
from reverb_writer.steps import BOUNDARY_MARKS

Array = npt.NDArray[Any]

_LOG = logging.getLogger(__package__)


class Outcome(NamedTuple):
    """Why an episode ended; None where it is not known."""

    terminated: bool | None
    truncated: bool | None


class Layout(NamedTuple):
    """What all steps of a writer have in common."""

    structure: Any  # the nest, as JSON
    leaves: Sequence[Leaf]  # the leaves, by number
    part_length: int  # steps in a file


class EpisodeFiles:
    """The episode of one environment."""

    def __init__(self, data_dir: Path, new_name: Callable[[], str], layout: Layout, buffers: Sequence[Array]) -> None:
        """Start with empty `buffers`, [part_length, ...] per leaf, which the caller fills; see `advance`."""
        self._data_dir, self._new_name, self._layout, self._buffers = data_dir, new_name, layout, buffers
        self._start_episode()

    def _start_episode(self) -> None:
        self.fill = 0  # steps in the buffers
        self._folder: TrajectoryFolder | None = None
        self._tail: list[Array] = []  # the last two steps that are on disk
        self._is_lost = False

    def advance(self) -> None:
        """Count the step that was written at `fill`; write the buffers to disk if they are full.

        Raises:
            OSError: the disk failed, for example because it is full. This episode is dropped, its further steps too.
            KeyboardInterrupt: as OSError if it came while the disk was written.
        """
        if self.fill + 1 == self._layout.part_length:
            self.extend(self._buffers)
        else:
            self.fill += 1

    def extend(self, columns: Sequence[Array]) -> None:
        """Write steps [T, ...], T >= 1, to disk, either those of the buffers or, if these are empty, others."""
        was_lost, self._is_lost = self._is_lost, True  # until all are on disk: an interrupt would leave a hole
        self.fill = 0
        if was_lost:
            return
        if self._folder is None:
            self._folder = TrajectoryFolder(self._data_dir, self._new_name(), self._layout.leaves)
        try:
            self._add_parts(self._folder, columns)
        except BaseException:
            self._folder.discard()
            raise
        self._is_lost = False

    def _add_parts(self, folder: TrajectoryFolder, columns: Sequence[Array]) -> None:
        length = self._layout.part_length
        for start in range(0, len(columns[0]), length):
            part = [column[start : start + length] for column in columns]
            folder.add(part)
            if self._tail and len(part[0]) == 1:
                self._tail = [
                    np.concatenate([tail[-1:], column]) for tail, column in zip(self._tail, part, strict=True)
                ]
            else:
                self._tail = [column[-2:].copy() for column in part]

    def finish(
        self, end: End, outcome: Outcome, metadata: Mapping[str, Any], *, boundary_step: bool = False
    ) -> Path | None:
        """End the episode, make its trajectory visible and return its folder; None if nothing was written.

        Raises:
            OSError: the disk failed, for example because it is full. This episode is dropped.
        """
        try:
            if self.fill:
                self.extend([buffer[: self.fill] for buffer in self._buffers])
            folder = None if self._is_lost else self._folder
            if folder is None:
                return None
            last_rows = packer(decode_nest(self._layout.structure))(self._tail)
            boundary_step = boundary_step or (end is End.STEP and _is_boundary_step(last_rows))
            terminated, truncated = _outcome(last_rows, end, outcome)
            layout = self._layout
            try:
                return folder.finish(
                    Manifest(
                        num_steps=folder.num_steps,
                        boundary_step=boundary_step,
                        end=end,
                        terminated=terminated,
                        truncated=truncated,
                        structure=layout.structure,
                        leaves=layout.leaves,
                        parts=folder.parts,
                        metadata=metadata,
                    )
                )
            except BaseException:
                folder.discard()
                raise
        finally:
            self._start_episode()


def _is_boundary_step(rows: Any) -> bool:
    """Return whether the last step is a boundary step, which only holds an observation (TF-Agents, RLDS)."""
    for name, last in BOUNDARY_MARKS:
        column = rows.get(name) if isinstance(rows, Mapping) else getattr(rows, name, None)
        if column is not None:
            return bool(column[-1] == last)
    return False


def _outcome(rows: Any, end: End, given: Outcome) -> Outcome:
    if end is not End.STEP:
        return Outcome(given.terminated or False, given.truncated if given.truncated is not None else True)
    terminated, truncated = given
    if terminated is None and truncated is None:
        markers = read_markers(rows)
        terminated = None if markers.terminated is None else bool(markers.terminated[-1])
        truncated = None if markers.truncated is None else bool(markers.truncated[-1])
    if truncated is None and terminated is not None:
        truncated = not terminated
    return Outcome(terminated, truncated)
