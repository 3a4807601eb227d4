"""The columns that are written of a step: its leaves, and the mask after them if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.signatures import ArraySpec, check_signature, spec_tensor
from reverb_writer.steps import StepStructure, step_bytes


class StepLayout:
    """The columns of a step structure, with or without a mask: True for real steps, False for padding.

    Immutable; safe to share between threads.

    Attributes:
        structure: of the steps that are given, without the mask.
        mask: whether there is a mask.
        paths, dtypes, shapes: of each column, without time and without the environments.
        pack: a function that makes the nest of a step, or of a window, from its columns; without the mask.
        encoded_spec: the spec of a step, or of a pair of the step and the mask, as the tensor that each chunk carries.
        padding_step: columns of a padding step.
    """

    def __init__(self, structure: StepStructure, *, mask: bool) -> None:
        """Add the mask to a structure, or not."""
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

    def check(self, signatures: Mapping[str, Any]) -> None:
        """Raise `StructureError` if Reverb cannot store a column, or it is not as in the signature of a table."""
        for dtype, path in zip(self.dtypes, self.paths, strict=True):
            try:
                tensors.dtype_number(dtype)
            except StructureError as error:
                raise StructureError(f"leaf `{path}`: {error}") from None
        for table, signature in signatures.items():
            if signature is not None:
                check_signature(table, signature, self.paths, self.dtypes, self.shapes)

    def check_item(self, num_steps: int, max_bytes: int) -> None:
        """Raise `StructureError` if an item of so many steps is larger, uncompressed; a string counts as a pointer."""
        sizes = [step_bytes([dtype], [shape]) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        num_bytes = num_steps * sum(sizes)
        if num_bytes > max_bytes:
            size, path = max(zip(sizes, self.paths, strict=True))
            raise StructureError(
                f"an item of {num_steps} steps takes {num_bytes} bytes uncompressed, expected at most {max_bytes}, the "
                f"observer's `max_item_bytes`. Its largest leaf is `{path}` with {size} bytes per step. Write fewer "
                "steps in an item, make that leaf smaller, or raise the limit."
            )
