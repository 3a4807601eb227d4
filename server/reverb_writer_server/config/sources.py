"""Settings from a TOML file, the environment and the command line, each with its origin.

The command line overrides the environment, which overrides the file, which overrides the default.

    key                              environment variable
    port                             REVERB_WRITER__PORT
    checkpoints.every_s              REVERB_WRITER__CHECKPOINTS__EVERY_S
    tables.replay.max_size           REVERB_WRITER__TABLES__REPLAY__MAX_SIZE

Names of variables match keys regardless of case, and `_` matches any character of a table's name that the name of a
variable cannot contain. A value is parsed as TOML; if that fails, it is a string. A variable that matches no key is
refused, so that a misspelt name is noticed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import tomllib

from reverb_writer.errors import SpecError

_PREFIX = "REVERB_WRITER__"
_Key: TypeAlias = tuple[str, ...]


class ConfigError(SpecError):
    """An invalid configuration; the message names the file or variable, the key, the value and what is allowed."""


@dataclass(frozen=True)
class Kind:
    """The allowed values of a key.

    Attributes:
        allowed: a description for errors and the manual.
        types: Python types of the values.
        minimum: lower bound of numbers.
        maximum: upper bound of numbers.
        options: the allowed strings; empty for any.
    """

    allowed: str
    types: tuple[type, ...] = (str,)
    minimum: float = -math.inf
    maximum: float = math.inf
    options: tuple[str, ...] = ()

    def fits(self, value: Any) -> bool:
        """Return whether the value is allowed."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if isinstance(value, int | float) and not self.minimum <= value <= self.maximum:
            return False
        return not (isinstance(value, str) and self.options and value not in self.options)


def count(minimum: int, maximum: int) -> Kind:
    """Return the kind of integers from `minimum` to `maximum`."""
    return Kind(f"an integer from {minimum} to {maximum}", (int,), minimum, maximum)


def quantity(unit: str, minimum: float = 0) -> Kind:
    """Return the kind of finite numbers >= `minimum`."""
    return Kind(f"a number >= {minimum:g}, {unit}", (int, float), minimum, 1e15)


def choice(*options: str) -> Kind:
    """Return the kind of strings that are one of `options`."""
    return Kind(" or ".join(f'"{option}"' for option in options), options=options)


def text(allowed: str) -> Kind:
    """Return the kind of any string, described by `allowed`."""
    return Kind(allowed)


boolean = Kind("true or false", (bool,))


class Settings:
    """The values that were set, by key, with their origins.

    Args:
        kinds: the allowed values by key. `*` in a key stands for any name, such as a table's.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        """Begin without values."""
        self._kinds = {tuple(name.split(".")): kind for name, kind in kinds.items()}
        self._groups = {pattern[:length] for pattern in self._kinds for length in range(len(pattern))}
        self._values: dict[_Key, tuple[Any, str]] = {}
        self._sections: dict[_Key, str] = {}  # a table of which all keys have defaults has no values

    def read_file(self, path: Path) -> None:
        """Set the values of a file: TOML, or the same as JSON, which programs write.

        Raises:
            ConfigError: the file cannot be read, is neither, a key is unknown, or a value is not allowed.
        """
        try:
            text = path.read_bytes().decode()
            document = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: is not valid JSON: {error}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: is not valid TOML: {error}.") from error
        for key, value in self._flatten((), document, str(path)):
            self.set(key, value, str(path))

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Set the values of the variables that start with REVERB_WRITER__.

        Raises:
            ConfigError: a variable matches no key, or its value is not allowed.
        """
        for variable, raw in sorted(environment.items()):
            if not variable.startswith(_PREFIX):
                continue
            origin = f"environment variable {variable}"
            key = self._key_of(variable.removeprefix(_PREFIX).split("__"), origin)
            value: Any = raw
            kind = self._kind(key, origin, raw, variable=variable)
            if kind.types != (str,):
                try:
                    value = tomllib.loads(f"value = {raw}")["value"]
                except tomllib.TOMLDecodeError:
                    value = raw
            for leaf, inner in self._flatten(key, value, origin) if isinstance(value, dict) else [(key, value)]:
                self.set(leaf, inner, origin)

    def set(self, key: _Key, value: Any, origin: str) -> None:
        """Set one value, in place of an earlier one.

        Raises:
            ConfigError: the key is unknown, or the value is not allowed.
        """
        kind = self._kind(key, origin, value)
        if isinstance(value, int) and not isinstance(value, bool) and int not in kind.types and float in kind.types:
            value = float(value)
        if not kind.fits(value):
            raise ConfigError(f"{origin}: `{'.'.join(key)}`: got {_describe_value(value)}, allowed: {kind.allowed}.")
        self._values[key] = (value, origin)

    def declare(self, section: _Key, origin: str) -> None:
        """Name a section, such as a table, of which no value need be set."""
        self._sections.setdefault(section, origin)

    def get(self, *key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is not set."""
        return self._values.get(key, (default, ""))[0]

    def origin(self, *key: str) -> str:
        """Return the origin of a value, or of the first value under `key`."""
        found = next((origin for known, (_, origin) in self._values.items() if known[: len(key)] == key), None)
        return found or self._sections.get(key, "default")

    def names(self, *key: str) -> list[str]:
        """Return the names directly under `key`, in the order in which they were first set."""
        known = [*self._sections, *self._values]
        return list(dict.fromkeys(one[len(key)] for one in known if len(one) > len(key) and one[: len(key)] == key))

    def _pattern(self, key: _Key) -> _Key:
        """Return a key with `*` in place of each name."""
        pattern: _Key = ()
        for part in key:
            any_name = (*pattern, "*")
            pattern = any_name if any_name in self._groups else (*pattern, part)
        return pattern

    def _below(self, pattern: _Key) -> list[_Key]:
        """Return what follows after a pattern, for each key that begins with it."""
        return [
            one[len(pattern) :] for one in self._kinds if len(one) > len(pattern) and one[: len(pattern)] == pattern
        ]

    def _kind(self, key: _Key, origin: str, value: Any, *, variable: str = "") -> Kind:
        """Return the kind of a key; `value` and the environment variable that sets it are for errors."""
        pattern = self._pattern(key)
        if pattern in self._kinds:
            return self._kinds[pattern]
        if pattern not in self._groups:
            raise self._unknown_key(key, origin)
        inner = self._below(pattern)
        keys = ", ".join("a section for each" if one == "*" else one for one in dict.fromkeys(one[0] for one in inner))
        dotted = ".".join(key)
        rest = "__".join("NAME" if part == "*" else part.upper() for part in inner[0])
        hint = f" Set one of its keys, such as {variable}__{rest}." if variable else ""
        raise ConfigError(
            f"{origin}: `{dotted}`: got {_describe_value(value)}, allowed: a section [{dotted}] with {keys}.{hint}"
        )

    def _unknown_key(self, key: _Key, origin: str) -> ConfigError:
        *section, name = key
        siblings = list(dict.fromkeys(one[0] for one in self._below(self._pattern(tuple(section)))))
        close = difflib.get_close_matches(name, siblings, 1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        where = f" in [{'.'.join(section)}]" if section else ""
        allowed = ", ".join(siblings) or "nothing"
        return ConfigError(f"{origin}: unknown key `{'.'.join([*section, name])}`.{hint} Allowed{where}: {allowed}.")

    def _flatten(self, key: _Key, value: Any, origin: str) -> Iterator[tuple[_Key, Any]]:
        """Yield the values of a document by key, and remember its sections; `set` refuses unknown keys."""
        pattern = self._pattern(key)
        if not isinstance(value, dict) or pattern in self._kinds:
            yield key, value
            return
        if pattern not in self._groups:
            raise self._unknown_key(key, origin)
        self.declare(key, origin)
        for name, inner in value.items():
            yield from self._flatten((*key, name), inner, origin)

    def _key_of(self, parts: list[str], origin: str) -> _Key:
        """Return the key that the parts of a variable's name denote."""
        found: _Key = ()
        for index, part in enumerate(parts):
            below = self._below(self._pattern(found))
            candidates = dict.fromkeys(one[0] for one in below if len(one) >= len(parts) - index)
            known = self.names(*found) if "*" in candidates else list(candidates)
            match = next((name for name in known if _variable(name) == part.upper()), None)
            if match is None and "*" not in candidates:
                raise self._unknown_key((*found, *(rest.lower() for rest in parts[index:])), origin)
            found = (*found, match or part.lower())
        return found


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _describe_value(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "table"}
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{shown} ({kinds.get(type(value), type(value).__name__)})"
