"""Print records as small tables, and return their numbers as a flat dict for any logger of metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


class Record:
    """The base class of dataclasses that print as a small table."""

    def __str__(self) -> str:
        """Return numbers and names as a table, without zeros and empty values.

        >>> @dataclasses.dataclass
        ... class Counts(Record):
        ...     table: str
        ...     steps: int
        ...     resent_items: int
        ...     blocked_s: float
        >>> print(Counts("replay", 1200, 0, 0.25))
        Counts, without zeros
          table      replay
          steps      1,200
          blocked_s  0.25
        """
        values = {name: value for name, value in _values(self) if hasattr(value, "dtype") or value}
        width = max(map(len, values), default=0)
        lines = [f"  {name:{width}}  {_text(value)}" for name, value in values.items()]
        return "\n".join([f"{type(self).__name__}, without zeros", *lines])


class Scalars(Record):
    """The base class of dataclasses of counters."""

    def as_scalars(self, prefix: str = "") -> dict[str, float]:
        """Return all numbers of the record by name; names of nested records and mappings have a `/`.

        Args:
            prefix: beginning of each name, such as "replay/".

        >>> @dataclasses.dataclass
        ... class Counts(Scalars):
        ...     steps: int
        ...     dropped_steps: dict[str, int]
        >>> Counts(7, {"overflow": 2}).as_scalars("replay/")
        {'replay/steps': 7.0, 'replay/dropped_steps/overflow': 2.0}
        """
        return {prefix + name: float(value) for name, value in _values(self) if isinstance(value, int | float)}


def _text(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{round(float(value), 3):,.15g}"
    return value if isinstance(value, str) else f"{value.dtype} {list(value.shape)}"


def _values(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a dataclass or a mapping: numbers, strings and arrays."""
    if isinstance(record, Mapping):
        pairs = [(str(key), value) for key, value in record.items()]
    else:
        pairs = [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    for name, value in pairs:
        if isinstance(value, int | float | str) or hasattr(value, "dtype"):
            yield name, value
        elif isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            yield from ((f"{name}/{inner}", found) for inner, found in _values(value))
