"""What the images install: all that the projects need, each with its hash."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OURS = {"reverb-writer", "reverb-writer-server"}
INSTEAD = {"tensorflow": "tensorflow-cpu"}  # the same release, without what a GPU needs


def pinned(name: str) -> dict[str, str]:
    """Return the version of each package of a file, which must have a hash."""
    text = (ROOT / "constraints" / name).read_text().replace("\\\n", " ")
    packages: dict[str, str] = {}
    for line in text.splitlines():
        package, _, rest = line.partition("==")
        assert re.fullmatch(r"\S+( +--hash=sha256:[0-9a-f]{64})+", rest.strip()), line[:100]
        packages[canonicalize_name(package.partition("[")[0])] = rest.split()[0]
    return packages


def needed(project: Path, *extras: str) -> list[Requirement]:
    tomllib = pytest.importorskip("tomllib", reason="came with CPython 3.11")
    document = tomllib.loads(project.read_text())["project"]
    optional = document.get("optional-dependencies", {})
    lines = [*document["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [one for one in map(Requirement, lines) if one.name not in OURS]


@pytest.mark.parametrize(
    ("file", "project", "extras"),
    [
        ("server.txt", "pyproject.toml", []),
        ("server.txt", "server/pyproject.toml", []),
        ("client.txt", "pyproject.toml", ["gymnasium"]),
    ],
)
def test_image_has_what_the_project_needs_in_a_version_that_it_allows(
    file: str, project: str, extras: list[str]
) -> None:
    packages = pinned(file)
    for requirement in needed(ROOT / project, *extras):
        name = canonicalize_name(INSTEAD.get(requirement.name, requirement.name))
        assert requirement.specifier.contains(packages[name]), name


@pytest.mark.parametrize("name", ["server", "client", "build"])
def test_every_package_that_is_asked_for_is_pinned_with_a_hash(name: str) -> None:
    lines = (ROOT / "constraints" / f"{name}.in").read_text().splitlines()
    asked = [line.partition("#")[0].strip() for line in lines]
    packages = pinned(f"{name}.txt")
    assert {canonicalize_name(Requirement(line).name) for line in asked if line} <= set(packages)


def test_image_of_the_server_has_none_of_what_reverb_never_imports() -> None:
    unwanted = {"pip", "setuptools", "wheel", "hatchling", "libclang", "tensorboard", "keras", "tensorflow"}
    assert not unwanted & set(pinned("server.txt"))
