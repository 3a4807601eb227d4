"""Copy slices of steps, from one storage or several, into one flat batch with markers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.slices.boundaries import Trajectories
from reverb_writer.slices.markers import Flags, Integers, Markers, read_markers
from reverb_writer.slices.sampler import Slices, SliceSampler
from reverb_writer.slices.trajectory_layout import row_specs, take_rows

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
    def concatenate(cls, parts: Sequence[SliceMarkers], numbers: Sequence[int]) -> SliceMarkers:
        """Return the markers of several batches, `parts`, laid end to end; `numbers` are those of their members."""
        of_rows = {name: [getattr(part, name) for part in parts] for name in _OF_ROWS}
        return SliceMarkers(
            **{name: _concatenate_present(markers) for name, markers in of_rows.items()},
            slices=Slices.concatenate([part.slices for part in parts]),
            members=np.repeat(numbers, [len(part) for part in parts]),
        )

    def preview(self) -> str:
        """Draw the rows and their markers as text, one column for each row.

        `|` separates slices, `T` is True, `=` is padding.

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


class SliceBatch(NamedTuple):
    """Slices laid end to end; padded only with `short="pad"`. The caller owns all arrays.

    Attributes:
        data: the nest of the steps; leaves [N, ...]. Rows of padding repeat the last real row.
        markers: of the N rows.
    """

    data: Any
    markers: SliceMarkers


def gather(nest: Any, slices: Slices, markers: Markers | None = None, *, emit_init: bool = True) -> SliceBatch:
    """Return slices of a storage as one batch, laid end to end.

    Args:
        nest: the storage; the shape of each leaf begins with that of the storage.
        slices: from a `SliceSampler`, drawn from the trajectories of this storage.
        markers: of all rows of the storage; None to use those that `read_markers` finds.
        emit_init: whether to make `is_init` if the storage does not have it; TorchRL does not.

    Raises:
        StructureError: a leaf or a marker has another shape than the storage.

    >>> slices = SliceSampler(2, 4).each(Trajectories.from_lengths([2, 3]), np.random.default_rng(0))
    >>> batch = gather({"reward": np.array([1.0, 2.0, 3.0, 4.0, 5.0])}, slices)
    >>> batch.data["reward"].tolist(), batch.markers.is_init.tolist()
    ([1.0, 2.0, 3.0, 4.0, 5.0], [True, False, True, False, False])
    """
    markers = read_markers(nest, ndim=len(slices.storage_shape)) if markers is None else markers
    given = {name: marker for name, marker in vars(markers).items() if marker is not None}
    data, of_rows = (take_rows(leaves, slices.rows, slices.storage_shape) for leaves in (nest, given))
    return SliceBatch(data, mark_rows(slices, Markers(**of_rows), emit_init=emit_init))


def mark_rows(slices: Slices, markers: Markers, *, emit_init: bool = True) -> SliceMarkers:
    """Return the markers of slices.

    Args:
        slices: of N rows.
        markers: [N] those that are stored, of these rows. `traj_ids` are returned as they are.
        emit_init: as that of `gather`.
    """
    mask, truncated = slices.mask, slices.ends

    def stored(flags: Flags | None) -> Flags:
        return np.zeros_like(mask) if flags is None else flags & mask

    return SliceMarkers(
        is_init=slices.starts | stored(markers.is_init) if emit_init or markers.is_init is not None else None,
        done=truncated | stored(markers.ends),
        terminated=stored(markers.terminated),
        truncated=truncated,
        cut_by_sampler=truncated & slices.by_row(slices.cut_by_sampler),
        traj_ids=slices.by_row(slices.trajectories) if markers.traj_ids is None else markers.traj_ids,
        mask=mask if slices.is_padded else None,
        slices=slices,
    )


def allot(number: int, weights: Sequence[float], rng: np.random.Generator) -> Integers:
    """Divide a number in proportion to weights, into integers that add up to it.

    Each share is rounded up or down at random, so that its average is exact. A share of 1 or more is never rounded to
    0, and a weight of 0 gives 0.

    Args:
        number: the number to divide, >= 0.
        weights: [m] finite numbers >= 0, not all 0; they need not add up to 1.
        rng: source of randomness.

    Returns:
        [m] integers that add up to `number`.

    Raises:
        SpecError: the weights are not such numbers.

    >>> allot(48, [1, 1, 1], np.random.default_rng(0)).tolist()
    [16, 16, 16]
    >>> allot(16, [0, 0.75, 0.25], np.random.default_rng(0)).tolist()
    [0, 12, 4]
    """
    number = integer("number", number, minimum=0)
    try:
        shares = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        shares = np.empty(0)
    if shares.ndim != 1 or not shares.size or not np.isfinite(shares).all() or shares.min() < 0 or not shares.any():
        raise SpecError(f"`weights` must be finite numbers >= 0, one for each member and not all 0, got {weights!r}.")
    edges = np.cumsum(shares) * number / shares.sum()
    edges[edges >= edges[-1]] = number  # the sum may be rounded differently from the last edge
    return np.diff(np.floor(edges + rng.random()), prepend=0.0).astype(np.int64)


def sample_members(
    members: Sequence[tuple[Any, Trajectories]],
    sampler: SliceSampler,
    rng: np.random.Generator,
    weights: Sequence[float] | None = None,
) -> SliceBatch:
    """Draw a batch from several storages (members); the number of slices of each is its share by weight.

    Args:
        members: steps and trajectories of each. All steps have one structure.
        sampler: draws `num_slices` slices from all of them together.
        rng: source of randomness.
        weights: as in `allot`; None for equal ones.

    Returns:
        A batch with `members`. Rows, trajectories and probabilities of its `slices` are relative to the member; its
        `storage_shape` is ().

    Raises:
        IncompleteError: a member with a share has no slice to draw.
        SpecError: there are no members, or the number of weights differs.
        StructureError: the steps of the members differ in structure, dtype or shape.

    Source: TorchRL `ReplayBufferEnsemble`, which may skip a member by chance.

    >>> steps, trajectories = {"reward": np.zeros(9)}, Trajectories.from_lengths([4, 5])
    >>> members = [(steps, trajectories), (steps, trajectories)]
    >>> sample_members(members, SliceSampler(4, 2), np.random.default_rng(0)).markers.members.tolist()
    [0, 0, 0, 0, 1, 1, 1, 1]
    """
    weights = [1.0] * len(members) if weights is None else weights
    if len(weights) != len(members) or not members:
        raise SpecError(f"expected one weight for each member, got {len(weights)} weights and {len(members)} members.")
    drawn = []
    for number, count in enumerate(allot(sampler.num_slices, weights, rng).tolist()):
        if count:
            nest, trajectories = members[number]
            slices = dataclasses.replace(sampler, num_slices=count).sample(trajectories, rng)
            drawn.append((number, gather(nest, slices)))
    return concatenate_batches([batch for _, batch in drawn], [number for number, _ in drawn])


def concatenate_batches(batches: Sequence[SliceBatch], numbers: Sequence[int]) -> SliceBatch:
    """Lay `batches` of members end to end, as `sample_members` returns them; `numbers` are those of the members.

    Raises:
        StructureError: their steps differ in structure, dtypes or shapes.
    """
    specs = [row_specs(batch.data) for batch in batches]
    if any(spec != specs[0] for spec in specs):
        raise StructureError(f"members must have steps of one structure, got {specs}.")
    data = tree.map_structure(lambda *leaves: np.concatenate(leaves), *(batch.data for batch in batches))
    return SliceBatch(data, SliceMarkers.concatenate([batch.markers for batch in batches], numbers))


def _concatenate_present(arrays: Sequence[Any]) -> Any:
    """Return arrays as one; None if one of them is None."""
    return None if any(array is None for array in arrays) else np.concatenate(arrays)
