"""Names that load at first use: public names of packages (PEP 562) and optional packages. Imports nothing heavy.

A package's stub, `__init__.pyi`, lists its public names for type checkers and for the package itself.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reverb_writer.errors import MissingExtraError

# Without this lock, two threads that first use names at the same time could each hold the import lock of a module that
# the other one needs, and Python would return half-loaded modules.
_loading = threading.RLock()


def module_of_names(stub: Path) -> dict[str, str]:
    """Return the module's full name for each public name in a stub: an import with `as Name`."""
    statements = ast.parse(stub.read_text(encoding="utf-8")).body
    return {
        alias.name: node.module
        for node in statements
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, the `__dir__` and the `__all__` of a package with a stub."""
    module_of = module_of_names(Path(file).with_suffix(".pyi"))

    def load(name: str) -> Any:
        """Load a public name at first use."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        with _loading:
            value = vars(importlib.import_module(module)).get(name)
            if value is None:  # the name is a module
                value = importlib.import_module(f"{module}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """List the public names, loaded or not, and the names of every module."""
        return sorted({*module_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, names, sorted(module_of)


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Raise MissingExtraError if an import in the block fails: `what` needs it, `pip install INSTALL` installs it."""
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        lack = "which is not installed" if is_missing else f"but the installed version does not fit ({error})"
        text = f"{what} needs `{error.name}`, {lack}: pip install '{install}'"
        raise MissingExtraError(text, name=error.name) from error
