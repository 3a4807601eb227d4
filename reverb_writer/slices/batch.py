"""The container of a batch: samples, or slices laid end to end. Packed samples are slices of whole samples.

field        axis of windows    axis of slices
data         B                  N rows
row_kinds    B                  N rows
info         B                  S slices
slices       -                  S slices, and N rows
next         -                  S slices, as `next_kinds`
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.arrays import array_like, array_namespace, pinned
from reverb_writer.errors import StructureError
from reverb_writer.nests import check_same_leaves, fields_of, join_paths, named_leaves, shapes_text
from reverb_writer.rows.layouts import leaves_of_kinds, steps_and_mask
from reverb_writer.slices.axes import ROWS, SAMPLES, converted, joined
from reverb_writer.slices.sampler import Slices

Array = npt.NDArray[Any]


@dataclass(frozen=True, repr=False)
class Batch:
    """A batch of samples, which can be unpacked: `data, info = batch`. Its `repr` shows shapes instead of numbers.

    Attributes:
        data: the table's nest. From a `ReplayDataset`, leaves [B, T, ...]. From a `SliceDataset`, `slices.gather` or
            `collate="pack"`, leaves [N, ...]: slices or whole samples laid end to end. Rows of padding, which exist
            only with `short="pad"`, repeat the last real row.
        info: `BatchInfo`: [B] keys, priorities, probabilities, table sizes, times sampled, and lengths. From a
            `SliceDataset`, [S], with the info of each slice's item. None from `slices.gather`.
        slices: `Slices`: which rows begin and end a slice, lengths, probabilities; None for windows.
        next: from a `SliceDataset` with `with_next`, leaves [S, ...]: the row that follows each slice in its
            trajectory. Where `slices.cut_by_sampler` is False, no row follows, and it is the slice's last row.
        row_kinds: uint8, the kinds that the writer of the rows stored (`reverb_writer.rows`), [B, T] or [N]; None for
            items of other writers.
        next_kinds: uint8 [S], the kinds of `next`; None without `next`, or if `row_kinds` is None.
        last_row: as given to the dataset: whose row the flags of an end stand on.
    """

    data: Any = field(metadata=ROWS)  # the axis of slices; windows have the axis of samples
    info: Any  # a `BatchInfo`, which a package above defines
    slices: Slices | Any = None  # Any: readers of slices need not check for None
    next: Any = field(default=None, metadata=SAMPLES)
    row_kinds: Any = field(default=None, metadata=ROWS)
    next_kinds: Any = field(default=None, metadata=SAMPLES)
    last_row: rows.LastRow | None = None

    @functools.cached_property
    def kinds(self) -> Any:
        """The kind of each row, uint8 [B, T] or [N]: the stored kinds, or else those that the leaves show.

        Raises:
            StructureError: no kinds are stored, and the leaves do not show them, or contradict themselves.
        """
        if self.row_kinds is not None:
            return self.row_kinds
        mask, starts = (self._within_lengths(), None)
        if self.slices is not None:
            mask, starts = self.slices.mask, self.slices.starts
        elif bool(mask.all()):  # no sample was padded, so rows after an end may be the observer's padding
            mask = None
        return rows.kinds_of(self.data, mask=mask, starts=starts, last_row=self.last_row)

    @property
    def is_first(self) -> Any:
        """Whether each row is the first of its episode, [B, T] or [N]; errors as in `kinds`."""
        return rows.has(self.kinds, rows.FIRST)

    @property
    def is_last(self) -> Any:
        """Whether each row is the last of its episode, [B, T] or [N]; errors as in `kinds`."""
        return rows.has(self.kinds, rows.LAST)

    @property
    def is_terminal(self) -> Any:
        """Whether each row is the last of an episode that the environment ended; errors as in `kinds`."""
        return rows.has(self.kinds, rows.TERMINAL)

    @property
    def mask(self) -> Any:
        """Whether each row is real, [B, T] or [N]: False for padding; errors of windows as in `kinds`.

        If no leaf says what a row is, only the rows that `collate="pad"` appended are padding.
        """
        if self.slices is not None:
            return self.slices.mask
        has_kinds = self.row_kinds is not None or leaves_of_kinds(self.data)
        return ~rows.has(self.kinds, rows.PADDING) if has_kinds else self._within_lengths()

    def _within_lengths(self) -> Any:
        """Return whether each row of windows [B, T] is within its sample, which `collate="pad"` may have padded."""
        lengths = getattr(self.info, "lengths", None)
        sizes = {tuple(leaf.shape[:2]) for leaf in tree.flatten(self.data) if getattr(leaf, "ndim", 0) > 1}
        if lengths is None or len(sizes) != 1:
            return np.ones(1, bool)
        xp = array_namespace(lengths)
        return array_like(xp, np.arange(sizes.pop()[1]), lengths) < lengths[:, None]

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
        """Return the batch with each array [...] of data, kinds and `next` converted by `convert`.

        `convert_info` converts the arrays of the info, [B], and of `slices`. None keeps the info, whose keys have 64
        bits, and converts `slices` by `convert`.
        """
        info = self.info if self.info is None or convert_info is None else converted(self.info, convert_info)
        slices = None if self.slices is None else converted(self.slices, convert_info or convert)
        return dataclasses.replace(converted(self, convert), info=info, slices=slices)

    @classmethod
    def concatenate(cls, batches: Sequence[Batch], numbers: Sequence[int] | None = None) -> Batch:
        """Return batches as one batch: samples one after the other, slices laid end to end.

        Args:
            batches: batches of one storage or table, or of several members; at least one.
            numbers: number of each batch's member, for `slices.members`; None for no members.

        Returns:
            A batch with stored kinds, if any of the batches has them: the others add those that their leaves show. If
            the leaves of one do not show them, the batch has no stored kinds.

        Raises:
            StructureError: the batches differ in more than their number of samples: in structure, dtypes or shapes. The
                error names the leaf.
        """
        _check_alike(batches)
        of_batches: dict[str, Any] = _joined_kinds(batches)
        if (info := batches[0].info) is not None:
            of_batches["info"] = type(info).concatenate([batch.info for batch in batches])
        if batches[0].slices is not None:
            of_batches["slices"] = Slices.concatenate([batch.slices for batch in batches], numbers)
        return joined(batches, **of_batches)

    def pin_memory(self) -> Batch:
        """Return the batch with its tensors pinned, for `DataLoader(pin_memory=True)`."""
        return self.map_arrays(pinned, pinned)


def _check_alike(batches: Sequence[Batch]) -> None:
    """Check that batches have equal structure, dtypes and shapes, except the number of samples."""
    if len({(batch.slices is None, batch.next is None) for batch in batches}) > 1:
        raise StructureError("batches differ: all members must be windows, or slices with or without `next`.")
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


def _joined_kinds(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return the fields of a batch of several batches from which it knows its kinds."""
    last_rows = {batch.last_row for batch in batches}
    last_row = last_rows.pop() if len(last_rows) == 1 else None
    unknown = {"row_kinds": None, "next_kinds": None, "last_row": last_row}
    stored = [batch.row_kinds is not None for batch in batches]
    needs_all = batches[0].next is not None  # the leaves of slices alone do not show the kinds of `next`
    if not any(stored) or (needs_all and not all(stored)):
        return unknown
    try:
        kinds = np.concatenate([batch.kinds for batch in batches])
    except StructureError:  # `kinds` of the batch raises it again, when they are needed
        return unknown
    next_kinds = np.concatenate([batch.next_kinds for batch in batches]) if needs_all else None
    return {**unknown, "row_kinds": kinds, "next_kinds": next_kinds}


def _whereabouts(data: Any, name: str) -> str:
    """Return the end of a message: the place of a leaf that was looked for elsewhere, or the existing leaves."""
    steps, mask = steps_and_mask(data)
    fields = fields_of(steps)
    if fields is None:
        return f", only `data`, a {type(data).__name__}, `info`, `slices` and `next`."
    if name in fields:
        of_data = "batch.data" if mask is None else "batch.data[0]"
        leaf = f"{of_data}[{name!r}]" if isinstance(steps, Mapping) else f"{of_data}.{name}"
        return f": it is a part of the data, `{leaf}`."
    return f"; the leaves of its data are {join_paths(named_leaves(steps, 'the data')[0])}."
