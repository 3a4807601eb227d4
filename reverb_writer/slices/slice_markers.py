"""Markers of slices that are laid end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.slices.markers import Flags, Integers
from reverb_writer.slices.sampler import Slices

_OF_ROWS = ("is_init", "done", "terminated", "truncated", "cut_by_sampler", "traj_ids", "mask")
"""The fields of `SliceMarkers` that are [N]."""


@dataclass(frozen=True)
class SliceMarkers:
    """Markers of slices laid end to end; the caller owns all arrays.

    They are those of the slices: markers that were stored as leaves of the steps are unchanged in the data. Rows of
    padding, which exist with `short="pad"` only, have all their markers False.

    Attributes:
        is_init: [N] True on the first row of each slice, and where True was stored. None if `emit_init` is False and it
            was not stored.
        done: [N] True where `truncated` is, or where `done`, `terminated` or `truncated` was stored as True.
        terminated: [N] as stored; False if it was not stored.
        truncated: [N] True on the last real row of each slice and nowhere else. Where `terminated` is True too, the
            next state is terminal: do not bootstrap.
        cut_by_sampler: [N] True on the last row of each slice that ends before its trajectory ends: the sampler
            truncated it, not the environment.
        traj_ids: [N] as stored, or the number of the trajectory if none are stored. Two slices may be of one
            trajectory.
        mask: [N] True on rows that are not padding; None if short slices are not padded.
        slices: lengths, probabilities and rows of the slices in the storage, to update priorities.
        members: [N] number of the storage that the row is from; None if there is only one.
    """

    is_init: Flags | None
    done: Flags
    terminated: Flags
    truncated: Flags
    cut_by_sampler: Flags
    traj_ids: npt.NDArray[np.integer[Any]]
    mask: Flags | None
    slices: Slices
    members: Integers | None = None

    def __len__(self) -> int:
        return len(self.done)

    def map_arrays(self, convert: Callable[[npt.NDArray[Any]], Any]) -> SliceMarkers:
        """Return the markers, [N] each, as `convert` returns them; `slices` and `members` stay as they are."""
        present = {name: marker for name in _OF_ROWS if (marker := getattr(self, name)) is not None}
        return dataclasses.replace(self, **{name: convert(marker) for name, marker in present.items()})

    def part(self, first: int, stop: int) -> SliceMarkers:
        """Return the markers of slices number `first` to `stop` - 1, as views."""
        slices = self.slices.part(first, stop)
        begin = int(self.slices.widths[:first].sum())
        rows = slice(begin, begin + len(slices.rows))
        return dataclasses.replace(self.map_arrays(lambda marker: marker[rows]), slices=slices)

    @classmethod
    def concatenate(cls, parts: Sequence[SliceMarkers], numbers: Sequence[int] | None) -> SliceMarkers:
        """Return the markers of several batches, `parts`, laid end to end; `numbers` are those of their members."""
        of_rows = {name: [getattr(part, name) for part in parts] for name in _OF_ROWS}
        return SliceMarkers(
            **{name: _concatenate_present(markers) for name, markers in of_rows.items()},
            slices=Slices.concatenate([part.slices for part in parts]),
            members=None if numbers is None else np.repeat(numbers, [len(part) for part in parts]),
        )

    def preview(self) -> str:
        """Draw the rows and their markers as text, one column for each row.

        `|` separates slices, `T` is True, `=` is padding.

        >>> from reverb_writer.slices import SliceSampler, Trajectories, gather
        >>> steps = {"is_first": np.array([1, 0, 0, 1, 0]), "reward": np.arange(5)}
        >>> trajectories = Trajectories.from_lengths([3, 2])
        >>> slices = SliceSampler(2, 2).each(trajectories, np.random.default_rng(0))
        >>> print(gather(steps, slices).markers.preview())
        row                1   2 |   3   4
        traj_ids           0   0 |   1   1
        is_init            T   . |   T   .
        done               .   T |   .   T
        terminated         .   . |   .   .
        truncated          .   T |   .   T
        cut_by_sampler     .   . |   .   .
        """
        real = self.slices.mask
        width = max(3, *(len(str(number)) for number in [*self.slices.rows.tolist(), *self.traj_ids.tolist()]))
        flags = {name: getattr(self, name) for name in _OF_ROWS if name != "traj_ids"}
        lines = {"row": [str(row) for row in self.slices.rows], "traj_ids": [str(number) for number in self.traj_ids]}
        if self.members is not None:
            lines = {"members": [str(number) for number in self.members], **lines}
        for line in lines.values():
            line[:] = [label if is_real else "=" for label, is_real in zip(line, real, strict=True)]
        lines |= {
            name: ["T" if flag else "." for flag in marker] for name, marker in flags.items() if marker is not None
        }
        bars = set(self.slices.first_rows[1:].tolist())
        drawn = []
        for name, labels in lines.items():
            cells = ((" |" if at in bars else "") + label.rjust(width + 1) for at, label in enumerate(labels))
            drawn.append(f"{name:16}{''.join(cells)}")
        return "\n".join(drawn)


def _concatenate_present(arrays: Sequence[Any]) -> Any:
    """Return arrays as one; None if one of them is None."""
    return None if any(array is None for array in arrays) else np.concatenate(arrays)
