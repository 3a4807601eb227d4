"""Gymnasium's spaces as leaves of a step: dtypes and shapes, and what copies their elements.

    space                                   leaf, or nest
    --------------------------------------  ------------------------------------------------------
    Box, Discrete, MultiBinary,             array of the space's dtype and shape
    MultiDiscrete
    Text                                    string
    Dict, Tuple                             dict, tuple of the leaves of their parts
    Graph, Sequence, OneOf, any other       refused: leaves or shapes differ from step to step

Leaves of a vector environment of N environments are [N, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from reverb_writer.episodes.spaces import SpaceLeaf, kinds_of, parts_of
from reverb_writer.errors import SpecError
from reverb_writer.leaves import Fit, fit

_REASONS = {
    "Graph": "its nodes and edges differ in number from step to step",
    "Sequence": "its length differs from step to step",
    "OneOf": "its leaves differ from step to step",
}
_WRITABLE = {"Text", "Box", "Discrete", "MultiBinary", "MultiDiscrete"}


def encoder(env: Any, name: str, num_envs: int | None = None) -> Callable[[Any], Any]:
    """Return a function that copies elements of a space of an environment, such as `observation_space`, into leaves.

    The results share no memory with the environment, which may reuse its arrays.
    """
    space = getattr(env, name, None)
    if "Space" not in kinds_of(space):
        has = "none" if space is None else f"a {type(space).__name__}"
        raise SpecError(f"`env` must have `{name}`, a gymnasium.Space; {type(env).__name__} has {has}. Set it.")
    return _encoder(space, name.removeprefix("single_").removesuffix("_space"), num_envs)


def _encoder(space: Any, name: str, num_envs: int | None) -> Callable[[Any], Any]:
    parts = parts_of(space)
    if isinstance(parts, dict):
        of_keys = {key: _encoder(part, f"{name}/{key}", num_envs) for key, part in parts.items()}
        return lambda element: {key: encode(element[key]) for key, encode in of_keys.items()}
    if parts is not None:
        of_items = tuple(_encoder(part, f"{name}/{index}", num_envs) for index, part in enumerate(parts))
        return lambda element: tuple(encode(part) for encode, part in zip(of_items, element, strict=True))
    if not kinds_of(space) & _WRITABLE:
        kind = type(space).__name__
        reason = _REASONS.get(kind, "the structure of its elements is not known")
        raise SpecError(
            f"`{name}`: a space of type {kind} cannot be written: {reason}, and a column of a table has one shape. "
            "Turn it into arrays of one shape with a wrapper: pad them, and store their true sizes beside them."
        )
    leaf = SpaceLeaf(space)
    if leaf.dtype == object:
        return str if num_envs is None else lambda strings: np.array(strings, object)
    return _array_encoder(leaf.dtype, leaf.shape if num_envs is None else (num_envs, *leaf.shape), name)


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
