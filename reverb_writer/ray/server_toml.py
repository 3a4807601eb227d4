"""The configuration of a shard's server, as TOML. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from reverb_writer.tables import TableConfig
from reverb_writer.tables.table_dicts import table_to_dict


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

    >>> from reverb_writer.tables import Prioritized
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
    values = table_to_dict(table)
    section = f"tables.{_dumps(table.name)}"
    described = values.pop("signature", None)
    leaves = "" if described is None else f"signature = {_inline(described)}\n"
    return values_toml(section, values) + leaves


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
