"""A place in a trajectory: the transitions from here on, a file at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.rollouts.files.transitions import Transition, TransitionFields
from reverb_writer.wire.signatures import ArraySpec

__all__ = ["Cursor", "Span"]


_OBSERVATIONS = ("observation", "privileged_observation")


class Span(NamedTuple):
    """Some transitions in a row: how many, and their fields [length, ...]."""

    length: int
    fields: Transition


class Cursor:
    """Step through a trajectory. Holds one file in memory, and two while it goes from one to the next."""

    def __init__(self, trajectory: Any, fields: TransitionFields, start: int) -> None:
        """Open a trajectory, a `StoredTrajectory` or the like, at transition `start`.

        Raises:
            FormatError: its file is damaged.
            StructureError: its steps have no such fields.
        """
        self._trajectory, self._fields = trajectory, fields
        self._parts = list(trajectory.manifest.parts)
        self._num_transitions: int = trajectory.manifest.num_transitions
        self._at = self._first = start
        self._steps: Any = None
        self._ahead: Any = None
        while self._parts[0].stop <= start:
            self._parts.pop(0)
        self._load()

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left."""
        return self._at >= self._num_transitions

    def layout(self) -> Any:
        """Return dtype and shape of one transition's fields, None for those that are not there."""
        return tuple(
            tree.map_structure(lambda leaf: None if leaf is None else ArraySpec(leaf.shape[1:], leaf.dtype), field)
            for field in self._span(0, 0)
        )

    def take(self, max_length: int) -> Span:
        """Return the next transitions, `max_length` at most and 1 at least, and step over them."""
        part = self._parts[0]
        stop = min(self._at + max_length, part.stop, self._num_transitions)
        span = Span(stop - self._at, self._span(self._at - part.start, stop - part.start))
        self._at = stop
        if stop == part.stop and not self.is_at_end:
            self._parts.pop(0)
            self._steps, self._ahead = self._ahead, None
            self._load()
        return span

    def _load(self) -> None:
        part = self._parts[0]
        if self._steps is None:
            self._steps = self._read(part)
        self._values = self._fields.read(self._steps, self._trajectory.manifest, part.start)
        self._ahead = self._read(self._parts[1]) if len(self._parts) > 1 else None
        after = self._fields.observations(self._steps if self._ahead is None else self._ahead)
        edge = slice(-1, None) if self._ahead is None else slice(0, 1)
        self._after = dict(zip(_OBSERVATIONS, tree.map_structure(lambda leaf: _rows(leaf, edge), after), strict=True))

    def _read(self, part: Any) -> Any:
        return self._trajectory.pack(self._trajectory.columns(part))

    def _span(self, start: int, stop: int) -> Transition:
        rows = {
            name: tree.map_structure(lambda leaf: _rows(leaf, slice(start, stop)), value)
            for name, value in self._values.items()
        }
        for name in _OBSERVATIONS:
            rows[f"next_{name}"] = tree.map_structure(
                lambda now, edge: _following(now, edge, start, stop), self._values[name], self._after[name]
            )
        is_first = np.zeros(stop - start, bool)
        is_first[:1] = self._at == self._first
        return Transition(**rows, is_first=is_first, mask=np.ones(stop - start, bool))


def _rows(leaf: Any, rows: slice) -> Any:
    return None if leaf is None else leaf[rows]


def _following(leaf: Any, edge: Any, start: int, stop: int) -> Any:
    """Return rows start + 1 ... stop, the last of which may be the first of the next file."""
    if leaf is None or stop < len(leaf):
        return _rows(leaf, slice(start + 1, stop + 1))
    return np.concatenate([leaf[start + 1 :], edge])
