"""The columns that are written of a step: its leaves, and the mask after them if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.specs import spec_tensor
from reverb_writer.steps import StepStructure


class StepLayout:
    """The columns of a step structure, with or without a mask: True for real steps, False for padding.

    Immutable; safe to share between threads.

    Attributes:
        structure: of the steps that are given, without the mask.
        mask: whether there is a mask.
        paths, dtypes, shapes: of each column, without time and without the environments.
        pack: a function that makes the nest of a step, or of a window, from its columns; without the mask.
        spec: nest of array specs of what is written: the step, or a pair of the step and the mask.
        encoded_spec: the same as a tensor, which each chunk carries.
        padding_step: columns of a padding step.
    """

    def __init__(self, structure: StepStructure, *, mask: bool) -> None:
        """Add the mask to a structure, or not."""
        self.structure, self.mask = structure, mask
        self.paths, self.dtypes, self.shapes = structure.paths, structure.dtypes, structure.shapes
        self.pack, self.padding_step = structure.pack, structure.padding_step()
        self.spec = structure.pack(list(map(ArraySpec, self.shapes, self.dtypes)))
        if mask:
            self.paths, self.dtypes, self.shapes = (
                (*self.paths, "mask"), (*self.dtypes, np.dtype(bool)), (*self.shapes, ()),
            )  # fmt: skip
            self.pack = lambda leaves: structure.pack(leaves[:-1])
            self.spec = (self.spec, ArraySpec((), np.dtype(bool)))
            self.padding_step = [*self.padding_step, np.False_]
        self.encoded_spec = spec_tensor(self.spec)


def matches(structure: StepStructure, leaves: Sequence[Any], num_steps: int) -> bool:
    """Return whether arrays [num_steps, ...] have the dtypes and shapes of the steps; False if any are strings."""
    if np.dtype(object) in structure.dtypes:
        return False
    expected = zip(structure.dtypes, structure.shapes, strict=True)
    return [(leaf.dtype, leaf.shape) for leaf in leaves] == [(dtype, (num_steps, *shape)) for dtype, shape in expected]
