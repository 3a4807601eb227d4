"""Every public name has an entry in a page of the reference, and an example that a test runs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from reverb_writer.lazy import module_of_names

ROOT = Path(__file__).parents[2]
PAGES = {path.stem: path.read_text("utf-8") for path in (ROOT / "docs/reference").glob("*.md")}
ENTRY = re.compile(r"^\.\. auto(?:class|function|data):: (\S+)$", re.MULTILINE)
BLOCK = re.compile(r"^```(?:python|pycon)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PACKAGES = (
    "reverb_writer",
    *(
        f"reverb_writer.{name}"
        for name in (
            "environments", "episodes", "instinct_rl", "local", "ray", "returns", "rollouts", "slices", "tables",
            "testing", "tf_agents", "windows",
        )
    ),
)  # fmt: skip


def public_names() -> Iterator[tuple[str, str]]:
    """Yield package and name; the server's from its stub, for it may not be installed."""
    for package in PACKAGES:
        yield from ((package, name) for name in importlib.import_module(package).__all__)
    stub = ROOT / "server/reverb_writer_server/__init__.pyi"
    yield from (("reverb_writer_server", name) for name in module_of_names(stub))


def object_of(package: str, name: str) -> object:
    """Return what a public name stands for, or its name where the package is not installed."""
    if package == "reverb_writer_server":
        return f"{package}.{name}"
    return getattr(importlib.import_module(package), name)


def pages_of(package: str, name: str) -> list[str]:
    """Return the pages with an entry of this very object, under this name or where it comes from."""
    wanted = object_of(package, name)
    found = []
    for page in PAGES.values():
        for entry in ENTRY.findall(page):
            of, _, called = entry.rpartition(".")
            if called == name and object_of(of, called) == wanted:
                found.append(page)
    return found


@pytest.mark.parametrize(("package", "name"), list(public_names()))
def test_every_public_name_has_an_entry_and_an_example(package: str, name: str) -> None:
    value = object_of(package, name)
    if isinstance(value, ModuleType):
        assert value.__doc__
        assert value.__name__ in PACKAGES
        return
    pages = pages_of(package, name)
    assert len(pages) == 1, f"{package}.{name} needs one entry in docs/reference/"
    in_docstring = ">>> " in (inspect.getdoc(value) or "")
    in_block = any(re.search(rf"\b{name}\b", block) for block in BLOCK.findall(pages[0]))
    assert in_docstring or in_block, f"{package}.{name} needs an example: a doctest, or a block of its page"


@pytest.mark.parametrize("entry", sorted({entry for page in PAGES.values() for entry in ENTRY.findall(page)}))
def test_every_entry_is_of_a_public_name(entry: str) -> None:
    package, _, name = entry.rpartition(".")
    assert (package, name) in set(public_names())
