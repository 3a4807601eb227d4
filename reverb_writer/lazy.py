"""Packages whose public names load when they are first touched (PEP 562). Imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, module_of: Mapping[str, str], packages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, the `__dir__` and the `__all__` of a package.

    Args:
        package: its name.
        module_of: the module of each public name, relative to the package.
        packages: packages in it that are touched as names, without an import of their own.
    """
    public = sorted({*module_of, *packages})

    def load(name: str) -> Any:
        """Load a public name at its first touch."""
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """List the public names, loaded or not, and what every module has."""
        return sorted({*public, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, names, public
