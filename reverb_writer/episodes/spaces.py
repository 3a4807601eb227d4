"""Gymnasium's spaces: their leaves, dtypes and shapes, and one-hot vectors.

Spaces are recognised by the names of their classes, so that nothing is imported: spaces of Gym work, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import StructureError
from reverb_writer.nests import named_leaves

Array = npt.NDArray[Any]


class SpaceLeaf:
    """A space that is not made of other spaces."""

    def __init__(self, space: Any) -> None:
        """Read the dtype, the shape and the numbers of values of a space."""
        self.space = space
        dtype = np.dtype(object if space.dtype is None or space.shape is None else space.dtype)
        self.dtype = np.dtype(object) if dtype.kind in "SU" else dtype  # of a sample; `object` for texts
        # of a sample; () if the space has none, as that of texts
        self.shape = () if self.dtype.kind == "O" else tuple(space.shape)
        kinds = kinds_of(space)
        # how many values each component has, if it is Discrete or MultiDiscrete; else None
        self.sizes = (
            np.array([space.n]) if "Discrete" in kinds else np.ravel(space.nvec) if "MultiDiscrete" in kinds else None
        )
        self.starts = np.ravel(getattr(space, "start", 0))  # the smallest value of each component

    def one_hot_shape(self) -> tuple[int, ...]:
        """Return the shape of the one-hot vector of a sample, or that of the sample if it has none."""
        return self.shape if self.sizes is None else (int(self.sizes.sum()),)

    def one_hot(self, leaf: Array) -> Array:
        """Return the one-hot vectors of samples, or the samples if their space is neither Discrete nor MultiDiscrete.

        Samples are [m, *shape] integers. The `start` of a discrete space is subtracted, which RLlib does not do.

        Returns:
            float32 [m, n], or [m, sum(nvec)]: the vectors of all components, one after the other.
        """
        sizes = self.sizes
        if sizes is None:
            return leaf
        num = len(leaf)
        values = leaf.reshape(num, len(sizes)) - self.starts
        if ((values < 0) | (values >= sizes)).any():
            raise StructureError(f"one-hot vectors need values of {self.space}, got {leaf}.")
        vectors = np.zeros((num, int(sizes.sum())), np.float32)
        vectors[np.arange(num)[:, None], values + np.cumsum(sizes) - sizes] = 1
        return vectors


class SpaceLeaves:
    """The leaves of a space.

    Attributes:
        struct: the spaces of its leaves, as a nest in the structure of its samples.
        paths: the names of the leaves.
        leaves: the leaves of a sample, in their order.
        shapes: their shapes.
    """

    def __init__(self, space: Any) -> None:
        """Find the leaves of a space."""
        self.struct = struct_of(space)
        self.paths, leaves = named_leaves(self.struct, "space")
        self.leaves = [SpaceLeaf(leaf) for leaf in leaves]
        self.shapes = [leaf.shape for leaf in self.leaves]


def struct_of(space: Any) -> Any:
    """Return the spaces within Dict and Tuple spaces, as a nest."""
    parts = parts_of(space)
    if isinstance(parts, dict):
        return {key: struct_of(part) for key, part in parts.items()}
    return space if parts is None else tuple(map(struct_of, parts))


def parts_of(space: Any) -> dict[Any, Any] | tuple[Any, ...] | None:
    """Return the spaces directly within a Dict or Tuple space; None if it is another one, or None."""
    kinds = kinds_of(space)  # a OneOf has `spaces`, too, but a sample is of one of them
    return dict(space.spaces) if "Dict" in kinds else tuple(space.spaces) if "Tuple" in kinds else None


def kinds_of(space: Any) -> set[str]:
    """Return the names of the class of a space and of its bases."""
    return {kind.__name__ for kind in type(space).__mro__}


def check(space: Any, item: Any, what: str) -> None:
    """Check that a space contains an item, which `what` names."""
    if space is not None and not space.contains(item):
        raise StructureError(f"{what} {item!r} is not in its space {space}.")
