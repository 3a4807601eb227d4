"""The columns of a written step, which are its leaves and an optional mask; and the sizes of items.

Windows of a fixed length without strings have a size that is known before the first step. Otherwise the bytes are
counted step by step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.signatures import ArraySpec, check_signature, spec_tensor
from reverb_writer.steps import StepStructure
from reverb_writer.windows import EndOfEpisode
from reverb_writer.writing.window_kinds import WindowTarget


class StepLayout:
    """The columns of a step structure, with or without a mask: True for real steps, False for padding. Immutable.

    Attributes:
        structure: structure of the given steps, without the mask.
        paths, dtypes, shapes: per column, without the axes of time and environments.
        pack: function that makes the nest of a step or a window from its columns, without the mask.
        encoded_spec: spec of a step, or of a pair (step, mask), as the tensor in each chunk.
        padding_step: columns of a padding step.
    """

    def __init__(self, structure: StepStructure, *, mask: bool) -> None:
        """Take a structure, and add a column if `mask`."""
        self.structure, self.mask = structure, mask
        self.paths, self.dtypes, self.shapes = structure.paths, structure.dtypes, structure.shapes
        self.pack, self.padding_step = structure.pack, structure.padding_step()
        spec = structure.pack(list(map(ArraySpec, self.shapes, self.dtypes)))
        if mask:
            self.paths, self.dtypes, self.shapes = (
                (*self.paths, "mask"), (*self.dtypes, np.dtype(bool)), (*self.shapes, ()),
            )  # fmt: skip
            self.pack = lambda leaves: structure.pack(leaves[:-1])
            spec = (spec, ArraySpec((), np.dtype(bool)))
            self.padding_step = [*self.padding_step, np.False_]
        self.encoded_spec = spec_tensor(spec)

    def check(self, targets: Sequence[WindowTarget], signatures: Mapping[str, Any]) -> None:
        """Raise `StructureError` if Reverb cannot store a column, or a window does not match its table's signature."""
        for dtype, path in zip(self.dtypes, self.paths, strict=True):
            try:
                tensors.dtype_number(dtype)
            except StructureError as error:
                raise StructureError(f"leaf `{path}`: {error}") from None
        for target in targets:
            for table in target.tables:
                if (signature := signatures[table]) is not None:
                    length, is_cut = target.spec.sequence_length, target.spec.end_of_episode is EndOfEpisode.TRUNCATE
                    check_signature(
                        table, signature, self.paths, self.dtypes, self.shapes, length=length, is_cut=is_cut
                    )


class ItemSizes:
    """Counts the bytes of the steps of one environment's episode. Not thread-safe: the observer's caller uses it.

    Attributes:
        counts_steps: whether each step must be checked.
    """

    def __init__(
        self, layout: StepLayout, targets: Sequence[WindowTarget], limit: int, max_steps: int | None = None
    ) -> None:
        """Check all sizes known before the first step against `limit`, in bytes; raises as `check`.

        Longer episodes than `max_steps` are in no item.
        """
        self._paths, self._limit, self._max_steps = layout.paths, limit, max_steps or math.inf
        self._step_bytes = [  # per leaf; 0 if the bytes must be counted
            0 if dtype == np.dtype(object) else dtype.itemsize * math.prod(shape)
            for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
        ]
        lengths = {target.spec.sequence_length for target in targets}
        for length in lengths:
            self._check(length or 1, (length or 1) * sum(self._step_bytes), self._step_bytes)
        self._strings = [column for column, dtype in enumerate(layout.dtypes) if dtype == np.dtype(object)]
        # Lengths of the windows whose steps must be counted; None for the whole episode.
        self._lengths = [length for length in lengths if length is None or self._strings]
        self.counts_steps = bool(self._lengths)
        self._longest = max((length or 0 for length in self._lengths), default=0)
        self._totals: dict[int, int] = {}  # bytes of the episode's first steps, by their number

    def check(self, leaves: Sequence[Any], num_steps: int) -> None:
        """Count step number `num_steps` of the episode, or raise `StructureError`. A repeated number replaces it."""
        totals = self._totals
        if num_steps > self._max_steps:
            return
        if num_steps == 1:
            totals.clear()
        sizes = [*self._step_bytes]
        for column in self._strings:
            sizes[column] = _column_bytes(leaves[column])
        total = totals.get(num_steps - 1, 0) + sum(sizes)
        for length in self._lengths:
            num_in_item = min(length or num_steps, num_steps)
            self._check(num_in_item, total - totals.get(num_steps - num_in_item, 0), sizes)
        totals[num_steps] = total
        totals.pop(num_steps - self._longest - 2, None)  # the one before is needed if an interrupt keeps this step out

    def _check(self, num_steps: int, num_bytes: int, sizes: Sequence[int]) -> None:
        if num_bytes > self._limit:
            size, path = max(zip(sizes, self._paths, strict=True))
            raise StructureError(
                f"an item of {num_steps} steps takes {num_bytes} bytes uncompressed, expected at most {self._limit}, "
                f"the observer's `max_item_bytes`. Its largest leaf is `{path}` with {size} bytes per step. Write "
                "fewer steps in an item, make that leaf smaller, or raise the limit."
            )


def _column_bytes(column: Any) -> int:
    """Return the uncompressed bytes of an array; for strings, the bytes of their text."""
    if isinstance(column, str | bytes):
        return len(column.encode() if isinstance(column, str) else column)
    array = np.asarray(column)
    return sum(map(_column_bytes, array.flat)) if array.dtype.kind in "OUS" else array.nbytes
