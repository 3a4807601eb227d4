"""Records of numbers as one flat dict, which TensorBoard, Weights & Biases, Trackio and MLflow take as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


class Scalars:
    """The base class of dataclasses of counters."""

    def as_scalars(self, prefix: str = "") -> dict[str, float]:
        """Return all numbers of the record by name; those of nested records and mappings with `/` in their names.

        Args:
            prefix: begins each name, such as "replay/".

        >>> @dataclasses.dataclass
        ... class Counts(Scalars):
        ...     steps: int
        ...     dropped_steps: dict[str, int]
        >>> Counts(7, {"overflow": 2}).as_scalars("replay/")
        {'replay/steps': 7.0, 'replay/dropped_steps/overflow': 2.0}
        """
        return {prefix + name: number for name, number in _numbers(self)}

    def __str__(self) -> str:
        """Return the numbers as a table, without those that are 0.

        >>> @dataclasses.dataclass
        ... class Counts(Scalars):
        ...     steps: int
        ...     resent_items: int
        ...     blocked_s: float
        >>> print(Counts(1200, 0, 0.25))
        Counts, without zeros
          steps      1,200
          blocked_s  0.25
        """
        numbers = {name: number for name, number in _numbers(self) if number}
        width = max(map(len, numbers), default=0)
        lines = [f"  {name:{width}}  {round(number, 3):,.15g}" for name, number in numbers.items()]
        return "\n".join([f"{type(self).__name__}, without zeros", *lines])


def _numbers(record: Any) -> Iterator[tuple[str, float]]:
    """Yield names and numbers of a dataclass or a mapping."""
    if isinstance(record, Mapping):
        pairs = [(str(key), value) for key, value in record.items()]
    else:
        pairs = [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    for name, value in pairs:
        if isinstance(value, int | float):
            yield name, float(value)
        elif isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            yield from ((f"{name}/{inner}", number) for inner, number in _numbers(value))
