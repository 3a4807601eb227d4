"""Markers of steps: the first and last rows of trajectories, and the reason of their ends.

    marker       name of the leaf (the first that exists)                                the row is
    -----------  ----------------------------------------------------------------------  -----------------------------
    is_init      is_init, is_first, step_type == FIRST                                   the first of its trajectory
    terminated   next/terminated, terminated, is_terminal, or step_type (see below)      the last; its state is terminal
    truncated    next/truncated, truncated                                               the last; cut by a time limit
    done         next/done, done, is_last, step_type == LAST                             the last
    traj_ids     collector/traj_ids, traj_ids, episode                                   of the trajectory with this id
    mask         the second of a pair (steps, mask)                                      False: padding

The names are those of TorchRL, Gymnasium, RLDS and TF-Agents, from left to right. If `next` has flags, the flags beside
`next` belong to the previous step and are ignored. In trajectories of TF-Agents the last row is the boundary step. It
is terminated if the discount in the row before it is 0. If an item starts with a boundary step, this discount is
unknown, and the step is not terminated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import StructureError
from reverb_writer.steps import FLAG_NAMES, LAST, find_flags
from reverb_writer.transitions.step_flags import split_mask, with_types

_NAMES = {
    **FLAG_NAMES,
    "first": ("is_init", *FLAG_NAMES["first"]),
    "last": ("done", *FLAG_NAMES["last"]),
    "discount": ("discount",),
    "traj_ids": ("traj_ids", "episode"),
}
"""Names of leaves by kind, as in the table above; the first name that the steps have counts."""

_ENDS = {kind: _NAMES[kind] for kind in ("last", "terminated", "truncated")}

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Markers:
    """Markers of rows: each is [N], or [T, ...] with the dimensions of the storage, or None if the steps lack it.

    Attributes:
        is_init: bool, first row of a trajectory.
        done: bool, last row of a trajectory.
        terminated: bool, last row, in a terminal state: the value after it is 0.
        truncated: bool, last row, ended by a time limit or the like: the value after it is not 0.
        traj_ids: integers [N]; a change from one row to the next is a boundary.
        mask: bool, False for padding, which belongs to no trajectory.

    Raises:
        StructureError: the shapes differ, or ids are not integers.
    """

    is_init: Flags | None = None
    done: Flags | None = None
    terminated: Flags | None = None
    truncated: Flags | None = None
    traj_ids: npt.NDArray[np.integer[Any]] | None = None
    mask: Flags | None = None

    def __post_init__(self) -> None:
        shapes = {}
        for name in (field.name for field in fields(self)):
            marker = getattr(self, name)
            if marker is not None:
                marker = np.asarray(marker)
                object.__setattr__(self, name, marker if name == "traj_ids" else marker != 0)
                shapes[name] = marker.shape
        if len(set(shapes.values())) > 1:
            raise StructureError(f"markers must all have the shape of the rows, got {shapes}.")
        if self.traj_ids is not None and self.traj_ids.dtype.kind not in "iu":
            raise StructureError(f"`traj_ids` must be integers, got {self.traj_ids.dtype}.")

    @property
    def ends(self) -> Flags | None:
        """Last rows, for any reason: the union of `done`, `terminated` and `truncated`; None if all are None."""
        given = [flags for flags in (self.done, self.terminated, self.truncated) if flags is not None]
        return np.logical_or.reduce(given) if given else None


def read_markers(
    nest: Any, *, ndim: int = 1, starts: Sequence[int] | Integers = (0,), before: Callable[[], Any] | None = None
) -> Markers:
    """Return the markers among the leaves of steps, found by name.

    Args:
        nest: steps; leaves [N, ...], or [T, ...] of `ndim` dimensions and more. Or a pair (steps, mask), as observers
            write it with `mask=True`.
        ndim: number of dimensions of the storage, which all leaves share. A marker may have a further dimension of
            size 1.
        starts: rows that do not follow the previous row: the first rows of items that lie end to end, or, in a full
            ring, the row after the row that was written last.
        before: function that returns steps with the row before each of `starts`, or the same row if no row precedes it.
            It is called only if markers depend on it. None if no row precedes any of `starts`.

    Returns:
        The markers; None for markers that the steps lack.

    Raises:
        StructureError: a marker has another shape.

    >>> read_markers({"observation": np.zeros(3), "is_first": [1, 0, 0], "next": {"truncated": [0, 0, 1]}}).ends
    array([False, False,  True])
    """
    found = _find(nest)
    rows = {kind: _rows(leaf, ndim) for kind, leaf in found.items() if kind != "discount"}
    flags = with_types({kind: leaf for kind, leaf in rows.items() if kind not in ("traj_ids", "mask")})
    terminated = flags.get("terminated")
    if terminated is None and "step_type" in found and "discount" in found:
        follows_end = np.roll(_leads_to_end(found, ndim), 1, axis=0)
        first = False if before is None else _leads_to_end(_find(before()), ndim)
        follows_end[np.asarray(starts, np.intp)] = first
        terminated = (rows["step_type"] == LAST) & follows_end
    return Markers(
        is_init=flags.get("first"),
        done=flags.get("last"),
        terminated=terminated,
        truncated=flags.get("truncated"),
        traj_ids=rows.get("traj_ids"),
        mask=rows.get("mask"),
    )


def marker_leaves(nest: Any) -> list[Any]:
    """Return the leaves of steps that `read_markers` looks at. They need not be arrays."""
    leaves: list[Any] = tree.flatten(list(_find(nest).values()))
    return leaves


def _find(nest: Any) -> dict[str, Any]:
    """Return the leaves that are markers, by kind."""
    steps, mask = split_mask(nest)
    inner = find_flags(steps, {"next": ["next"], "collector": ["collector"]})
    found = find_flags(steps, _NAMES) | find_flags(inner.get("collector"), {"traj_ids": ["traj_ids"]})
    if told_by_next := find_flags(inner.get("next"), _ENDS):
        found = {kind: leaf for kind, leaf in found.items() if kind not in _ENDS} | told_by_next
    return found if mask is None else {**found, "mask": mask}


def _leads_to_end(found: Mapping[str, Any], ndim: int) -> Flags:
    # Padding looks like boundary steps, but follows one.
    ends: Flags = (_rows(found["step_type"], ndim) != LAST) & (_rows(found["discount"], ndim) == 0)
    return ends


def _rows(marker: Any, ndim: int) -> Any:
    marker = np.asarray(marker)
    return marker[..., 0] if marker.ndim == ndim + 1 and marker.shape[-1] == 1 else marker
