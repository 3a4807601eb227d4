"""Gymnasium's spaces as leaves of a step: copies of elements, one-hot vectors, fill values outside the data.

    space                                   leaf, or nest
    --------------------------------------  ------------------------------------------------------
    Box, Discrete, MultiBinary,             array of the space's dtype and shape
    MultiDiscrete
    Text                                    string
    Dict, Tuple                             dict, tuple of the leaves of their parts
    Graph, Sequence, OneOf, any other       refused: leaves or shapes differ from step to step

Leaves of a vector environment of N environments are [N, ...]. Spaces are recognised by the names of their classes,
without an import, so Gym's spaces also work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import Fit, fit, host_array, python_numbers
from reverb_writer.leaves import convert as cast
from reverb_writer.nests import check_same_leaves, named_leaves

Array = npt.NDArray[Any]

_REASONS = {
    "Graph": "its nodes and edges differ in number from step to step",
    "Sequence": "its length differs from step to step",
    "OneOf": "its leaves differ from step to step",
}
_WRITABLE = {"Text", "Box", "Discrete", "MultiBinary", "MultiDiscrete"}


class SpaceLeaf:
    """A space without other spaces in it."""

    def __init__(self, space: Any) -> None:
        """Read the dtype, the shape and the numbers of values."""
        self.space = space
        dtype = np.dtype(object if space.dtype is None or space.shape is None else space.dtype)
        self.dtype = np.dtype(object) if dtype.kind in "SU" else dtype  # dtype of a sample; `object` for texts
        # shape of a sample; () if the space has none, such as Text
        self.shape = () if self.dtype.kind == "O" else tuple(space.shape)
        kinds = _kinds_of(space)
        # number of values of each component of a Discrete or MultiDiscrete space, or None
        self.sizes = (
            np.array([space.n]) if "Discrete" in kinds else np.ravel(space.nvec) if "MultiDiscrete" in kinds else None
        )
        self.starts = np.ravel(getattr(space, "start", 0))  # the smallest value of each component

    def one_hot(self, leaf: Array) -> Array:
        """Return the one-hot vectors of samples [m, *shape], or the samples if their space is not discrete.

        Vectors are float32 [m, n], or [m, sum(nvec)] with the components' vectors joined. Unlike RLlib, subtract the
        `start` of a discrete space.
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

    def cast(self, fill: Any, *, one_hot: bool) -> Array:
        """Return a fill value in the dtype of this space; float32 for one-hot vectors.

        The cast is RLlib's: 0.5 becomes 0 in a Discrete space; for one-hot vectors, 0 is a vector of zeros.
        """
        dtype, shape = self.dtype, self.shape
        if one_hot and self.sizes is not None:
            dtype, shape = np.dtype(np.float32), (int(self.sizes.sum()),)
        value = _fill_value(fill, dtype, shape)
        if dtype.kind in "iu" and not _in_range(value, dtype):
            raise SpecError(f"`fill` must be a number that {dtype} can hold, as its space says, got {fill!r}.")
        return value.astype(dtype)


class SpaceLeaves:
    """The leaves of a space, their names, and `struct`: their spaces in the structure of a sample."""

    def __init__(self, space: Any) -> None:
        """Find the leaves of a space."""
        self.struct = _struct_of(space)
        self.paths, leaves = named_leaves(self.struct, "space")
        self.leaves = [SpaceLeaf(leaf) for leaf in leaves]


def filled(
    leaves: Sequence[Array], fill: Any, where: slice | Array, num: int, spaces: SpaceLeaves | None, one_hot: bool
) -> list[Array]:
    """Return leaves [num, ...] with the rows of `leaves` at `where`, and the fill value elsewhere.

    The fill value is a row, or a number for all leaves. It takes the dtype of its space, if that is given.
    """
    values = tree.flatten(fill) if len(leaves) > 1 and tree.is_nested(fill) else [fill] * len(leaves)
    if len(values) != len(leaves):
        raise SpecError(f"`fill` must be a number, or a row of {len(leaves)} leaves, got {fill!r}.")
    found = []
    for number, (leaf, given) in enumerate(zip(leaves, values, strict=True)):
        own, shape = leaf.dtype, leaf.shape[1:]
        if spaces is None:
            value = _fill_value(given, own, shape)
            dtype = own if _holds(own, value) else np.result_type(value.dtype, own)
        else:
            value = spaces.leaves[number].cast(given, one_hot=one_hot)
            dtype = np.result_type(value.dtype, own)
        rows = np.empty((num, *shape), dtype)
        rows[...] = value
        if len(leaf):
            rows[where] = leaf
        found.append(rows)
    return found


def _fill_value(fill: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if dtype.kind == "O":
        return np.array(fill, object)
    value = np.array(fill)
    if value.dtype.kind not in "biuf" or value.shape not in ((), shape):
        raise SpecError(f"`fill` must be a number, or a row like the others, {dtype} {shape}, got {fill!r}.")
    return value


def _holds(dtype: np.dtype[Any], value: Array) -> bool:
    if dtype.kind in "iu":
        return bool(np.all(value == np.trunc(value))) and _in_range(value, dtype)
    return dtype.kind in "fO"


def _in_range(value: Array, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(np.all((value >= limits.min) & (value <= limits.max)))


def _struct_of(space: Any) -> Any:
    """Return the spaces within Dict and Tuple spaces, as a nest."""
    parts = _parts_of(space)
    if isinstance(parts, dict):
        return {key: _struct_of(part) for key, part in parts.items()}
    return space if parts is None else tuple(map(_struct_of, parts))


def _parts_of(space: Any) -> dict[Any, Any] | tuple[Any, ...] | None:
    """Return the spaces directly within a Dict or Tuple space; None for another value."""
    kinds = _kinds_of(space)  # a OneOf also has `spaces`, but a sample is of one space
    return dict(space.spaces) if "Dict" in kinds else tuple(space.spaces) if "Tuple" in kinds else None


def _kinds_of(space: Any) -> set[str]:
    """Return the class names of a space and of its bases."""
    return {kind.__name__ for kind in type(space).__mro__}


def check(space: Any, item: Any, what: str) -> None:
    """Check that a space contains an item, which `what` names."""
    if space is not None and not space.contains(item):
        raise StructureError(f"{what} {item!r} is not in its space {space}.")


def encoder(env: Any, name: str, num_envs: int | None = None) -> Callable[[Any], Any]:
    """Return a function that copies elements of a space of an environment, such as `observation_space`, into leaves.

    The results share no memory with the environment, which may reuse its arrays.
    """
    space = getattr(env, name, None)
    if "Space" not in _kinds_of(space):
        has = "none" if space is None else f"a {type(space).__name__}"
        raise SpecError(f"`env` must have `{name}`, a gymnasium.Space; {type(env).__name__} has {has}. Set it.")
    return _encoder(space, name.removeprefix("single_").removesuffix("_space"), num_envs)


def _encoder(space: Any, name: str, num_envs: int | None) -> Callable[[Any], Any]:
    parts = _parts_of(space)
    if isinstance(parts, dict):
        of_keys = {key: _encoder(part, f"{name}/{key}", num_envs) for key, part in parts.items()}
        return partial(_encode_dict, of_keys, name)
    if parts is not None:
        of_items = tuple(_encoder(part, f"{name}/{index}", num_envs) for index, part in enumerate(parts))
        return partial(_encode_tuple, of_items, name)
    if not _kinds_of(space) & _WRITABLE:
        kind = type(space).__name__
        reason = _REASONS.get(kind, "the structure of its elements is not known")
        raise SpecError(
            f"`{name}`: a space of type {kind} cannot be written: {reason}, and a column of a table has one shape. "
            "Turn it into arrays of one shape with a wrapper: pad them, and store their true sizes beside them."
        )
    leaf = SpaceLeaf(space)
    if leaf.dtype == object:
        return str if num_envs is None else lambda strings: np.array(strings, object)
    return array_encoder(leaf.dtype, leaf.shape if num_envs is None else (num_envs, *leaf.shape), name)


def _encode_dict(encoders: dict[Any, Callable[[Any], Any]], name: str, element: Any) -> dict[Any, Any]:
    if not isinstance(element, Mapping):
        raise StructureError(f"`{name}`: {type(element).__name__}, expected a dict, as its space says.")
    if element.keys() != encoders.keys():
        check_same_leaves(f"`{name}`", sorted(map(str, element)), sorted(map(str, encoders)), "its space")
    return {key: encode(element[key]) for key, encode in encoders.items()}


def _encode_tuple(encoders: Sequence[Callable[[Any], Any]], name: str, element: Any) -> tuple[Any, ...]:
    if not isinstance(element, tuple | list) or len(element) != len(encoders):
        size = f" of {len(element)} parts" if isinstance(element, tuple | list) else ""
        raise StructureError(
            f"`{name}`: {type(element).__name__}{size}, expected a tuple of {len(encoders)} parts, as its space says."
        )
    return tuple(encode(part) for encode, part in zip(encoders, element, strict=True))


def array_encoder(
    dtype: np.dtype[Any], shape: tuple[int, ...], name: str, like: str = "as its space says"
) -> Callable[[Any], Any]:
    """Return a function that copies numbers, or tensors on any device, into an array of this dtype and shape.

    `like` is the reason for the form in errors. The function raises StructureError if a value would change by more than
    float rounding.
    """
    scalar, (numbers, low, high) = dtype.type, python_numbers(dtype)
    where, advice = f"`{name}`", f"It must be {dtype} {shape}, {like}."

    def convert(element: Any) -> Any:
        array = host_array(element)
        if array.shape != shape and array.size == math.prod(shape) and max(array.ndim, len(shape)) == 1:
            array = array.reshape(shape)  # a number as [1], or [1] as a number
        given = element if array.dtype == object else array  # the error has its type
        found = fit(given, dtype, shape, where, like, Fit.LOSSLESS, advice)
        return found.copy() if found is array else found

    def encode(element: Any) -> Any:
        if type(element) is np.ndarray and element.shape == shape:
            if element.dtype == dtype:
                return element.copy()
            found = cast(element, dtype, where, Fit.LOSSLESS, advice)
            if found is not None:
                return found
        return convert(element)

    def encode_scalar(element: Any) -> Any:
        kind = type(element)
        if kind is scalar:
            return element
        return scalar(element) if kind in numbers and low <= element <= high else convert(element)

    return encode if shape else encode_scalar
