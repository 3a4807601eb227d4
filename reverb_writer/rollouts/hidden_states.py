"""Hidden states of recurrent networks: nests of arrays [layers, B, H] in a step, [T, layers, B, H] in a storage.

A network without memory has None in its place if another network has hidden states; it stays None.
"""

from __future__ import annotations

from typing import Any

import tree

from reverb_writer.errors import StructureError
from reverb_writer.nests import map_present, write_row
from reverb_writer.rollouts.array_nests import Arrays

_MIN_AXES = 2  # [layers, B]


def read(arrays: Arrays, given: Any, num_envs: int, saved: Any) -> Any:
    """Return a step's states, leaves [layers, B, ...], as arrays; None, which means zeros, if all of them are None.

    `saved` are the states of earlier steps, leaves [T, layers, B, ...] or None.
    """
    if all(leaf is None for leaf in tree.flatten(given)):
        return None
    states = map_present(arrays.asarray, given)
    shapes = tree.map_structure(lambda leaf: str(None if leaf is None else tuple(leaf.shape)), states)
    present = (leaf for leaf in tree.flatten(states) if leaf is not None)
    if any(leaf.ndim < _MIN_AXES or leaf.shape[1] != num_envs for leaf in present):
        raise StructureError(f"`hidden_states` must be [layers, {num_envs}, ...], got {shapes}.")
    if saved is not None:
        expected = tree.map_structure(lambda leaf: str(None if leaf is None else tuple(leaf.shape[1:])), saved)
        if shapes != expected:
            raise StructureError(f"`hidden_states` are {shapes}, expected {expected}, as in earlier steps.")
    return states


def zeros(arrays: Arrays, states: Any, num_rows: int) -> Any:
    """Return zeros for the states of `num_rows` steps."""
    return map_present(lambda leaf: arrays.zeros_like(leaf, (num_rows, *leaf.shape)), states)


def write(saved: Any, row: int, states: Any) -> None:
    """Copy the states of a step into a row, in place; None means zeros."""
    if states is not None:
        write_row(saved, row, states)
        return
    for leaf in tree.flatten(saved):
        if leaf is not None:
            leaf[row] = 0
