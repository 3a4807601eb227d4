"""Names that load when they are used: public names of packages (PEP 562) and optional packages. Imports nothing heavy.

The public names of a package stand in its stub, `__init__.pyi`: type checkers read them there, and so does the package.
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

# Two threads that first use names at once would each hold the import lock of a module that the other one needs:
# Python then hands out modules that are half loaded.
_loading = threading.RLock()


def module_of_names(stub: Path) -> dict[str, str]:
    """Return the full name of the module that each public name of a stub is imported from, by `as Name`."""
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
        """Load a public name when it is first used."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = module_of[name]
        with _loading:
            value = vars(importlib.import_module(module)).get(name)
            if value is None:  # a module, which is a name by itself
                value = importlib.import_module(f"{module}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        """List the public names, loaded or not, and what every module has."""
        return sorted({*module_of, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, names, sorted(module_of)


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Turn a failed import in the block into an error: `what` needs it, `install` is the argument of `pip install`."""
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs `{error.name}`, which is not installed: pip install '{install}'", name=error.name
        ) from error
