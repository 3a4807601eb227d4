"""Gymnasium's spaces as leaves of a step.

    space                                   leaf, or nest
    --------------------------------------  ------------------------------------------------------
    Box, Discrete, MultiBinary,             array of the space's dtype and shape
    MultiDiscrete
    Text                                    string
    Dict, Tuple                             dict, tuple of what is in them
    Graph, Sequence, OneOf, any other       refused: from step to step it has other leaves or shapes

What a vector environment gives is the same, with N in front of each shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tree
from gymnasium import Space, spaces

from reverb_writer.errors import SpecError
from reverb_writer.leaves import Fit, fit, zeros
from reverb_writer.protocol.signatures import ArraySpec

__all__ = ["encoder", "space_spec", "zero_element"]

_REASONS = {
    "Graph": "its nodes and edges differ in number from step to step",
    "Sequence": "its length differs from step to step",
    "OneOf": "its leaves differ from step to step",
}


def space_of(env: Any, name: str) -> Space[Any]:
    """Return a space of an environment.

    Raises:
        SpecError: it has none of that name.
    """
    space = getattr(env, name, None)
    if not isinstance(space, Space):
        has = "none" if space is None else f"a {type(space).__name__}"
        raise SpecError(f"`env` must have `{name}`, a gymnasium.Space; {type(env).__name__} has {has}. Set it.")
    return space


def space_spec(space: Space[Any], name: str) -> Any:
    """Return what elements of a space look like in a step, as a nest of `ArraySpec`.

    Args:
        space: of one environment.
        name: what it is of, for messages, such as `observation`.

    Raises:
        SpecError: it cannot be written; names the part of the space that is to blame, and why.
    """
    if isinstance(space, spaces.Dict):
        return {key: space_spec(part, f"{name}/{key}") for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(space_spec(part, f"{name}/{index}") for index, part in enumerate(space.spaces))
    if isinstance(space, spaces.Text):
        return ArraySpec((), np.dtype(object), name)
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        return ArraySpec(space.shape, np.dtype(space.dtype), name)
    kind = type(space).__name__
    reason = _REASONS.get(kind, "what its elements are made of is not known")
    raise SpecError(
        f"`{name}`: a space of kind {kind} cannot be written: {reason}, and a column of a table has one shape. Turn it "
        "into arrays of one shape with a wrapper, padded if need be, and their true sizes beside them."
    )


def zero_element(spec: Any, num_envs: int | None = None) -> Any:
    """Return zeros and empty strings of a spec, [num_envs, ...] if there is such a number."""
    batch = () if num_envs is None else (num_envs,)
    return tree.map_structure(lambda leaf: zeros(leaf.dtype, (*batch, *leaf.shape)), spec)


def encoder(spec: Any, num_envs: int | None = None) -> Callable[[Any], Any]:
    """Return a function that copies elements of a space into leaves of a step.

    What it returns shares no memory with the environment, which may use its arrays again.

    Args:
        spec: what `space_spec` returned.
        num_envs: N if the elements are those of N environments, as a vector environment gives them.
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
    native = scalar if dtype == np.int64 else None  # what holds any int that an environment takes

    def convert(element: Any) -> Any:
        array = np.asarray(element)
        if array.shape != shape and array.size == math.prod(shape) and max(array.ndim, len(shape)) == 1:
            array = array.reshape(shape)  # a number as [1], or the other way round
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
