"""A key of the configuration: a field of a dataclass. Its annotation says what is allowed, the rest what it is for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tomllib


@dataclass(frozen=True)
class Kind:
    """The allowed values of a key.

    Attributes:
        allowed: a description for errors and the manual.
        types: Python types of the values.
        minimum: lower bound of numbers.
        maximum: upper bound of numbers.
        options: the allowed strings; empty for any.
        read: makes the setting of an allowed value.
    """

    allowed: str
    types: tuple[type, ...] = (str,)
    minimum: float = -math.inf
    maximum: float = math.inf
    options: tuple[str, ...] = ()
    read: Callable[[Any], Any] = lambda value: value

    def fits(self, value: Any) -> bool:
        """Return whether the value is allowed."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if isinstance(value, int | float) and not self.minimum <= value <= self.maximum:
            return False
        return not (isinstance(value, str) and self.options and value not in self.options)

    def parse(self, raw: str) -> Any:
        """Return the value of an environment variable: as in TOML, or the string if it is nothing else."""
        try:
            return raw if self.types == (str,) else tomllib.loads(f"value = {raw}")["value"]
        except tomllib.TOMLDecodeError:
            return raw


class Key(NamedTuple):
    """A key: its kind, its default (None if `meaning` has it), a line for manual and help, the option that sets it."""

    kind: Kind
    default: Any
    meaning: str
    option: str


def count(minimum: int, maximum: int) -> Kind:
    """Return the kind of integers from `minimum` to `maximum`."""
    return Kind(f"an integer from {minimum} to {maximum}", (int,), minimum, maximum)


def quantity(unit: str) -> Kind:
    """Return the kind of finite numbers >= 0."""
    return Kind(f"a number >= 0, {unit}", (int, float), 0, 1e15, read=float)


PATH = Kind("a path", read=lambda text: Path(text) if text else None)


def key(default: Any, meaning: str, option: str = "") -> Any:
    """Return the field of a key."""
    return field(default=default, metadata={"meaning": meaning, "option": option})


def keys_of(settings: Any) -> dict[str, Any]:
    """Return the keys of a dataclass by name; those of a section, which is a dataclass in it, are a dict."""
    hints = get_type_hints(settings, include_extras=True)
    found: dict[str, Any] = {}
    for one in fields(settings):
        hint = hints[one.name]
        if is_dataclass(one.default):
            found[one.name] = keys_of(hint)
        elif "each" in one.metadata:  # a section for any name
            found[one.name] = {"*": keys_of(one.metadata["each"])}
        else:
            kind = _choice(*get_args(hint)) if get_origin(hint) is Literal else hint.__metadata__[0]
            found[one.name] = Key(kind, one.default, **one.metadata)
    return found


def by_dotted_name(keys: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield all keys of a section and of the sections in it, each with its name."""
    for name, inner in keys.items():
        if isinstance(inner, Key):
            yield f"{prefix}{name}", inner
        else:
            yield from by_dotted_name(inner, f"{prefix}{name}.")


def _choice(*options: str) -> Kind:
    return Kind(" or ".join(f'"{option}"' for option in options), options=options)
