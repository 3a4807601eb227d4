"""Keys of the configuration, and their values from a file, the environment and the command line.

The command line overrides the environment, which overrides the file, which overrides the default. The variable
REVERB_WRITER__TABLES__REPLAY__MAX_SIZE sets tables.replay.max_size, regardless of case; its `_` matches any character
that the name of a variable cannot contain. Its value is parsed as TOML; if that fails, it is a string. A variable that
matches no key is refused, so that a misspelt name is noticed.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import tomllib

from reverb_writer.errors import SpecError

_PREFIX = "REVERB_WRITER__"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "table"}
_Path: TypeAlias = tuple[str, ...]  # such as ("tables", "replay", "max_size")


class ConfigError(SpecError):
    """An invalid configuration; the message names the file or variable, the key, the value and the allowed values."""


@dataclass(frozen=True)
class Key:
    """A key: its meaning and its allowed values."""

    default: Any  # None without a default, or if `meaning` has it
    allowed: str  # a description of the allowed values
    meaning: str  # a line for the manual and for help
    option: str = ""  # the option of `serve` that sets it
    types: tuple[type, ...] = (str,)  # types of allowed values
    minimum: float = -math.inf
    maximum: float = math.inf
    options: tuple[str, ...] = ()  # the allowed strings; empty for any
    read: Callable[[Any], Any] = lambda value: value  # converts an allowed value

    def fits(self, value: Any) -> bool:
        """Return whether the value is allowed."""
        if not isinstance(value, self.types) or isinstance(value, bool):
            return False
        if isinstance(value, int | float):
            return self.minimum <= value <= self.maximum
        return not self.options or value in self.options


def key(default: Any, allowed: str, meaning: str, option: str = "", **limits: Any) -> Any:
    """Return the field of a key, for a dataclass; `limits` are the other attributes of `Key`."""
    return field(default=default, metadata={"key": Key(default, allowed, meaning, option, **limits)})


def whole(default: int | None, minimum: int, maximum: int, meaning: str, option: str = "") -> Any:
    """Return the field of an integer from `minimum` to `maximum`."""
    allowed = f"an integer from {minimum} to {maximum}"
    return key(default, allowed, meaning, option, types=(int,), minimum=minimum, maximum=maximum)


def quantity(default: float | None, unit: str, meaning: str) -> Any:
    """Return the field of a finite number >= 0."""
    return key(default, f"a number >= 0, {unit}", meaning, types=(int, float), minimum=0, maximum=1e15)


def choice(options: str, meaning: str, option: str = "", default: str | None = None) -> Any:
    """Return the field of a choice of words; the first word is the default unless `default` is given."""
    words = tuple(options.split())
    return key(default or words[0], " or ".join(f'"{word}"' for word in words), meaning, option, options=words)


def path(meaning: str, option: str = "") -> Any:
    """Return the field of an optional path."""
    return key(None, "a path", meaning, option, read=lambda text: Path(text) if text else None)


class Settings:
    """The values that were set, with their origins.

    Attributes:
        tables: origin of each table by name, even of a table without values.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        """Begin without values; `keys` are all keys by dotted name, with `*` for any name of a table."""
        self._keys = keys
        self._found: dict[_Path, tuple[Any, str]] = {}
        self.tables: dict[str, str] = {}

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Set the values of the variables that start with REVERB_WRITER__."""
        for variable, raw in sorted(environment.items()):
            if not variable.startswith(_PREFIX):
                continue
            at: _Path = ()
            for part in variable.removeprefix(_PREFIX).split("__"):
                names = self.tables if at == ("tables",) else ()
                same = (one for one in names if re.sub(r"[^A-Z0-9]", "_", one.upper()) == part.upper())
                at = (*at, next(same, part.lower()))
            found, value = self._keys.get(_pattern(at)), raw
            if found is not None and found.types != (str,):
                with contextlib.suppress(tomllib.TOMLDecodeError):
                    value = tomllib.loads(f"value = {raw}")["value"]
            self.set(at, value, f"environment variable {variable}")

    def set(self, at: _Path, value: Any, origin: str) -> None:
        """Set one value in place of an earlier one, or all values of a section."""
        found, dotted = self._keys.get(_pattern(at)), ".".join(at)
        if found is not None and not found.fits(value):
            raise ConfigError(f"{origin}: `{dotted}`: got {_describe(value)}, allowed: {found.allowed}.")
        names = self._names_in(at)
        if found is None and not names:
            raise self._unknown_key(at, origin)
        if found is None and not isinstance(value, dict):
            allowed = f"a section [{dotted}] with {', '.join(names).replace('*', 'a section for each')}"
            raise ConfigError(f"{origin}: `{dotted}`: got {_describe(value)}, allowed: {allowed}.")
        if at[:1] == ("tables",) and at[1:]:
            self.tables.setdefault(at[1], origin)
        if found is not None:
            self._found[at] = (found.read(value), origin)
            return
        for name, inner in value.items():
            self.set((*at, name), inner, origin)

    def values(self, *section: str) -> dict[str, Any]:
        """Return the values of a section and its subsections, by dotted name."""
        within = len(section)
        return {".".join(at[within:]): value for at, (value, _) in self._found.items() if at[:within] == section}

    def origin(self, *at: str) -> str:
        """Return the origin of a value, or of the first value in a section."""
        within = [origin for one, (_, origin) in self._found.items() if one[: len(at)] == at]
        return within[0] if within else self.tables.get(at[-1], "default")

    def _names_in(self, section: _Path) -> list[str]:
        """Return the allowed names in a section; none if the section does not exist."""
        prefix = f"{_pattern(section)}." if section else ""
        found = (name.removeprefix(prefix).split(".")[0] for name in self._keys if name.startswith(prefix))
        return list(dict.fromkeys(found))

    def _unknown_key(self, at: _Path, origin: str) -> ConfigError:
        while not self._names_in(at[:-1]):
            at = at[:-1]
        names = self._names_in(at[:-1])
        close = difflib.get_close_matches(at[-1], names, 1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        where = f" in [{'.'.join(at[:-1])}]" if at[1:] else ""
        return ConfigError(f"{origin}: unknown key `{'.'.join(at)}`.{hint} Allowed{where}: {', '.join(names)}.")


def _pattern(at: _Path) -> str:
    return ".".join("*" if at[:depth] == ("tables",) else name for depth, name in enumerate(at))


def _describe(value: Any) -> str:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{shown} ({_TYPES.get(type(value), type(value).__name__)})"
