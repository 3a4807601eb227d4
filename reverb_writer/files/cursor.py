"""Read a trajectory transition by transition, with one file of it in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.files.transition_fields import TransitionBatch, TransitionFields
from reverb_writer.protocol.signatures import ArraySpec

Array = npt.NDArray[Any]


class Cursor:
    """The position in one trajectory. Holds one file in memory, and the next file when the last row needs it.

    Attributes:
        trajectory: a `StoredTrajectory`, or an object with the same methods.
    """

    def __init__(self, trajectory: Any, fields: TransitionFields, start: int) -> None:
        """Open a trajectory at transition `start`."""
        self.trajectory, self._fields = trajectory, fields
        self._parts = list(trajectory.manifest.parts)
        self._num_transitions: int = trajectory.manifest.num_transitions
        self._at = self._first = start
        while self._parts[0].stop <= start:
            self._parts.pop(0)
        self._ahead: Any = None
        self._load(self._read(self._parts[0]))

    @property
    def is_at_end(self) -> bool:
        """Whether all transitions were read."""
        return self._at >= self._num_transitions

    def layout(self) -> TransitionBatch:
        """Return the dtype and shape of each field of a transition; None for a field that the steps lack."""
        flag = np.zeros(1, bool)
        following = {f"next_{name}": self._values[name] for name in ("observation", "privileged_observation")}
        return TransitionBatch(
            *tree.map_structure(
                lambda leaf: None if leaf is None else ArraySpec(leaf.shape[1:], leaf.dtype),
                TransitionBatch(**self._values, **following, is_first=flag, mask=flag),
            )
        )

    def fill(self, targets: Sequence[Array | None], at: int, env: int) -> int:
        """Copy the next transitions into column `env` of a `TransitionBatch`'s leaves, [T, N, ...], from row `at` on.

        Returns how many, >= 1.
        """
        part = self._parts[0]
        is_first, mask = (target for target in targets[-2:] if target is not None)  # which are always there
        length: int = min(len(mask) - at, part.stop - self._at, self._num_transitions - self._at)
        start, stop, end = self._at - part.start, self._at - part.start + length, at + length
        for target, column in zip(targets, self._columns, strict=False):
            if target is not None:
                target[at:end, env] = column[start:stop]
        for target, column, after in zip(targets[len(self._columns) :], self._now, self._after(stop), strict=False):
            if target is not None:
                target[at : end - 1, env] = column[start + 1 : stop]
                target[end - 1, env] = after
        is_first[at, env] = self._at == self._first
        mask[at:end, env] = True
        self._at += length
        if stop + part.start == part.stop and not self.is_at_end:
            self._parts.pop(0)
            self._load(self._ahead)
        return length

    def _load(self, steps: Any) -> None:
        """Make `steps`, read from the first part that is left, the current ones."""
        self._values = self._fields.read(steps, self.trajectory.manifest, self._parts[0].start)
        self._columns: list[Array] = tree.flatten(tuple(self._values.values()))
        self._now: list[Array] = tree.flatten(self._fields.observations(steps))

    def _after(self, stop: int) -> list[Any]:
        """Return the observation after row `stop - 1`, from this file or the next; the last one if there is none."""
        if stop < self._parts[0].stop - self._parts[0].start:
            row, now = stop, self._now
        elif len(self._parts) > 1:
            self._ahead = self._read(self._parts[1])
            row, now = 0, tree.flatten(self._fields.observations(self._ahead))
        else:
            row, now = -1, self._now
        return [None if leaf is None else leaf[row] for leaf in now]

    def _read(self, part: Any) -> Any:
        return self.trajectory.pack(self.trajectory.columns(part))
