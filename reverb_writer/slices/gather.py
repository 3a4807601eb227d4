"""Copy rows of storages: slices as a flat batch with markers, trajectories as separate nests or padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import arguments
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import padded_rows
from reverb_writer.nests import common_length, named_leaves
from reverb_writer.slices.batch import Batch, SliceMarkers
from reverb_writer.slices.boundaries import Trajectories, find_trajectories
from reverb_writer.slices.markers import Flags, Integers, Markers, read_markers
from reverb_writer.slices.sampler import Slices, SliceSampler


def take_rows(nest: Any, rows: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Any:
    """Copy rows, given by flat indices, out of leaves [*shape, ...]."""
    for path, leaf in zip(*named_leaves(nest, "steps"), strict=True):
        if np.shape(leaf)[: len(shape)] != shape:
            raise StructureError(f"leaf `{path}`: shape {np.shape(leaf)}, expected {shape} as in all leaves.")
    if len(shape) == 1:
        return tree.map_structure(lambda leaf: np.asarray(leaf).take(rows, axis=0), nest)
    indices = np.unravel_index(rows, shape)
    return tree.map_structure(lambda leaf: np.asarray(leaf)[indices], nest)


class PaddedTrajectories(NamedTuple):
    """The result of `pad_trajectories`: `data`, leaves [n, T, ...], and `mask`, bool [n, T], False on padding."""

    data: Any
    mask: Flags


def split_trajectories(nest: Any, trajectories: Trajectories | None = None) -> list[Any]:
    """Return one nest for each trajectory of a storage.

    Args:
        nest: leaves [N, ...], or [T, B, ...] of several environments.
        trajectories: the trajectories; None to find them by the markers among the leaves (`read_markers`).

    Returns:
        Copies with leaves [length, ...], in the order of the trajectories. Rows are in the order of time, even if a
        trajectory continues from the last row of a ring to the first row.

    Raises:
        StructureError: a leaf has another shape than the storage, or the steps have no markers.
        IncompleteError: the storage has no rows.

    Source: TorchRL `split_trajectories`, which fails if an id is used again later; here it begins another trajectory.

    >>> flat = {"traj_ids": np.array([7, 7, 5, 7]), "reward": np.arange(4)}
    >>> [trajectory["reward"].tolist() for trajectory in split_trajectories(flat)]
    [[0, 1], [2], [3]]
    """
    trajectories = find_trajectories(read_markers(nest)) if trajectories is None else trajectories
    rows = np.split(trajectories.rows(), np.cumsum(trajectories.lengths)[:-1])
    return [take_rows(nest, part, trajectories.storage_shape) for part in rows]


def pad_trajectories(trajectories: Sequence[Any], length: int | None = None) -> PaddedTrajectories:
    """Stack trajectories of different lengths, padded with zeros at the end.

    Args:
        trajectories: nests of one structure, leaves [length, ...]; at least one.
        length: T, rows to pad to; None for the longest length.

    Returns:
        The nest, leaves [n, T, ...], and the mask. Strings are padded with empty strings.

    Raises:
        SpecError: a trajectory is longer than `length`.
        StructureError: the list is empty; trajectories differ in structure, dtype or shape; or leaves differ in length.

    >>> padded = pad_trajectories([np.array([1, 2, 3]), np.array([4])])
    >>> padded.data.tolist(), padded.mask.tolist()
    ([[1, 2, 3], [4, 0, 0]], [[True, True, True], [True, False, False]])
    """
    if not trajectories:
        raise StructureError("expected one trajectory or more, got none.")
    nests = [tree.map_structure(np.asarray, nest) for nest in trajectories]
    lengths = [common_length(nest, "trajectory") for nest in nests]
    expected, *others = (tree.map_structure(lambda leaf: (leaf.dtype, leaf.shape[1:]), nest) for nest in nests)
    for form in others:
        if form != expected:
            raise StructureError(f"trajectories must have equal structure: expected {expected}, got {form}.")
    longest = max(lengths)
    length = longest if length is None else arguments.integer("length", length, minimum=longest)
    mask = np.arange(length) < np.array(lengths)[:, None]

    def stack(*leaves: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack([padded_rows(leaf, length) for leaf in leaves])

    return PaddedTrajectories(tree.map_structure(stack, *nests), mask)


def gather(nest: Any, slices: Slices, markers: Markers | None = None) -> Batch:
    """Return slices of a storage as one batch, laid end to end.

    Args:
        nest: the storage; the shape of each leaf begins with the shape of the storage.
        slices: slices that a `SliceSampler` drew from the trajectories of this storage.
        markers: markers of all rows of the storage; None to use the markers that `read_markers` finds.

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
    return Batch(data, None, mark_rows(slices, Markers(**of_rows)))


def mark_rows(slices: Slices, markers: Markers) -> SliceMarkers:
    """Return the markers [N] of slices of N rows, given the markers of the stored rows."""
    mask, truncated = slices.mask, slices.ends

    def stored(flags: Flags | None) -> Flags:
        return np.zeros_like(mask) if flags is None else flags & mask

    return SliceMarkers(
        is_init=slices.starts | stored(markers.is_init),
        done=truncated | stored(markers.ends),
        terminated=stored(markers.terminated),
        truncated=truncated,
        cut_by_sampler=truncated & slices.cut_by_sampler.repeat(slices.widths),
        traj_ids=slices.trajectories.repeat(slices.widths) if markers.traj_ids is None else markers.traj_ids,
        mask=mask if slices.is_padded else None,
        slices=slices,
    )


def sample_members(
    members: Sequence[tuple[Any, Trajectories]],
    sampler: SliceSampler,
    rng: np.random.Generator,
    weights: Sequence[float] | None = None,
) -> Batch:
    """Draw a batch from several storages (members); each gives a share of the slices by its weight.

    Args:
        members: steps and trajectories of each member. All steps have the same structure.
        sampler: draws `num_slices` slices from all members together.
        rng: source of randomness.
        weights: finite numbers >= 0, one per member, not all 0; None for equal weights. Each share is rounded up or
            down at random, so its average is exact.

    Returns:
        A batch with `members`. Rows, trajectories and probabilities of its `slices` are relative to the member; its
        `storage_shape` is ().

    Raises:
        IncompleteError: a member with a share has no slice to draw.
        SpecError: the list of members is empty, or a weight is out of range.
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
    for number, count in enumerate(_allot(sampler.num_slices, weights, rng).tolist()):
        if count:
            nest, trajectories = members[number]
            slices = dataclasses.replace(sampler, num_slices=count).sample(trajectories, rng)
            drawn.append((number, gather(nest, slices)))
    return Batch.concatenate([batch for _, batch in drawn], [number for number, _ in drawn])


def _allot(number: int, weights: Sequence[float], rng: np.random.Generator) -> Integers:
    """Divide a number in proportion to weights, into integers that add up to it.

    Each share is rounded up or down at random, so its average is exact. A share of 1 or more is never rounded to 0, and
    a weight of 0 gives 0.
    """
    shares = np.array([arguments.number("weights", weight) for weight in weights])
    if shares.min() < 0 or not shares.any():
        raise SpecError(f"`weights` must be finite numbers >= 0, one for each member and not all 0, got {weights!r}.")
    edges = np.cumsum(shares) * number / shares.sum()
    edges[edges >= edges[-1]] = number  # the sum may be rounded differently from the last edge
    return np.diff(np.floor(edges + rng.random()), prepend=0.0).astype(np.int64)
