"""A version that is released has notes in the changelog, and is that of both distributions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import reverb_writer

ROOT = Path(__file__).parents[2]


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


def test_notes_are_the_section_of_the_version(copy: Path) -> None:
    assert notes(copy, reverb_writer.__version__).stdout == "- now\n"


def test_other_version_than_that_of_the_package_is_refused(copy: Path) -> None:
    done = notes(copy, "0.0.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert "change `__version__` first" in done.stderr


def test_version_without_notes_is_refused(copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text("## Unreleased\n\n- later\n")
    done = notes(copy, reverb_writer.__version__)
    assert (done.returncode, done.stdout) == (1, "")
    assert "rename `Unreleased`" in done.stderr


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
