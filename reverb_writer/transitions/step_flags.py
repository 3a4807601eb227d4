"""Functions of flags that `slices` still has; rows have kinds (`reverb_writer.rows`), so this module goes with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tree

from reverb_writer.arrays import Array
from reverb_writer.nests import fields_of
from reverb_writer.rows import follow_ends
from reverb_writer.steps import FIRST, LAST

__all__ = ["follow_ends", "split_mask", "with_types"]


def with_types(flags: Mapping[str, Array]) -> dict[str, Array]:
    """Return flags by kind; if the steps lack `first` or `last`, take them from `step_type`."""
    others = {kind: flag for kind, flag in flags.items() if kind != "step_type"}
    types = flags.get("step_type")
    return others if types is None else {"first": types == FIRST, "last": types == LAST, **others}


def split_mask(data: Any) -> tuple[Any, Any]:
    """Return steps and their mask, or None. An observer with `mask=True` writes a pair (steps, mask).

    >>> import numpy as np
    >>> split_mask(({"reward": [1.0, 0.0]}, np.array([True, False])))
    ({'reward': [1.0, 0.0]}, array([ True, False]))
    >>> pairs = [({"a": 1}, {"b": True}), ({"a": 1}, np.zeros(1)), (np.ones(1), np.array([True]))]
    >>> [split_mask(pair)[1] for pair in pairs]  # pairs of other things
    [None, None, None]
    """
    if type(data) is tuple and len(data) == 2:  # noqa: PLR2004  # a pair
        steps, mask = data
        if (
            fields_of(steps) is not None
            and not tree.is_nested(mask)
            and str(getattr(mask, "dtype", "bool")).endswith("bool")
        ):
            return steps, mask
    return data, None
