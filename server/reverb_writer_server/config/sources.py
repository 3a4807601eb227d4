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
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from reverb_writer.errors import SpecError

_PREFIX = "REVERB_WRITER__"


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
        self._kinds = kinds
        self._values: dict[tuple[str, ...], tuple[Any, str]] = {}
        self._sections: dict[tuple[str, ...], str] = {}  # a table of which all keys have defaults has no values

    def read_file(self, path: Path) -> None:
        """Set the values of a TOML file.

        Raises:
            ConfigError: the file cannot be read or is not TOML, a key is unknown, or a value is not allowed.
        """
        try:
            with path.open("rb") as file:
                document = tomllib.load(file)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error
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

    def set(self, key: tuple[str, ...], value: Any, origin: str) -> None:
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

    def declare(self, section: tuple[str, ...], origin: str) -> None:
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

    def _kind(self, key: tuple[str, ...], origin: str, value: Any, *, variable: str = "") -> Kind:
        """Return the kind of a key; `value` and the environment variable that sets it are for errors."""
        for pattern, kind in self._kinds.items():
            parts = pattern.split(".")
            if len(parts) == len(key) and _is_prefix(parts, key):
                return kind
        if self._matches(key, whole=False):
            inner = [parts[len(key) :] for parts in (one.split(".") for one in self._kinds) if _is_prefix(parts, key)]
            keys = ", ".join(
                "a section for each" if one == "*" else one for one in dict.fromkeys(one[0] for one in inner)
            )
            dotted = ".".join(key)
            rest = "__".join("NAME" if part == "*" else part.upper() for part in inner[0])
            hint = f" Set one of its keys, such as {variable}__{rest}." if variable else ""
            raise ConfigError(
                f"{origin}: `{dotted}`: got {_describe_value(value)}, allowed: a section [{dotted}] with {keys}.{hint}"
            )
        raise self._unknown_key(key, origin)

    def _unknown_key(self, key: Iterable[str], origin: str) -> ConfigError:
        *section, name = key
        patterns = [pattern.split(".") for pattern in self._kinds]
        siblings = [
            parts[len(section)] for parts in patterns if len(parts) > len(section) and _is_prefix(parts, tuple(section))
        ]
        siblings = list(dict.fromkeys(siblings))
        close = difflib.get_close_matches(name, siblings, 1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        where = f" in [{'.'.join(section)}]" if section else ""
        allowed = ", ".join(siblings) or "nothing"
        return ConfigError(f"{origin}: unknown key `{'.'.join([*section, name])}`.{hint} Allowed{where}: {allowed}.")

    def _flatten(self, key: tuple[str, ...], value: Any, origin: str) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Yield the values of a document by key, and remember its sections; `set` refuses unknown keys."""
        if isinstance(value, dict) and not self._matches(key, whole=True):
            if key and not self._matches(key, whole=False):
                raise self._unknown_key(key, origin)
            self.declare(key, origin)
            for name, inner in value.items():
                yield from self._flatten((*key, name), inner, origin)
        else:
            yield key, value

    def _matches(self, key: tuple[str, ...], *, whole: bool) -> bool:
        """Return whether `key` is a known key, or if not `whole` the beginning of one."""
        patterns = (pattern.split(".") for pattern in self._kinds)
        return any(_is_prefix(parts, key) and (len(parts) == len(key) or not whole) for parts in patterns)

    def _key_of(self, parts: list[str], origin: str) -> tuple[str, ...]:
        """Return the key that the parts of a variable's name denote."""
        found: list[str] = []
        for index, part in enumerate(parts):
            patterns = (pattern.split(".") for pattern in self._kinds)
            candidates = dict.fromkeys(
                one[index] for one in patterns if len(one) >= len(parts) and _is_prefix(one, tuple(found))
            )
            known = self.names(*found) if "*" in candidates else [name for name in candidates if name != "*"]
            match = next((name for name in known if _variable(name) == part.upper()), None)
            if match is None and "*" not in candidates:
                raise self._unknown_key((*found, *(rest.lower() for rest in parts[index:])), origin)
            found.append(match or part.lower())
        return tuple(found)


def _is_prefix(parts: Sequence[str], key: tuple[str, ...]) -> bool:
    """Return whether a pattern begins with a key."""
    return len(key) <= len(parts) and all(part in ("*", name) for part, name in zip(parts, key, strict=False))


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def _describe_value(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "table"}
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{shown} ({kinds.get(type(value), type(value).__name__)})"
