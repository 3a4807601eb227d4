"""What the docstrings of a public name say of its arguments and errors, and what its code takes and raises."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import reverb_writer as rw

SECTION = re.compile(r"^(?:Args|Attributes):\n((?: .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    (?=\S)((?:\*{0,2}\w+(?:,\s+)?)+): ", re.MULTILINE)
BESIDE = re.compile(r"`(?:rw\.)?(\w+)`")
MEMBER = re.compile(r"`(\w+)\.(\w+)`")


def sections(text: str) -> dict[str, str]:
    """Return what a Google-style docstring says of each argument and attribute, by name."""
    found: dict[str, str] = {}
    for body in SECTION.findall(inspect.cleandoc(text) + "\n"):
        _, *pieces = ENTRY.split(body)
        for names, said in zip(pieces[::2], pieces[1::2], strict=True):
            found.update(dict.fromkeys(re.findall(r"\w+", names), " ".join(said.split())))
    return found


def docstrings(value: Any) -> Iterator[str]:
    """Yield the docstrings of a function, or of a class, its constructor and those of its bases, nearest first."""
    for one in inspect.getmro(value) if inspect.isclass(value) else (value,):
        if one.__module__.startswith("reverb_writer"):
            yield one.__doc__ or ""
            if inspect.isclass(one) and "__init__" in vars(one):
                yield one.__init__.__doc__ or ""


def described(value: Any) -> dict[str, str]:
    """Return what is said of each argument: here, or in what the docstring names instead of repeating it."""
    texts = list(docstrings(value))
    found: dict[str, str] = {}
    for owner, name in MEMBER.findall("\n".join(texts)):
        other = getattr(rw if owner == "rw" else getattr(rw.episodes, owner, None), name, None)
        text = (other.__doc__ or "") if inspect.isfunction(other) or inspect.ismodule(other) else ""
        found.update(sections(text) if inspect.isfunction(other) else dict.fromkeys(re.findall(r"\w+", text), text))
    for text in reversed(texts):
        prose = " ".join(inspect.cleandoc(text).split())
        found.update(dict.fromkeys(BESIDE.findall(prose), prose))
    for text in reversed(texts):
        found.update(sections(text))
    return found


def methods(value: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class that this project has written, inherited ones included, by name."""
    static = {name: inspect.getattr_static(value, name) for name in dir(value)}
    found = {name: getattr(one, "__func__", one) for name, one in static.items()}
    return {
        name: one
        for name, one in found.items()
        if (name == "__call__" or not name.startswith("_"))
        and inspect.isfunction(one)
        and one.__module__.startswith("reverb_writer")
    }


def parameters(value: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return what a caller passes by name or in order; values of an enumeration take nothing."""
    if inspect.isclass(value) and issubclass(value, Enum):
        return []
    various = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    found = inspect.signature(value).parameters.values()
    return [one for one in found if one.name not in ("self", "cls") and one.kind not in various]


def raised(functions: Iterable[Callable[..., Any]]) -> set[str]:
    """Return the names of the public errors that the functions' own bodies raise."""
    names = set()
    for function in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                names.add(node.exc.func.id)
    errors = {name: getattr(rw.errors, name, None) for name in names}
    return {name for name, error in errors.items() if inspect.isclass(error) and issubclass(error, Exception)}
