"""Checks of callers' arguments. Any integer or real type becomes a plain one; other values are errors."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from reverb_writer.errors import SpecError

_T = TypeVar("_T")
_MAX_PORT = 65535
_ADDRESS = re.compile(r"unix:\S+|(dns:|ipv4:|ipv6:)?[^\s/,]+:\d{1,5}|dns:[^\s,]+:\d{1,5}")


def options_of(kind: Callable[..., _T], options: Mapping[str, Any], caller: object) -> _T:
    """Return a record of a caller's keyword arguments.

    Raises:
        TypeError: an option is unknown; the error names the `caller`, as Python does, and a similar option.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # a dataclass
    for name in options.keys() - names:
        similar = "".join(f" Did you mean {near!r}?" for near in difflib.get_close_matches(name, names, 1))
        raise TypeError(f"{type(caller).__name__}() got an unexpected keyword argument {name!r}.{similar}")
    return kind(**options)


def table_names(table: object) -> tuple[str, ...]:
    """Return the names of a `table` argument, which is one name or several different ones.

    >>> table_names("replay"), table_names(["a", "b"])
    (('replay',), ('a', 'b'))
    """
    names = tuple(table) if isinstance(table, Iterable) and not isinstance(table, str) else (table,)
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise SpecError(f"`table` must be a name or several different ones, got {table!r}.")
    return names


def integer(name: str, value: object, *, minimum: int, maximum: int | None = None, hint: str = "") -> int:
    """Return `value`, which has `__index__` and is not a bool, as an int between `minimum` and `maximum`.

    The argument's `name` and the `hint`, a remedy, are for the message.

    >>> integer("stride_length", 0, minimum=1)
    Traceback (most recent call last):
    reverb_writer.errors.SpecError: `stride_length` must be >= 1, got 0.
    """
    hint = hint and f" {hint}"
    is_bool = type(value).__name__ in ("bool", "bool_")  # also NumPy's, which has an index before NumPy 2
    try:
        number = None if is_bool else operator.index(value)  # type: ignore[arg-type]  # other values raise TypeError
    except TypeError:
        number = None
    if number is None:
        raise SpecError(f"`{name}` must be an integer, got {value!r} ({type(value).__name__}).{hint}")
    if number < minimum:
        raise SpecError(f"`{name}` must be >= {minimum}, got {number}.{hint}")
    if maximum is not None and number > maximum:
        raise SpecError(f"`{name}` must be <= {maximum}, got {number}.{hint}")
    return number


def number(name: str, value: object) -> float:
    """Return `value`, which has `__float__` and is not a bool, string, NaN or infinity, as a float.

    >>> number("exponent", float("nan"))
    Traceback (most recent call last):
    reverb_writer.errors.SpecError: `exponent` must be a finite number, got nan.
    """
    number = math.nan if isinstance(value, bool) else _as_float(value)
    if not math.isfinite(number):
        raise SpecError(f"`{name}` must be a finite number, got {value!r}.")
    return number


def check_address(address: object) -> str:
    """Return the address of a server, or raise SpecError."""
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise SpecError(
            f"`address` must be `host:port`, `unix:path` or `dns:host:port`, or a list of these, got {address!r}."
        )
    if not address.startswith("unix:") and not 1 <= int(address.rpartition(":")[2]) <= _MAX_PORT:
        raise SpecError(f"`address` must be `host:port` with a port from 1 to {_MAX_PORT}, got {address!r}.")
    return address


def check_fraction(name: str, value: object) -> float:
    """Return `value` as a float in [0, 1].

    >>> check_fraction("gamma", 1.5)
    Traceback (most recent call last):
    reverb_writer.errors.SpecError: `gamma` must be in [0, 1], got 1.5.
    """
    checked = number(name, value)
    if not 0 <= checked <= 1:
        raise SpecError(f"`{name}` must be in [0, 1], got {checked:g}.")
    return checked


def check_timeout(timeout_s: float, name: str = "timeout_s") -> float:
    """Return a time-out as a float; infinity becomes the longest time that locks can wait, some 292 years."""
    seconds = _as_float(timeout_s)
    if not seconds > 0:
        raise SpecError(f"`{name}` must be > 0 seconds, got {timeout_s!r}. To wait for ever, pass float('inf').")
    return min(seconds, threading.TIMEOUT_MAX)


def check_wait(timeout_s: object, name: str = "timeout_s") -> float:
    """Return a time >= 0 in seconds; 0 means no wait."""
    seconds = number(name, timeout_s)
    if seconds < 0:
        raise SpecError(f"`{name}` must be >= 0 seconds, got {seconds:g}.")
    return seconds


def check_key(key: object) -> int:
    """Return the key of an item as an integer."""
    return integer("key", key, minimum=0, maximum=(1 << 64) - 1)


def check_priority(priority: Any, alternatives: str = "") -> float:
    """Return a priority as a float; `alternatives` is the part of the message after the number.

    >>> check_priority(-1)
    Traceback (most recent call last):
    reverb_writer.errors.SpecError: `priority` must be a finite number >= 0, got -1.
    """
    number = _as_float(priority)
    if not 0.0 <= number < math.inf:
        raise SpecError(f"`priority` must be a finite number >= 0{alternatives}, got {priority!r}.")
    return number


def _as_float(value: Any) -> float:
    """Return a number as a float; NaN for other values, such as text with digits."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
