"""Keyword arguments that several functions share: they are described once, and `help` of each function shows them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_INDENT = 4


def takes(source: Callable[..., Any], text: str | None = None) -> Callable[[_F], _F]:
    """Return a decorator of a function that passes its `**keywords` on to `source`.

    The function gets the keywords of `source` in its signature, and their descriptions in its docstring, below the
    entry of the `**keywords`. Entries of the docstring stay.

    Args:
        source: a dataclass or another class; later calls of the function make it.
        text: docstring with a section `Attributes:` or `Args:` that describes the keywords; None for the docstrings of
            `source` and its bases.

    >>> class Options:
    ...     '''Options.
    ...
    ...     Attributes:
    ...         size: number of rows,
    ...             >= 1.
    ...     '''
    ...     def __init__(self, size=8): ...
    >>> @takes(Options)
    ... def make(name, **options):
    ...     '''Make it.
    ...
    ...     Args:
    ...         name: its name.
    ...         **options: the fields of `Options`.
    ...     '''
    >>> help(make)
    Help on function make in module reverb_writer.keywords:
    <BLANKLINE>
    make(name, *, size=8)
        Make it.
    <BLANKLINE>
        Args:
            name: its name.
            **options: the fields of `Options`.
            size: number of rows,
                >= 1.
    <BLANKLINE>
    """
    texts = [text] if text is not None else [vars(one).get("__doc__") for one in reversed(inspect.getmro(source))]  # type: ignore[arg-type]  # a class

    def describe(function: _F) -> _F:
        signature = inspect.signature(function)
        (keywords,) = (one for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD)
        own = {name: one for name, one in signature.parameters.items() if one is not keywords}
        shared = [one for name, one in inspect.signature(source).parameters.items() if name not in own]
        both = [*own.values(), *(one.replace(kind=one.KEYWORD_ONLY) for one in shared)]
        function.__signature__ = signature.replace(parameters=both)  # type: ignore[attr-defined]  # `inspect` reads it
        if function.__doc__ is None:  # Python runs without docstrings
            return function
        lines = inspect.cleandoc(function.__doc__).splitlines()
        described = {name: entry for each in texts for name, entry in _entries(each or "").items()}
        at = next(number for number, line in enumerate(lines) if line.startswith(f"    **{keywords.name}:")) + 1
        while at < len(lines) and lines[at].startswith("     "):
            at += 1
        known = _entries(function.__doc__)
        lines[at:at] = [line for one in both if one.name not in known for line in described.get(one.name, ())]
        function.__doc__ = "\n".join(lines) + "\n"
        return function

    return describe


def _entries(text: str) -> dict[str, list[str]]:
    """Return the lines of each entry of the sections `Args:` and `Attributes:`, by name."""
    found: dict[str, list[str]] = {}
    entry: list[str] | None = None
    is_inside = False
    for line in inspect.cleandoc(text).splitlines():
        indent = len(line) - len(line.lstrip())
        if line and not indent:
            is_inside = line in ("Args:", "Attributes:")
            entry = None
        elif is_inside and indent == _INDENT:
            entry = found[line.partition(":")[0].strip()] = [line]
        elif entry is not None and indent > _INDENT:
            entry.append(line)
    return found
