"""Gymnasium's spaces: their leaves, dtypes and shapes, one-hot vectors, and samples as leaves of a step.

    space                                   leaf, or nest
    --------------------------------------  ------------------------------------------------------
    Box, Discrete, MultiBinary,             array of the space's dtype and shape
    MultiDiscrete
    Text                                    string
    Dict, Tuple                             dict, tuple of the leaves of their parts
    Graph, Sequence, OneOf, any other       refused: leaves or shapes differ from step to step

Leaves of a vector environment of N environments are [N, ...].

Spaces are recognised by the names of their classes, so that nothing is imported: spaces of Gym work, too, in episodes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.lazy import needs
from reverb_writer.leaves import Fit, fit
from reverb_writer.nests import named_leaves
from reverb_writer.protocol.signatures import ArraySpec

Array = npt.NDArray[Any]

_REASONS = {
    "Graph": "its nodes and edges differ in number from step to step",
    "Sequence": "its length differs from step to step",
    "OneOf": "its leaves differ from step to step",
}
_WRITABLE = {"Text", "Box", "Discrete", "MultiBinary", "MultiDiscrete"}


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


class Parts:
    """The leaves of a space.

    Attributes:
        struct: the spaces of its leaves, as a nest in the structure of its samples.
        paths: the names of the leaves.
        leaves: the leaves of a sample, in their order.
    """

    def __init__(self, space: Any) -> None:
        """Find the leaves of a space."""
        self.struct = struct_of(space)
        self.paths, leaves = named_leaves(self.struct, "space")
        self.leaves = [SpaceLeaf(leaf) for leaf in leaves]


def struct_of(space: Any) -> Any:
    """Return the spaces within Dict and Tuple spaces, as a nest."""
    parts = parts_of(space)
    if isinstance(parts, dict):
        return {key: struct_of(part) for key, part in parts.items()}
    return space if parts is None else tuple(map(struct_of, parts))


def parts_of(space: Any) -> dict[Any, Any] | tuple[Any, ...] | None:
    """Return the spaces directly within a Dict or Tuple space; None if it is another one, or None."""
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return dict(inner)
    return tuple(inner) if isinstance(inner, tuple | list) else None


def kinds_of(space: Any) -> set[str]:
    """Return the names of the class of a space and of its bases."""
    return {kind.__name__ for kind in type(space).__mro__}


def space_of_columns(nest: Any) -> Any:
    """Return an unbounded space for the rows of a nest of columns [T, ...].

    Raises:
        StructureError: a column has no numbers.
    """
    with needs("A space", "reverb-writer[gymnasium]"):
        spaces = importlib.import_module("gymnasium.spaces")
    if isinstance(nest, Mapping):
        return spaces.Dict({key: space_of_columns(value) for key, value in nest.items()})
    if isinstance(nest, tuple):
        return spaces.Tuple([space_of_columns(value) for value in nest])
    dtype, shape = nest.dtype, nest.shape[1:]
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    if dtype.kind not in "iu":
        raise StructureError(
            f"no default space exists for {dtype} {shape}. Pass `observation_space` and `action_space`."
        )
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype)


def check(space: Any, item: Any, what: str) -> None:
    """Check that a space contains an item, which `what` names."""
    if space is not None and not space.contains(item):
        raise StructureError(f"{what} {item!r} is not in its space {space}.")


def space_of(env: Any, name: str) -> Any:
    """Return a Gymnasium space of an environment."""
    space = getattr(env, name, None)
    if "Space" not in kinds_of(space):
        has = "none" if space is None else f"a {type(space).__name__}"
        raise SpecError(f"`env` must have `{name}`, a gymnasium.Space; {type(env).__name__} has {has}. Set it.")
    return space


def space_spec(space: Any, name: str) -> Any:
    """Return the dtypes and shapes of a space's elements in a step, a nest of `ArraySpec`; messages say `name`."""
    kinds, parts = kinds_of(space), parts_of(space)
    if parts is not None and kinds & {"Dict", "Tuple"}:
        if isinstance(parts, dict):
            return {key: space_spec(part, f"{name}/{key}") for key, part in parts.items()}
        return tuple(space_spec(part, f"{name}/{index}") for index, part in enumerate(parts))
    if kinds & _WRITABLE:
        leaf = SpaceLeaf(space)
        return ArraySpec(leaf.shape, leaf.dtype, name)
    kind = type(space).__name__
    reason = _REASONS.get(kind, "the structure of its elements is not known")
    raise SpecError(
        f"`{name}`: a space of type {kind} cannot be written: {reason}, and a column of a table has one shape. Turn it "
        "into arrays of one shape with a wrapper: pad them, and store their true sizes beside them."
    )


def encoder(spec: Any, num_envs: int | None = None) -> Callable[[Any], Any]:
    """Return a function that copies elements of a space into leaves of a step.

    `spec` is what `space_spec` returned; with `num_envs` = N, elements are [N, ...], from a vector environment.

    Its results share no memory with the environment, which may reuse its arrays.
    """
    if isinstance(spec, dict):
        parts = {key: encoder(part, num_envs) for key, part in spec.items()}
        return lambda element: {key: encode(element[key]) for key, encode in parts.items()}
    if isinstance(spec, tuple):
        items = tuple(encoder(part, num_envs) for part in spec)
        return lambda element: tuple(encode(part) for encode, part in zip(items, element, strict=True))
    shape = spec.shape if num_envs is None else (num_envs, *spec.shape)
    if spec.dtype == object:
        return str if num_envs is None else lambda strings: np.array(strings, object)
    return _array_encoder(spec.dtype, shape, spec.name)


def _array_encoder(dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> Callable[[Any], Any]:
    scalar = dtype.type
    native = scalar if dtype == np.int64 else None  # it holds any int that an environment accepts

    def convert(element: Any) -> Any:
        array = np.asarray(element)
        if array.shape != shape and array.size == math.prod(shape) and max(array.ndim, len(shape)) == 1:
            array = array.reshape(shape)  # a number as [1], or [1] as a number
        policy = Fit.LOSSY if dtype.kind == "f" else Fit.LOSSLESS
        advice = f"It must be {dtype} {shape}, as its space says."
        return fit(array, dtype, shape, f"`{name}`", "as its space says", policy, advice)

    def encode(element: Any) -> Any:
        if type(element) is np.ndarray and element.dtype == dtype and element.shape == shape:
            return element.copy()
        return convert(element)

    def encode_scalar(element: Any) -> Any:
        kind = type(element)
        return element if kind is scalar else native(element) if native and kind is int else convert(element)

    return encode if shape else encode_scalar
