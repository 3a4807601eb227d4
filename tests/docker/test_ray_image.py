"""The image of a Ray node: Ray in it starts, and so does the server that its shards run on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from compose import docker, engine

ROOT = Path(__file__).parents[2]
BUILD_S = 1800

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * BUILD_S),
    pytest.mark.skipif(not engine(), reason="there is no Docker engine on this machine"),
]
PROGRAM = """
import reverb_writer as rw, reverb_writer.ray as rwr
table = rw.TableConfig("replay", 100)
with rwr.ReplayCluster.start("image", [table], python="/opt/venv/bin/python", checkpoints="/tmp/replay") as cluster:
    print(cluster.status().is_serving)
"""


def test_cluster_starts_in_the_image() -> None:
    tag = f"reverb-writer-test-{os.getpid()}"
    for name, options in (("server", ()), ("ray", ("--build-arg", f"SERVER={tag}-server"))):
        file = ROOT / "docker" / f"{name}.Dockerfile"
        docker("build", "--file", str(file), "--tag", f"{tag}-{name}", *options, str(ROOT), timeout_s=BUILD_S)
    done = docker("run", "--rm", "--shm-size", "1g", f"{tag}-ray", "python", "-c", PROGRAM)
    assert "True" in done.stdout.splitlines()  # Ray may print lines of its actors after it
    assert docker("run", "--rm", f"{tag}-ray", "leave-ray").stdout == ""
