"""The container of a batch and its markers: samples, or slices laid end to end.

field      axis of windows    axis of slices
data       B                  N rows
info       B                  S slices
markers    -                  N rows, and their `slices` S
next       -                  S slices
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.nests import check_same_leaves, fields_of, join_paths, named_leaves, shapes_text
from reverb_writer.slices.axes import ROWS, SAMPLES, converted, joined
from reverb_writer.slices.markers import Flags, Integers
from reverb_writer.slices.sampler import Slices
from reverb_writer.transitions.step_flags import split_mask

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SliceMarkers:
    """Markers of slices laid end to end; the caller owns all arrays.

    The data keep the markers that were stored as leaves of the steps. On padding, which exists only with `short="pad"`,
    all markers are False.

    Attributes:
        is_init: [N] True on the first row of each slice, and where True was stored.
        done: [N] True where `truncated` is True, or where `done`, `terminated` or `truncated` was stored as True.
        terminated: [N] as stored; False if it was not stored.
        truncated: [N] True on the last real row of each slice and nowhere else. Where `terminated` is True too, the
            next state is terminal: do not bootstrap.
        cut_by_sampler: [N] True on the last row of each slice that ends before its trajectory ends: the sampler
            truncated it, not the environment.
        traj_ids: [N] as stored, or the number of the trajectory if no ids are stored. Two slices may belong to one
            trajectory.
        mask: [N] True on rows that are not padding; None if short slices are not padded.
        slices: lengths, probabilities and rows of the slices in the storage, to update priorities.
        members: [N] number of the row's storage; None for a single storage.
    """

    is_init: Flags = field(metadata=ROWS)
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


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of samples, which can be unpacked: `data, info = batch`. Its `repr` shows shapes instead of numbers.

    Attributes:
        data: the table's nest. From a `ReplayDataset`, leaves [B, T, ...]. From a
            `SliceDataset` or `slices.gather`, leaves [N, ...]: slices laid end to end. Rows of padding, which exist
            only with `short="pad"`, repeat the last real row.
        info: `BatchInfo`: [B] keys, priorities, probabilities, table sizes, times sampled, and lengths. From a
            `SliceDataset`, [S], with the info of each slice's item. None from `slices.gather`.
        markers: `SliceMarkers` [N] of slices; otherwise None.
        next: from a `SliceDataset` with `with_next`, leaves [S, ...]: the row that follows each slice in its
            trajectory. Where `markers.slices.cut_by_sampler` is False, no row follows, and it is the slice's last row.
    """

    data: Any = field(metadata=ROWS)  # the axis of slices; windows have the axis of samples
    info: Any  # a `BatchInfo`, which a package above defines
    markers: SliceMarkers | Any = None  # Any: readers of slices need not check for None
    next: Any = field(default=None, metadata=SAMPLES)

    @property
    def mask(self) -> Any:
        """The mask of padding: [B, T] with `collate="pad"`, [N] with `short="pad"`, otherwise None."""
        return getattr(self.info, "mask", None) if self.markers is None else self.markers.mask

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the data and the info."""
        return iter((self.data, self.info))

    def __repr__(self) -> str:
        return shapes_text(self)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, which names the place of a leaf of the data."""
        if name.startswith("_") or "data" not in vars(self):  # for example in a copy that is not complete yet
            raise AttributeError(name)
        raise AttributeError(f"a Batch has no `{name}`{_whereabouts(self.data, name)}")

    def map_arrays(self, convert: Callable[[Array], Any], convert_info: Callable[[Array], Any] | None = None) -> Batch:
        """Return the batch with each array [...] of data, markers and `next` converted by `convert`.

        `convert_info` converts the arrays of the info, [B]; None keeps the info, whose keys have 64 bits.
        """
        info = self.info if self.info is None or convert_info is None else converted(self.info, convert_info)
        markers = None if self.markers is None else converted(self.markers, convert)
        return dataclasses.replace(converted(self, convert), info=info, markers=markers)

    @classmethod
    def concatenate(cls, batches: Sequence[Batch], numbers: Sequence[int] | None = None) -> Batch:
        """Return batches as one batch: samples one after the other, slices laid end to end.

        Args:
            batches: batches of one storage or table, or of several members; at least one.
            numbers: number of each batch's member, for `markers.members`; None for no members.

        Raises:
            StructureError: the batches differ in more than their number of samples: in structure, dtypes or shapes. The
                error names the leaf.
        """
        _check_alike(batches)
        of_batches: dict[str, Any] = {}
        if (info := batches[0].info) is not None:
            of_batches["info"] = type(info).concatenate([batch.info for batch in batches])
        if batches[0].markers is not None:
            markers = [batch.markers for batch in batches]
            slices = joined([part.slices for part in markers], storage_shape=())
            members = None if numbers is None else np.repeat(numbers, [len(part) for part in markers])
            of_batches["markers"] = joined(markers, slices=slices, members=members)
        return joined(batches, **of_batches)

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors pinned, for `DataLoader(pin_memory=True)`."""
        return self.map_arrays(_pinned, _pinned)


def _check_alike(batches: Sequence[Batch]) -> None:
    """Check that batches have equal structure, dtypes and shapes, except the number of samples."""
    if len({(batch.markers is None, batch.next is None) for batch in batches}) > 1:
        raise StructureError("batches differ: all members need the same markers.")
    where = "members must have steps of equal structure"
    first_paths, first_leaves = named_leaves(batches[0].data, where)
    for batch in batches:
        paths, leaves = named_leaves(batch.data, where)
        check_same_leaves(where, paths, first_paths, "the first")
        for path, leaf, like in zip(paths, leaves, first_leaves, strict=True):
            if (leaf.dtype, leaf.shape[1:]) != (like.dtype, like.shape[1:]):
                raise StructureError(
                    f"{where}: leaf `{path}` {leaf.dtype} {list(leaf.shape)}, expected `{path}` {like.dtype} "
                    f"{list(like.shape)} as in the first batch, for any number of samples. Make them equal, for "
                    "example by a `transform`."
                )


def _pinned(tensor: Any) -> Any:
    return tensor.pin_memory() if hasattr(tensor, "pin_memory") else tensor  # strings stay NumPy arrays


def _whereabouts(data: Any, name: str) -> str:
    """Return the end of a message: the place of a leaf that was looked for elsewhere, or the existing leaves."""
    steps, mask = split_mask(data)
    fields = fields_of(steps)
    if fields is None:
        return f", only `data`, a {type(data).__name__}, `info`, `markers` and `next`."
    if name in fields:
        of_data = "batch.data" if mask is None else "batch.data[0]"
        leaf = f"{of_data}[{name!r}]" if isinstance(steps, Mapping) else f"{of_data}.{name}"
        return f": it is a part of the data, `{leaf}`."
    return f"; the leaves of its data are {join_paths(named_leaves(steps, 'the data')[0])}."
