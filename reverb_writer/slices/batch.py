"""The container of a batch: samples, or slices laid end to end.

field      axis of windows    axis of slices
data       B                  N rows
info       B                  S slices
markers    -                  N rows, and their `slices` S
next       -                  S slices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import StructureError
from reverb_writer.nests import check_same_leaves, fields_of, join_paths, named_leaves, shapes_text
from reverb_writer.slices.slice_markers import SliceMarkers
from reverb_writer.transitions.step_flags import split_mask

Array = npt.NDArray[Any]


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of samples; `data, info = batch` works too. Printed, it shows shapes instead of numbers.

    Attributes:
        data: the table's nest. From a `ReplayDataset`, leaves [B, T, ...]; other `collate`s differ, see there. From a
            `SliceDataset` or `slices.gather`, leaves [N, ...]: slices laid end to end; rows of padding, which
            exist with `short="pad"` only, repeat the last real row.
        info: `BatchInfo`: [B] keys, priorities, probabilities, table sizes, times sampled, and lengths. From a
            `SliceDataset`, [S], of the item that each slice is of. None from `slices.gather`.
        markers: `SliceMarkers` [N] of slices; else None.
        next: from a `SliceDataset` with `with_next`, leaves [S, ...]: the row that follows each slice in its
            trajectory. Where `markers.slices.cut_by_sampler` is False no row follows, and it is the slice's last row.
    """

    data: Any
    info: Any  # a `BatchInfo`, which is of a package above
    markers: SliceMarkers | Any = None  # Any: readers of slices need not check for None
    next: Any = None

    @property
    def mask(self) -> Any:
        """The mask of padding: [B, T] of windows with `collate="pad"`, [N] of slices with `short="pad"`, else None."""
        return getattr(self.info, "mask", None) if self.markers is None else self.markers.mask

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the data and the info."""
        return iter((self.data, self.info))

    def __repr__(self) -> str:
        return shapes_text(self)

    def __getattr__(self, name: str) -> Any:
        """Say where a leaf of the data is, which is no attribute of the batch."""
        if name.startswith("_") or "data" not in vars(self):  # such as in a copy that is not complete yet
            raise AttributeError(name)
        raise AttributeError(f"a Batch has no `{name}`{_whereabouts(self.data, name)}")

    def map_arrays(self, convert: Callable[[Array], Any], convert_info: Callable[[Array], Any] | None = None) -> Batch:
        """Return the batch with each array [...] of data, markers and `next` as `convert` returns it.

        `convert_info` does the same for the arrays of the info, [B]; None for `convert`.
        """
        markers = None if self.markers is None else self.markers.map_arrays(convert)
        after = None if self.next is None else tree.map_structure(convert, self.next)
        info = self.info if convert_info is None or self.info is None else self.info.map_arrays(convert_info)
        return Batch(tree.map_structure(convert, self.data), info, markers, after)

    def part(self, first: int, stop: int) -> Batch:
        """Return slices number `first` to `stop` - 1 of a batch of slices, as views."""
        slices = slice(first, stop)
        begin, end = np.append(0, np.cumsum(self.markers.slices.widths))[[first, stop]].tolist()
        return Batch(
            tree.map_structure(lambda leaf: leaf[begin:end], self.data),
            None if self.info is None else self.info.choose(slices),
            self.markers.part(first, stop),
            None if self.next is None else tree.map_structure(lambda leaf: leaf[slices], self.next),
        )

    @classmethod
    def concatenate(
        cls, batches: Sequence[Batch], numbers: Sequence[int] | None = None, *, are_lists: bool = False
    ) -> Batch:
        """Return batches as one: samples one after the other, slices laid end to end.

        Args:
            batches: from one storage or table, or from several, their members; at least one.
            numbers: of the member that each batch is from, for `markers.members`; None for no members.
            are_lists: whether their data are lists of samples, as `collate="list"` makes them.

        Raises:
            StructureError: they differ in structure, dtypes or shapes, but for the number of samples; names the leaf.
        """
        if not are_lists:
            _check_alike(batches)
        first = batches[0]

        def joined(nests: Sequence[Any]) -> Any:
            return None if nests[0] is None else tree.map_structure(lambda *leaves: np.concatenate(leaves), *nests)

        data, markers = [batch.data for batch in batches], [batch.markers for batch in batches]
        return Batch(
            [sample for samples in data for sample in samples] if are_lists else joined(data),
            None if first.info is None else type(first.info).concatenate([batch.info for batch in batches]),
            None if first.markers is None else SliceMarkers.concatenate(markers, numbers),
            joined([batch.next for batch in batches]),
        )

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors pinned, as `DataLoader(pin_memory=True)` asks for."""
        return self.map_arrays(_pinned, _pinned)

    def numbers(self) -> dict[str, Array]:
        """Return the arrays of `info`, [B], and of `markers`, [N], by name."""
        named = {**vars(self.info), **({} if self.markers is None else vars(self.markers))}
        return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}


def _check_alike(batches: Sequence[Batch]) -> None:
    """Check that batches have one structure, dtypes and shapes, but for the number of samples."""
    if len({(batch.markers is None, batch.next is None) for batch in batches}) > 1:
        raise StructureError("batches differ: members need one kind of slices.")
    where = "members must have steps of one structure"
    first_paths, first_leaves = named_leaves(batches[0].data, where)
    for batch in batches:
        paths, leaves = named_leaves(batch.data, where)
        check_same_leaves(where, paths, first_paths, "the first")
        for path, leaf, like in zip(paths, leaves, first_leaves, strict=True):
            if (leaf.dtype, leaf.shape[1:]) != (like.dtype, like.shape[1:]):
                raise StructureError(
                    f"{where}: leaf `{path}` {leaf.dtype} {list(leaf.shape)}, expected `{path}` {like.dtype} "
                    f"{list(like.shape)} as in the first, but for the number of samples. Have them alike, by "
                    "`transform` for example."
                )


def _pinned(tensor: Any) -> Any:
    return tensor.pin_memory() if hasattr(tensor, "pin_memory") else tensor  # strings are lists, or bytes in one


def _whereabouts(data: Any, name: str) -> str:
    """Return where a leaf is, or which there are; ends the message about one that was looked for elsewhere."""
    steps, mask = split_mask(data)
    fields = fields_of(steps)
    if fields is None:
        return f", only `data`, a {type(data).__name__}, `info`, `markers` and `next`."
    if name in fields:
        of_data = "batch.data" if mask is None else "batch.data[0]"
        leaf = f"{of_data}[{name!r}]" if isinstance(steps, Mapping) else f"{of_data}.{name}"
        return f": it is a part of the data, `{leaf}`."
    return f"; the leaves of its data are {join_paths(named_leaves(steps, 'the data')[0])}."
