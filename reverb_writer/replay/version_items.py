"""One version of `Variables` as the columns of an item, and back.

column 0      strings: the nest's structure, the version's number, `last` if it is the last version of a run, and the
              largest priorities of tables as JSON. Earlier versions of this package wrote two or three strings
column 1 ...  the leaves of the nest, each as one row
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.leaves import Array, host_array
from reverb_writer.nests import at_leaf, named_leaves
from reverb_writer.protocol.signatures import ArraySpec, decode_spec, encode_spec

_LAST = b"last"
_FEWEST_STRINGS, _NUM_STRINGS = 2, 4
_LATER_STRINGS = [b"", b"{}"]  # in place of strings that an earlier version of this package did not write
_MAX_BYTES = 1_000_000_000  # of a nest


class Version(NamedTuple):
    """One version, as readers get it."""

    number: int
    nest: Any  # None if it is the last version of a run in which nothing was published
    is_last: bool
    priorities: Mapping[str, float]  # the largest priority that the publisher knows, by table


class EncodedNest(NamedTuple):
    """A nest before its publication: its structure, and its leaves as arrays."""

    structure: bytes
    leaves: list[Array]


def encode_nest(nest: Any) -> EncodedNest:
    """Encode a nest, which Reverb must be able to store; raise StructureError, which names the leaf, if it cannot."""
    modules = [type(leaf).__name__ for leaf in tree.flatten(nest) if hasattr(leaf, "state_dict")]
    if modules:
        raise StructureError(f"a nest with a {modules[0]}, expected arrays. Publish its `state_dict()` instead.")
    leaves = _arrays(nest)
    num_bytes = sum(sum(map(len, leaf.flat)) if leaf.dtype == object else leaf.nbytes for leaf in leaves)
    if num_bytes > _MAX_BYTES:
        raise StructureError(f"a nest of {num_bytes} bytes, expected at most {_MAX_BYTES}. Publish it in parts.")
    structure = encode_spec(tree.unflatten_as(nest, [ArraySpec(leaf.shape, leaf.dtype) for leaf in leaves]))
    return EncodedNest(structure, leaves)


def columns_of(encoded: EncodedNest, number: int, priorities: Mapping[str, float], *, is_last: bool) -> list[Array]:
    """Return the columns of a version."""
    about = [encoded.structure, str(number).encode(), _LAST if is_last else b"", json.dumps(priorities).encode()]
    return [np.array(about, object), *(leaf[None] for leaf in encoded.leaves)]


def read_version(columns: Sequence[Array], table: str) -> Version:
    """Return the version in the columns of an item; raise FormatError if `columns_of` has not made them."""
    foreign = FormatError(f"table `{table}`: an item that `publish` has not written. Give it a table of its own.")
    about, *leaves = columns
    given: list[Any] = about.tolist()
    if about.ndim != 1 or not _FEWEST_STRINGS <= len(given) <= _NUM_STRINGS:
        raise foreign
    encoded, number, mark, priorities = given + _LATER_STRINGS[len(given) - _FEWEST_STRINGS :]
    if not all(isinstance(one, bytes) for one in (encoded, number, mark, priorities)) or not number.isdigit():
        raise foreign
    spec = decode_spec(encoded)
    if len(tree.flatten(spec)) != len(leaves):
        raise FormatError(f"table `{table}`: {len(leaves)} arrays, expected {len(tree.flatten(spec))}.")
    is_last = mark == _LAST
    nest = None if is_last and not leaves else tree.unflatten_as(spec, [leaf[0] for leaf in leaves])
    return Version(int(number), nest, is_last, _read_priorities(priorities, foreign))


def _read_priorities(text: bytes, foreign: FormatError) -> dict[str, float]:
    try:
        found = json.loads(text)
        return {table: float(priority) for table, priority in found.items() if 0 <= float(priority) < float("inf")}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise foreign from error


def _arrays(nest: Any) -> list[Array]:
    """Return the leaves of a nest as arrays; raise StructureError with the path of another leaf."""
    arrays = []
    for path, leaf in zip(*named_leaves(nest, "a version"), strict=True):
        array = host_array(leaf)
        if array.dtype == object and not all(isinstance(one, str | bytes) for one in array.flat):
            raise StructureError(
                f"{at_leaf('a version', path)}: {type(leaf).__name__}, expected an array, a number or a string. Leave "
                "it out, or publish the `bytes` of a file, such as `torch.save` writes."
            )
        arrays.append(array)
    return arrays
