"""Nests of dicts, lists, tuples and named tuples: flatten and pack them, name and compare their leaves.

The order of leaves is dm-tree's, which Reverb's own client also uses: dicts of any type by sorted keys. `flattener` and
`packer` analyse a structure once; their functions are several times as fast as dm-tree; see docs/decisions.md#nests.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import StructureError

_MAX_PARTS = 8
"""Maximum number of parts of a list or tuple that `shapes_text` shows; of longer ones it shows the first part."""


def join_paths(paths: Sequence[str]) -> str:
    """List names of leaves for a message.

    >>> join_paths(["action", "observation/rgb"]), join_paths([""]), join_paths([])
    ('`action`, `observation/rgb`', 'an array without a nest', 'none')
    """
    return ", ".join(f"`{path}`" if path else "an array without a nest" for path in paths) or "none"


def named_leaves(nest: Any, where: str) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of a nest's leaves, such as `observation/rgb`, and the leaves. An array alone has the name "".

    If the keys of a dict cannot be sorted, or a part is a TensorDict, raise StructureError, whose message `where`
    begins.
    """
    try:
        with_paths = tree.flatten_with_path(nest)
    except (TypeError, RuntimeError) as error:
        if "sort" in str(error):
            raise StructureError(f"{where}: {error} Use keys of one type.") from error
        raise StructureError(  # dm-tree asks a TensorDict for its truth, or for a row by name
            f"{where}: a part is a dict that cannot be read as a nest, such as a TensorDict. Pass `.to_dict()` of it."
        ) from error
    return tuple("/".join(map(str, path)) for path, _ in with_paths), [leaf for _, leaf in with_paths]


def at_leaf(where: str, path: str) -> str:
    """Return the place of a leaf in a message: `where` alone for an array without a nest."""
    return f"{where}, leaf `{path}`" if path else where


def check_same_leaves(where: str, paths: Sequence[str], expected: Sequence[str], like: str) -> None:
    """Check that the leaves of the nest at `where` are the leaves of `like`, in the same order.

    >>> check_same_leaves("step 3", ("a", "b"), ("b", "c"), "the spec")
    Traceback (most recent call last):
    reverb_writer.errors.StructureError: step 3: its leaves are not those of the spec. Missing: `c`; unexpected: `a`.
    """
    if tuple(paths) == tuple(expected):
        return
    missing = join_paths([path for path in expected if path not in paths])
    unexpected = join_paths([path for path in paths if path not in expected])
    order = f" Their order is {join_paths(paths)}." if missing == unexpected == "none" else ""
    raise StructureError(
        f"{where}: its leaves are not those of {like}. Missing: {missing}; unexpected: {unexpected}.{order}"
    )


def fields_of(nest: Any) -> Mapping[Any, Any] | None:
    """Return the parts of a dict or a named tuple by name; None for other values."""
    return nest if isinstance(nest, Mapping) else nest._asdict() if hasattr(nest, "_asdict") else None


def leaf_at(nest: Any, path: str) -> Any:
    """Return the part of a nest with this name, such as `observation/rgb`."""
    found = nest
    for name in path.split("/"):
        fields = fields_of(found) or {}
        if name not in fields:
            raise StructureError(f"no leaf `{path}`: there are {join_paths(named_leaves(nest, 'the nest')[0])}.")
        found = fields[name]
    return found


def common_length(nest: Any, what: str) -> int:
    """Return T of a nest with leaves [T, ...], or raise StructureError."""
    shapes = [np.shape(leaf) for leaf in tree.flatten(nest)]
    lengths = {shape[:1] for shape in shapes}
    if len(lengths) != 1 or () in lengths:
        raise StructureError(f"{what}: leaves must be [T, ...] with one T for all, got shapes {shapes}.")
    return int(lengths.pop()[0])


def with_texts(nest: Any, what: str) -> Any:
    """Return a nest with leaves [T, ...] in which each list of strings is a leaf: an array [T].

    >>> with_texts({"text": ["go", "stop"], "pair": [np.zeros(2), np.zeros(2)]}, "steps")["text"]
    array(['go', 'stop'], dtype=object)
    """

    def text(part: Any) -> Any:
        is_text = isinstance(part, list) and part and all(isinstance(item, str | bytes) for item in part)
        return np.array(part, object) if is_text else None

    named_leaves(nest, what)  # refuses parts that cannot be traversed
    return tree.traverse(text, nest)


def shapes_text(nest: Any) -> str:
    """Return a nest, or a dataclass of nests, as text with `dtype [sizes]` per array, without fields of None.

    >>> shapes_text({"x": np.zeros((2, 3), np.float32), "y": [np.arange(4)], "name": np.array([b"a"], object)})
    "{'x': float32 [2, 3], 'y': [int64 [4]], 'name': strings [1]}"
    >>> shapes_text([np.arange(4)] * 100)
    '[int64 [4], ... 100 in all]'
    """
    if hasattr(nest, "dtype") and hasattr(nest, "shape"):
        dtype = str(nest.dtype).rpartition(".")[2]
        return f"{'strings' if dtype == 'object' else dtype} {list(nest.shape)}"
    if isinstance(nest, Mapping):
        return "{" + ", ".join(f"{key!r}: {shapes_text(value)}" for key, value in nest.items()) + "}"
    if dataclasses.is_dataclass(nest) or hasattr(nest, "_fields"):
        fields = vars(nest) if dataclasses.is_dataclass(nest) else nest._asdict()
        given = (f"{name}={shapes_text(value)}" for name, value in fields.items() if value is not None)
        return f"{type(nest).__name__}({', '.join(given)})"
    if isinstance(nest, list | tuple):
        parts = [shapes_text(value) for value in nest[:1]] if len(nest) > _MAX_PARTS else map(shapes_text, nest)
        text = ", ".join(parts) + (f", ... {len(nest)} in all" if len(nest) > _MAX_PARTS else "")
        return f"[{text}]" if isinstance(nest, list) else f"({text})"
    return repr(nest) if isinstance(nest, str | bytes | int | float | None) else type(nest).__name__


def structure_of(nest: Any) -> Any:
    """Return a nest of the same structure with None for leaves.

    Raises StructureError if a part is a sequence that cannot be a part of a nest, such as a range.
    """
    try:
        return tree.map_structure(lambda _: None, nest)
    except (TypeError, ValueError) as error:
        path, part = _foreign_part(nest, ())
        raise StructureError(
            f"leaf `{'/'.join(map(str, path))}`: {type(part).__name__} is neither an array, a number, a string nor a "
            "nest of dicts, lists and tuples. Turn it into an array."
        ) from error


def _foreign_part(nest: Any, path: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """Return the path of the first container that is no dict, list or tuple, and the container; else the nest."""
    if isinstance(nest, Mapping | list | tuple):
        for key, part in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
            if tree.is_nested(part):
                found = _foreign_part(part, (*path, key))
                if not isinstance(found[1], Mapping | list | tuple):
                    return found
    return path, nest


def flattener(example: Any) -> Callable[[Any], Sequence[Any]]:
    """Return a function that flattens nests of exactly this structure.

    For a nest of another structure, it raises TypeError or LookupError, or returns another number of leaves.
    """
    if not tree.is_nested(example):
        return lambda nest: (nest,)
    if not isinstance(example, Mapping | list | tuple):
        return tree.flatten  # type: ignore[no-any-return]  # attrs classes
    keys: Sequence[Any] = sorted(example) if isinstance(example, Mapping) else range(len(example))
    nests = {key: example[key] for key in keys if tree.is_nested(example[key])}
    leaves = [key for key in keys if key not in nests]
    if len(leaves) > 1 and not any(map(len, nests.values())):
        return _flatten_flat(type(example), leaves, nests)
    return _flatten_nested(type(example), [(key, flattener(example[key]) if key in nests else None) for key in keys])


def _flatten_flat(kind: type[Any], leaves: Sequence[Any], empty: Mapping[Any, Any]) -> Callable[[Any], Sequence[Any]]:
    """Flatten a container of leaves and empty containers, such as TF-Agents' empty `policy_info`."""
    get = operator.itemgetter(*leaves)
    size = len(leaves) + len(empty)

    def flatten(nest: Any) -> Sequence[Any]:
        if type(nest) is not kind or len(nest) != size:
            raise TypeError
        for key in empty:
            if len(nest[key]):
                raise TypeError
        found: tuple[Any, ...] = get(nest)
        return found

    return flatten


def _flatten_nested(
    kind: type[Any], parts: Sequence[tuple[Any, Callable[[Any], Sequence[Any]] | None]]
) -> Callable[[Any], list[Any]]:
    def flatten(nest: Any) -> list[Any]:
        if type(nest) is not kind or len(nest) != len(parts):
            raise TypeError
        leaves: list[Any] = []
        for key, part in parts:
            if part is None:
                leaves.append(nest[key])
            else:
                leaves += part(nest[key])
        return leaves

    return flatten


def packer(example: Any) -> Callable[[Sequence[Any]], Any]:
    """Return a function that puts leaves, in the order of `flattener`, into a nest of this structure.

    The number of leaves is not checked. Dicts keep the example's order of keys.

    >>> packer({"b": 0, "a": [0, (0,)]})([1, 2, 3])
    {'b': 3, 'a': [1, (2,)]}
    """
    return _packer(example, itertools.count())


def _packer(nest: Any, numbers: Iterator[int]) -> Callable[[Sequence[Any]], Any]:
    if not tree.is_nested(nest):
        return operator.itemgetter(next(numbers))
    if type(nest) is dict:
        packers = {key: _packer(nest[key], numbers) for key in sorted(nest)}
        ordered = [(key, packers[key]) for key in nest]
        return lambda leaves: {key: pack(leaves) for key, pack in ordered}
    if type(nest) not in (list, tuple) and not hasattr(nest, "_make"):
        structure = structure_of(nest)  # such as an OrderedDict or an attrs class
        places = [next(numbers) for _ in tree.flatten(nest)]
        return lambda leaves: tree.unflatten_as(structure, [leaves[place] for place in places])
    parts = [_packer(part, numbers) for part in nest]
    if type(nest) is list:
        return lambda leaves: [pack(leaves) for pack in parts]
    make = getattr(type(nest), "_make", tuple)
    return lambda leaves: make([pack(leaves) for pack in parts])


def rows(example: Any, columns: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Yield one nest of this structure per row; there is one column per leaf, in the order of `flattener`.

    A nest without leaves is yielded without end.

    >>> list(rows({"a": 0, "b": ()}, [[1, 2]]))
    [{'a': 1, 'b': ()}, {'a': 2, 'b': ()}]
    """
    columns = [*columns]
    return map(packer(example), zip(*columns, strict=False) if columns else itertools.repeat(()))


def write_row(column: Any, row: Any, nest: Any) -> None:
    """Copy a nest into one or some rows of leaves [T, ...] of the same structure, in place; None remains None."""
    for leaf, value in zip(tree.flatten(column), tree.flatten(nest), strict=True):
        if leaf is not None:
            leaf[row] = value


def map_present(function: Callable[..., Any], *nests: Any) -> Any:
    """Apply a function to the leaves of nests of one structure; return a nest of results; None remains None.

    >>> map_present(lambda x: -x, (1, None))
    (-1, None)
    """
    if len(nests) == 1:
        return _mapped(function, nests[0])
    return tree.map_structure(lambda *leaves: None if leaves[0] is None else function(*leaves), *nests)


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """Apply a function to the leaves of a nest, except None, in a fraction of the time of `tree.map_structure`."""
    kind = type(nest)
    if kind is dict:
        return {key: _mapped(function, part) for key, part in nest.items()}
    if kind is list or kind is tuple:
        return kind([_mapped(function, part) for part in nest])
    if isinstance(nest, tuple) and hasattr(kind, "_make"):
        return kind._make([_mapped(function, part) for part in nest])
    if tree.is_nested(nest):  # such as an OrderedDict or an attrs class
        return tree.map_structure(lambda leaf: None if leaf is None else function(leaf), nest)
    return None if nest is None else function(nest)
