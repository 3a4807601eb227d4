"""`make pin` writes what the registry answers behind the names of the base images, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
