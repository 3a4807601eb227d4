"""A table as a dict of plain values, as in the server's configuration in TOML or JSON.

max_size, max_times_sampled
sampler, remover              a name; sampler_exponent and remover_exponent if prioritized
rate_limiter                  "min_size" with min_size; "ratio" with min_size, samples_per_insert and error_buffer;
                              "queue" or "stack", which also set the selectors and max_times_sampled
signature                     dicts and lists of descriptions of one step: "uint8[84, 84, 4]", "float32[?, 3]"
sequence_length               number of steps of an item, the first axis of each leaf of the signature
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.protocol.tensors import dtype_number
from reverb_writer.tables import (
    MinSize,
    Prioritized,
    Queue,
    RateLimiter,
    SampleToInsertRatio,
    Selector,
    Stack,
    TableConfig,
)

_LEAF = re.compile(r"(?P<dtype>\w+)\s*(?:\[(?P<shape>[\d?,\s]*)\])?")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SET_BY_QUEUE = ("sampler", "remover", "max_times_sampled", "min_size", "samples_per_insert", "error_buffer")


class TableKeyError(SpecError):
    """A key of a table is missing, or has no effect beside the other keys."""

    def __init__(self, key: str, fault: str) -> None:
        """Take the key, and the text about its value and the allowed values."""
        super().__init__(f"`{key}`: {fault}")
        self.key, self.fault = key, fault


def table_from_dict(name: str, values: Mapping[str, Any]) -> TableConfig:
    """Return the table with these values, which have the right types; missing keys have their defaults.

    >>> table_from_dict("replay", {"max_size": 100, "sampler": "prioritized", "sampler_exponent": 0.5}).sampler
    Prioritized(exponent=0.5)

    Raises:
        SpecError: a value is not allowed, or the table would always block. A TableKeyError names the key.
    """
    kind = values.get("rate_limiter", "min_size")
    max_size = values.get("max_size", TableConfig.max_size)
    signature = None
    if "signature" in values:
        signature = read_signature(values["signature"], values.get("sequence_length"))
    if kind in ("queue", "stack"):
        for key in _SET_BY_QUEUE:
            _refuse_unused(values, key, f"a {kind} sets it itself")
        return getattr(TableConfig, kind)(name, max_size, signature)  # type: ignore[no-any-return]
    return TableConfig(
        name,
        max_size,
        _selector_from(values, "sampler", TableConfig.sampler),
        _selector_from(values, "remover", TableConfig.remover),
        _rate_limiter_from(values, kind),
        values.get("max_times_sampled", 0),
        signature,
    )


def table_to_dict(table: TableConfig) -> dict[str, Any]:
    """Return the values of a table; `table_from_dict` makes the same table from these.

    >>> table_to_dict(TableConfig.queue("queue", 10))
    {'max_size': 10, 'rate_limiter': 'queue'}

    Raises:
        SpecError: a dict cannot express the signature, or the size of a queue.
    """
    limiter = table.rate_limiter
    values: dict[str, Any] = {"max_size": table.max_size}
    if isinstance(limiter, Queue):
        values["rate_limiter"] = "stack" if isinstance(limiter, Stack) else "queue"
        if limiter.size != table.max_size:
            raise SpecError(
                f"table `{table.name}`: `max_size` must be the size of {limiter}, got {table.max_size}. Use "
                f"TableConfig.{values['rate_limiter']}."
            )
    else:
        for role, selector in (("sampler", table.sampler), ("remover", table.remover)):
            if isinstance(selector, Prioritized):
                values |= {role: "prioritized", f"{role}_exponent": selector.exponent}
            else:
                values[role] = selector
        values |= {"rate_limiter": "min_size", "min_size": limiter.min_size}
        if isinstance(limiter, SampleToInsertRatio):
            values |= {"rate_limiter": "ratio", "samples_per_insert": limiter.samples_per_insert}
            values["error_buffer"] = limiter.error_buffer
        values["max_times_sampled"] = table.max_times_sampled
    if table.signature is not None:
        lengths: set[int | None] = set()
        described = _describe(table.signature, table.name, lengths)
        (length,) = lengths or {None}
        values |= {"signature": described} if length is None else {"sequence_length": length, "signature": described}
    return values


def tables_to_toml(tables: Iterable[TableConfig]) -> str:
    """Return tables as text in TOML, for the configuration of a server.

    >>> print(tables_to_toml([TableConfig.queue("queue", 10)]), end="")
    [tables.queue]
    max_size = 10
    rate_limiter = "queue"

    Raises:
        SpecError: as `table_to_dict`.
    """
    sections = []
    for table in tables:
        lines = [f"{key} = {_toml(value)}" for key, value in table_to_dict(table).items()]
        sections.append("\n".join([f"[tables.{_toml_key(table.name)}]", *lines, ""]))
    return "\n".join(sections)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def read_signature(nest: Any, sequence_length: int | None, path: str = "signature") -> Any:
    """Return the nest of `ArraySpec` that a nest of descriptions describes.

    `sequence_length` is the number of steps of an item; None if it is unknown, or differs between items. SpecError
    names the path of a wrong leaf, which begins with `path`.

    >>> read_signature({"rgb": "uint8[84, 84]", "reward": "float32"}, 20)
    {'rgb': ArraySpec(shape=(20, 84, 84), dtype=dtype('uint8'), name='rgb'), \
'reward': ArraySpec(shape=(20,), dtype=dtype('float32'), name='reward')}
    """
    if isinstance(nest, dict):
        return {name: read_signature(inner, sequence_length, f"{path}.{name}") for name, inner in nest.items()}
    if isinstance(nest, list):
        return [read_signature(inner, sequence_length, f"{path}.{index}") for index, inner in enumerate(nest)]
    match = _LEAF.fullmatch(nest.strip()) if isinstance(nest, str) else None
    dtype = _dtype(match["dtype"]) if match else None
    if match is None or dtype is None:
        raise SpecError(
            f'`{path}`: got {nest!r}, allowed: a dtype and a shape, such as "uint8[84, 84, 4]" or "float32".'
        )
    sizes = [size.strip() for size in (match["shape"] or "").split(",") if size.strip()]
    shape = tuple(None if size == "?" else int(size) for size in sizes)
    return ArraySpec((sequence_length, *shape), dtype, path.rpartition(".")[2])


def _selector_from(values: Mapping[str, Any], role: str, default: Selector) -> Selector:
    chosen: Selector = values.get(role, default)
    if chosen == "prioritized":
        return Prioritized(values.get(f"{role}_exponent", 1.0))
    _refuse_unused(values, f"{role}_exponent", f'it belongs to {role} = "prioritized"')
    return chosen


def _rate_limiter_from(values: Mapping[str, Any], kind: str) -> RateLimiter:
    allowed_of = {
        "samples_per_insert": "a number >= 0, samples",
        "error_buffer": "a number, or an array [min_diff, max_diff]",
    }
    min_size = values.get("min_size", 1)
    if kind == "min_size":
        for key in allowed_of:
            _refuse_unused(values, key, 'set rate_limiter = "ratio" to keep a ratio')
        return MinSize(min_size)
    for key, allowed in allowed_of.items():
        if key not in values:
            raise TableKeyError(key, f'got nothing, allowed: {allowed}; rate_limiter = "ratio" needs it.')
    return SampleToInsertRatio(values["samples_per_insert"], min_size, values["error_buffer"])


def _refuse_unused(values: Mapping[str, Any], key: str, reason: str) -> None:
    if key in values:
        raise TableKeyError(key, f"got {values[key]}, allowed: nothing here; {reason}.")


def _describe(nest: Any, table: str, lengths: set[int | None]) -> Any:
    """Return the nest with a description in place of each leaf, and add the lengths of leaves to `lengths`."""
    if isinstance(nest, dict):
        return {str(name): _describe(inner, table, lengths) for name, inner in nest.items()}
    if isinstance(nest, list | tuple) and not hasattr(nest, "_fields"):
        return [_describe(inner, table, lengths) for inner in nest]
    if not isinstance(nest, ArraySpec) or not nest.shape:
        raise SpecError(
            f"table `{table}`: the signature of a cluster's table must be dicts and lists of ArraySpec with a time "
            f"dimension, got {nest!r}."
        )
    length, *shape = nest.shape
    lengths.add(length)
    if len(lengths) > 1:
        raise SpecError(
            f"table `{table}`: all leaves of a signature must have the same number of steps in a cluster, got "
            f"{' and '.join(map(str, sorted(lengths, key=str)))}."
        )
    name = "string" if nest.dtype.hasobject else str(nest.dtype)
    sizes = ", ".join("?" if size is None else str(size) for size in shape)
    return f"{name}[{sizes}]" if sizes else name


def _dtype(name: str) -> np.dtype[Any] | None:
    try:
        dtype = np.dtype("object" if name == "string" else name)
        dtype_number(dtype)
    except (TypeError, StructureError):
        return None
    return dtype if dtype.kind in "biufcO" else None
