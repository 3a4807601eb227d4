"""Keys of the configuration, and their values from a TOML file, the environment and the command line.

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

import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tomllib

from reverb_writer.errors import SpecError

_PREFIX = "REVERB_WRITER__"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "table"}
_Path: TypeAlias = tuple[str, ...]  # such as ("tables", "replay", "max_size")
_Made = TypeVar("_Made")


class ConfigError(SpecError):
    """An invalid configuration; the message names the file or variable, the key, the value and what is allowed."""


@dataclass(frozen=True)
class Key:
    """A key: what it means, and its allowed values."""

    default: Any  # None if there is none, or if `meaning` has it
    allowed: str  # a description of the allowed values
    meaning: str  # a line for the manual and for help
    option: str = ""  # of `serve`, which sets it
    types: tuple[type, ...] = (str,)  # of allowed values
    minimum: float = -math.inf
    maximum: float = math.inf
    options: tuple[str, ...] = ()  # the allowed strings; empty for any
    read: Callable[[Any], Any] = lambda value: value  # makes the setting of an allowed value

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
    return key(default, f"a number >= 0, {unit}", meaning, types=(int, float), minimum=0, maximum=1e15, read=float)


def choice(options: str, meaning: str, option: str = "", default: str | None = None) -> Any:
    """Return the field of one of several words; the first is the default unless another is."""
    words = tuple(options.split())
    return key(default or words[0], " or ".join(f'"{word}"' for word in words), meaning, option, options=words)


def path(meaning: str, option: str = "") -> Any:
    """Return the field of a path, which need not be set."""
    return key(None, "a path", meaning, option, read=lambda text: Path(text) if text else None)


def keys_of(settings: Any, prefix: str = "") -> dict[str, Key]:
    """Return the keys of a dataclass and of the sections in it, by dotted name; `*` stands for any name of a table."""
    found: dict[str, Key] = {}
    for one in fields(settings):
        if "key" in one.metadata:
            found[f"{prefix}{one.name}"] = one.metadata["key"]
        elif is_dataclass(one.default):
            found |= keys_of(one.default, f"{prefix}{one.name}.")
        else:
            found |= keys_of(one.metadata["each"], f"{prefix}{one.name}.*.")
    return found


class Settings:
    """The values that were set, by key, with their origins.

    Args:
        keys: all keys, as `keys_of` returns them.
    """

    def __init__(self, keys: Mapping[str, Key]) -> None:
        """Begin without values."""
        self._keys = keys
        self._found: dict[_Path, tuple[Any, str]] = {}  # a section has None

    def read_file(self, file: Path) -> None:
        """Set the values of a file: TOML, or the same as JSON, which programs write."""
        form = "TOML"
        try:
            text = file.read_bytes().decode()
            form = "JSON" if text.lstrip().startswith("{") else "TOML"
            document = json.loads(text) if form == "JSON" else tomllib.loads(text)
        except OSError as error:
            raise unreadable(file, error) from error
        except ValueError as error:
            raise ConfigError(f"{file}: is not valid {form}: {error}.") from error
        self.set((), document, str(file))

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Set the values of the variables that start with REVERB_WRITER__."""
        for variable, raw in sorted(environment.items()):
            if not variable.startswith(_PREFIX):
                continue
            at, hint, value = self._path_of(variable.removeprefix(_PREFIX)), "", raw
            found = self._keys.get(_pattern(at))
            if found is None and (within := self._within(at)):
                hint = f" Set one of its keys, such as {variable}__{within[0].replace('*', 'NAME').upper()}."
            elif found is not None and found.types != (str,):
                with contextlib.suppress(tomllib.TOMLDecodeError):
                    value = tomllib.loads(f"value = {raw}")["value"]
            self.set(at, value, f"environment variable {variable}", hint)

    def set(self, at: _Path, value: Any, origin: str, hint: str = "") -> None:
        """Set one value in place of an earlier one, or all values of a section."""
        found, within, dotted = self._keys.get(_pattern(at)), self._within(at), ".".join(at)
        if found is not None and not found.fits(value):
            raise ConfigError(f"{origin}: `{dotted}`: got {_describe(value)}, allowed: {found.allowed}.{hint}")
        if found is None and not within:
            raise self._unknown_key(at, origin)
        if found is None and not isinstance(value, dict):
            names = ", ".join(dict.fromkeys(one.split("__")[0] for one in within)).replace("*", "a section for each")
            raise ConfigError(
                f"{origin}: `{dotted}`: got {_describe(value)}, allowed: a section [{dotted}] with {names}.{hint}"
            )
        for depth in range(len(at) + 1):
            self._found.setdefault(at[:depth], (None, origin))
        if found is not None:
            self._found[at] = (found.read(value), origin)
            return
        for name, inner in value.items():
            self.set((*at, name), inner, origin)

    def values(self, *section: str) -> dict[str, Any]:
        """Return what was set directly in a section, by name; sections in it are None."""
        return {at[-1]: value for at, (value, _) in self._found.items() if at and at[:-1] == section}

    def make(self, settings: type[_Made], *section: str) -> _Made:
        """Return an object of a dataclass with the values that were set in a section, and its defaults."""
        values = {name: value for name, value in self.values(*section).items() if value is not None}
        for one in fields(settings):  # type: ignore[arg-type]  # a dataclass
            if is_dataclass(one.default):
                values[one.name] = self.make(type(one.default), *section, one.name)
        return settings(**values)

    def origin(self, *at: str) -> str:
        """Return the origin of a value, or of the first value in a section."""
        within = [origin for one, (value, origin) in self._found.items() if one[: len(at)] == at and value is not None]
        return within[0] if within else self._found.get(at, (None, "default"))[1]

    def _within(self, at: _Path) -> list[str]:
        """Return the keys of a section and of the sections in it, their names joined as those of variables."""
        prefix = f"{_pattern(at)}." if at else ""
        return [name.removeprefix(prefix).replace(".", "__") for name in self._keys if name.startswith(prefix)]

    def _unknown_key(self, at: _Path, origin: str) -> ConfigError:
        while not self._within(at[:-1]):
            at = at[:-1]
        names = list(dict.fromkeys(one.split("__")[0] for one in self._within(at[:-1])))
        close = difflib.get_close_matches(at[-1], names, 1)
        hint = f" Did you mean `{close[0]}`?" if close else ""
        where = f" in [{'.'.join(at[:-1])}]" if at[1:] else ""
        return ConfigError(f"{origin}: unknown key `{'.'.join(at)}`.{hint} Allowed{where}: {', '.join(names)}.")

    def _path_of(self, variable: str) -> _Path:
        """Return the path that the rest of a variable's name denotes; it need not exist."""
        at: _Path = ()
        for part in variable.split("__"):
            of_tables = self.values(*at) if at == ("tables",) else ()
            name = next((one for one in of_tables if re.sub(r"[^A-Z0-9]", "_", one.upper()) == part.upper()), "")
            at = (*at, name or part.lower())
        return at


def unreadable(file: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be read."""
    return ConfigError(f"{file}: cannot be read ({error.strerror}). Check the path and its permissions.")


def _pattern(at: _Path) -> str:
    return ".".join("*" if at[:depth] == ("tables",) else name for depth, name in enumerate(at))


def _describe(value: Any) -> str:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{shown} ({_TYPES.get(type(value), type(value).__name__)})"
