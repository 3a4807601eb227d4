"""The configuration of a shard's server, as TOML. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reverb_writer.errors import SpecError
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables import Prioritized, Queue, SampleToInsertRatio, Selector, Stack, TableConfig


def values_toml(section: str, values: Mapping[str, Any]) -> str:
    """Return a section; a value that is None is left out.

    >>> print(values_toml("http", {"port": 8080, "host": "localhost", "address_file": None}), end="")
    [http]
    port = 8080
    host = "localhost"
    """
    lines = [f"{key} = {_dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join([f"[{section}]", *lines, ""])


def table_toml(table: TableConfig) -> str:
    """Return the section of a table, and those of its signature.

    Raises:
        SpecError: the signature cannot be written in the server's configuration.

    >>> print(table_toml(TableConfig("replay", 100, Prioritized(0.5))))
    [tables."replay"]
    max_size = 100
    sampler = "prioritized"
    sampler_exponent = 0.5
    remover = "fifo"
    rate_limiter = "min_size"
    min_size = 1
    max_times_sampled = 0
    <BLANKLINE>
    """
    limiter = table.rate_limiter
    values: dict[str, Any] = {"max_size": table.max_size}
    if isinstance(limiter, Queue):
        values["rate_limiter"] = "stack" if isinstance(limiter, Stack) else "queue"
        if limiter.size != table.max_size:
            raise SpecError(
                f"table `{table.name}`: `max_size` must be as many items as {limiter} has, got {table.max_size}. Use "
                f"TableConfig.{values['rate_limiter']}."
            )
    else:
        values |= _selector("sampler", table.sampler) | _selector("remover", table.remover)
        is_ratio = isinstance(limiter, SampleToInsertRatio)
        values |= {"rate_limiter": "ratio" if is_ratio else "min_size", "min_size": limiter.balance.min_size}
        if isinstance(limiter, SampleToInsertRatio):
            values |= {"samples_per_insert": limiter.samples_per_insert, "error_buffer": limiter.error_buffer}
        values["max_times_sampled"] = table.max_times_sampled
    section = f"tables.{_dumps(table.name)}"
    if table.signature is None:
        return values_toml(section, values)
    lengths: set[int | None] = set()
    described = _describe(table.signature, table.name, lengths)
    (length,) = lengths or {None}
    values["sequence_length"] = length
    return f"{values_toml(section, values)}signature = {_inline(described)}\n"


def _selector(role: str, selector: Selector) -> dict[str, Any]:
    if isinstance(selector, Prioritized):
        return {role: "prioritized", f"{role}_exponent": selector.exponent}
    return {role: selector}


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


def _inline(nest: Any) -> str:
    """Return a nest of strings in TOML."""
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{_dumps(name)} = {_inline(inner)}" for name, inner in nest.items()) + "}"
    if isinstance(nest, list):
        return "[" + ", ".join(map(_inline, nest)) + "]"
    return _dumps(nest)


def _dumps(value: Any) -> str:
    """Return a value in TOML, which is JSON but for two things: it has no surrogate pairs, and escapes DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
