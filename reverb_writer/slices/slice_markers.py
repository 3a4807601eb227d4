"""Markers of slices that are laid end to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.slices.axes import ROWS, axes
from reverb_writer.slices.markers import Flags, Integers
from reverb_writer.slices.sampler import Slices


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

    is_init: Flags | None = field(metadata=ROWS)
    done: Flags = field(metadata=ROWS)
    terminated: Flags = field(metadata=ROWS)
    truncated: Flags = field(metadata=ROWS)
    cut_by_sampler: Flags = field(metadata=ROWS)
    traj_ids: npt.NDArray[np.integer[Any]] = field(metadata=ROWS)
    mask: Flags | None = field(metadata=ROWS)
    slices: Slices
    members: Integers | None = None

    def __len__(self) -> int:
        return len(self.done)

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
        real, bars = self.slices.mask.tolist(), set(self.slices.first_rows[1:].tolist())
        numbers = {"members": self.members, "row": self.slices.rows, "traj_ids": self.traj_ids}
        lines = {
            name: [str(number) if is_real else "=" for number, is_real in zip(of_rows, real, strict=True)]
            for name, of_rows in numbers.items()
            if of_rows is not None
        }
        flags = {name: getattr(self, name) for name in axes(self) if name != "traj_ids"}
        lines |= {name: ["T" if flag else "." for flag in marker] for name, marker in flags.items()}
        width = max(3, *(len(label) for labels in lines.values() for label in labels))
        drawn = []
        for name, labels in lines.items():
            cells = ((" |" if at in bars else "") + label.rjust(width + 1) for at, label in enumerate(labels))
            drawn.append(f"{name:16}{''.join(cells)}")
        return "\n".join(drawn)
