"""Releases, images and their base images: notes, links, pinned packages and digests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import reverb_writer

ROOT = Path(__file__).parents[3]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("scripts/release-notes", "scripts/absolute-links", "reverb_writer/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = reverb_writer.__version__
    text = f"# Changelog\n\n## Unreleased\n\n- later\n\n## {version} - 2026-11-22\n\n- now\n\n## 0.0.1\n\n- before\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    return tmp_path


def notes(copy: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(copy / "scripts/release-notes"), version]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_notes_are_the_section_of_the_version_of_the_package(copy: Path) -> None:
    assert notes(copy, reverb_writer.__version__).stdout == "- now\n"
    other = notes(copy, "0.0.1")
    (copy / "CHANGELOG.md").write_text("## Unreleased\n\n- later\n")
    for done, said in ((other, "change `__version__` first"), (notes(copy, reverb_writer.__version__), "`Unreleased`")):
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr


def test_links_of_readme_are_absolute_for_pypi(copy: Path) -> None:
    readme = copy / "README.md"
    readme.write_text('[a](docs/a.md#b) [c](#d) [e](https://e.org) <source srcset="docs/f.svg"> <img src="docs/g.svg">')
    command = [sys.executable, str(copy / "scripts/absolute-links"), "https://host/o/r", "v1"]
    subprocess.run(command, check=True, timeout=60)
    assert readme.read_text() == (
        "[a](https://host/o/r/blob/v1/docs/a.md#b) [c](#d) [e](https://e.org) "
        '<source srcset="https://host/o/r/raw/v1/docs/f.svg?sanitize=true"> '
        '<img src="https://host/o/r/raw/v1/docs/g.svg?sanitize=true">'
    )


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


FILES = [*sorted((ROOT / "docker").glob("*.Dockerfile")), ROOT / "docker-compose.yml"]
DIGESTS = {
    "python:3.11-slim-bookworm": "1" * 64,
    "python:3.13-slim-bookworm": "2" * 64,
    "prom/prometheus:v2.55.1": "3" * 64,
    "grafana/grafana:11.3.0": "4" * 64,
}

pytestmark = pytest.mark.skipif(shutil.which("sed") is None, reason="needs sed")


def pin(tmp_path: Path, digests: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Run the script over copies, with a `docker` that knows these digests; return its code and the files' texts."""
    for name, digest in digests.items():
        (tmp_path / name.replace("/", "_")).write_text(f"{name.partition(':')[0]}@sha256:{digest}\n")
    docker = tmp_path / "docker"
    docker.write_text(f"""#!/bin/sh
        for image; do :; done
        file={tmp_path}/$(printf %s "$image" | tr / _)
        [ -f "$file" ] || exit 1
        [ "$1" = pull ] || cat "$file"
    """)
    docker.chmod(0o755)
    copies = [tmp_path / file.name for file in FILES]
    for file, copy in zip(FILES, copies, strict=True):
        if not copy.exists():
            shutil.copy(file, copy)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "scripts/pin-bases", *copies], env=environment, capture_output=True, check=False)
    return done.returncode, {copy.name: copy.read_text() for copy in copies}


def test_each_base_gets_its_digest_and_a_second_run_renews_it(tmp_path: Path) -> None:
    before = {file.name: file.read_text() for file in FILES}
    code, pinned = pin(tmp_path, DIGESTS)
    assert code == 0
    assert f"ARG BASE=python:3.11-slim-bookworm@sha256:{'1' * 64}\n" in pinned["server.Dockerfile"]
    assert f"ARG BASE=python:3.11-slim-bookworm@sha256:{'1' * 64}\n" in pinned["gateway.Dockerfile"]
    assert f"ARG BASE=python:3.13-slim-bookworm@sha256:{'2' * 64}\n" in pinned["client.Dockerfile"]
    assert f"image: prom/prometheus:v2.55.1@sha256:{'3' * 64}\n" in pinned["docker-compose.yml"]
    assert "image: reverb-writer-server\n" in pinned["docker-compose.yml"]  # built here
    for digest in DIGESTS.values():
        pinned = {name: text.replace(f"@sha256:{digest}", "") for name, text in pinned.items()}
    assert pinned == before
    code, renewed = pin(tmp_path, dict.fromkeys(DIGESTS, "5" * 64))
    assert code == 0
    assert {text.count("@sha256:" + "5" * 64) for text in renewed.values()} == {1, 2}
    assert not any("1" * 64 in text for text in renewed.values())


def test_nothing_changes_unless_the_registry_knows_all(tmp_path: Path) -> None:
    before = {file.name: file.read_text() for file in FILES}
    code, after = pin(tmp_path, {name: digest for name, digest in DIGESTS.items() if not name.startswith("grafana")})
    assert code != 0
    assert after == before
