"""Values by key from a TOML file, the environment and the command line, each with its origin.

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
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import tomllib

from reverb_writer.errors import SpecError
from reverb_writer_server.config.keys import Key

_PREFIX = "REVERB_WRITER__"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "float", list: "array", dict: "table"}
_Path: TypeAlias = tuple[str, ...]
_Made = TypeVar("_Made")
_Section: TypeAlias = Mapping[str, Any]  # keys and sections by name; `*` stands for any name, such as a table's


class ConfigError(SpecError):
    """An invalid configuration; the message names the file or variable, the key, the value and what is allowed."""


class Settings:
    """The values that were set, by key, with their origins.

    Args:
        keys: all keys.
    """

    def __init__(self, keys: _Section) -> None:
        """Begin without values."""
        self._keys = keys
        self._found: dict[_Path, tuple[Any, str]] = {}  # a section has None

    def read_file(self, path: Path) -> None:
        """Set the values of a file: TOML, or the same as JSON, which programs write.

        Raises:
            ConfigError: the file cannot be read, is neither, a key is unknown, or a value is not allowed.
        """
        form = "TOML"
        try:
            text = path.read_bytes().decode()
            form = "JSON" if text.lstrip().startswith("{") else "TOML"
            document = json.loads(text) if form == "JSON" else tomllib.loads(text)
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path}: is not valid {form}: {error}.") from error
        self.set((), document, str(path))

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Set the values of the variables that start with REVERB_WRITER__.

        Raises:
            ConfigError: a variable matches no key, or its value is not allowed.
        """
        for variable, raw in sorted(environment.items()):
            if variable.startswith(_PREFIX):
                origin, path = f"environment variable {variable}", self._path_of(variable.removeprefix(_PREFIX))
                key = self._at(path, origin)
                if not isinstance(key, Key):
                    hint = f" Set one of its keys, such as {variable}__{_first_below(key)}."
                    raise _section_error(path, key, raw, origin, hint)
                self.set(path, key.kind.parse(raw), origin)

    def set(self, path: _Path, value: Any, origin: str) -> None:
        """Set one value in place of an earlier one, or all values of a section.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        key = self._at(path, origin)
        for depth in range(len(path)):
            self._found.setdefault(path[:depth], (None, origin))
        if isinstance(key, Key):
            if not key.kind.fits(value):
                raise ConfigError(f"{origin}: `{'.'.join(path)}`: got {_describe(value)}, allowed: {key.kind.allowed}.")
            self._found[path] = (key.kind.read(value), origin)
        elif isinstance(value, dict):
            self._found.setdefault(path, (None, origin))
            for name, inner in value.items():
                self.set((*path, name), inner, origin)
        else:
            raise _section_error(path, key, value, origin)

    def values(self, *path: str) -> dict[str, Any]:
        """Return the values that were set directly under `path`, by name; sections are None."""
        below = (one for one in self._found if one and one[:-1] == path)
        return {one[-1]: self._found[one][0] for one in below}

    def make(self, settings: type[_Made], *path: str) -> _Made:
        """Return an object of a dataclass with the values that were set under `path`, and its defaults."""
        values = {name: value for name, value in self.values(*path).items() if value is not None}
        for one in fields(settings):  # type: ignore[arg-type]  # a dataclass
            if is_dataclass(one.default):
                values[one.name] = self.make(type(one.default), *path, one.name)
        return settings(**values)

    def origin(self, *path: str) -> str:
        """Return the origin of a value, or of the first value under `path`."""
        for one, (value, origin) in self._found.items():
            if one[: len(path)] == path and value is not None:
                return origin
        return self._found.get(path, (None, "default"))[1]

    def _at(self, path: _Path, origin: str) -> Any:
        """Return the key or the section there."""
        found: Any = self._keys
        for depth, name in enumerate(path):
            inner = found.get(name) or found.get("*") if isinstance(found, Mapping) else None
            if inner is None:
                raise _unknown_key(path[:depth], name, found, origin)
            found = inner
        return found

    def _path_of(self, variable: str) -> _Path:
        """Return the path that the rest of a variable's name denotes; it need not exist."""
        path: _Path = ()
        keys: Any = self._keys
        for part in variable.split("__"):
            known = list(keys) if isinstance(keys, Mapping) else []
            names = self.values(*path) if "*" in known else known
            name = next((one for one in names if re.sub(r"[^A-Z0-9]", "_", one.upper()) == part.upper()), part.lower())
            path = (*path, name)
            keys = keys.get("*" if "*" in known else name) if known else None
        return path


def _first_below(section: _Section) -> str:
    """Return the rest of the name of a variable that sets a key of a section."""
    name, inner = next(iter(section.items()))
    rest = "NAME" if name == "*" else name.upper()
    return rest if isinstance(inner, Key) else f"{rest}__{_first_below(inner)}"


def _section_error(path: _Path, section: _Section, value: Any, origin: str, hint: str = "") -> ConfigError:
    dotted, names = ".".join(path), ", ".join("a section for each" if one == "*" else one for one in section)
    return ConfigError(
        f"{origin}: `{dotted}`: got {_describe(value)}, allowed: a section [{dotted}] with {names}.{hint}"
    )


def _unknown_key(section: _Path, name: str, known: Any, origin: str) -> ConfigError:
    names = list(known) if isinstance(known, Mapping) else []
    close = difflib.get_close_matches(name, names, 1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    where = f" in [{'.'.join(section)}]" if section else ""
    allowed = ", ".join(names) or "nothing"
    return ConfigError(f"{origin}: unknown key `{'.'.join([*section, name])}`.{hint} Allowed{where}: {allowed}.")


def _describe(value: Any) -> str:
    shown = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{shown} ({_TYPES.get(type(value), type(value).__name__)})"
