"""The Slurm script serves a shard: here without Slurm, whose part is to run its lines once on each node."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from ports import free_port
from server_process import HAS_REVERB, SERVER_PYTHON
from waiting import eventually

import reverb_writer as rw

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "replay.sbatch"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_last_checkpoint_that_fails_is_the_exit_code_of_the_shard(tmp_path: Path) -> None:
    """Here with a program that ends as a server whose disk is full at the end; it is told the limit of its memory."""
    server = tmp_path / "python"
    told = f"echo $REVERB_WRITER__MEMORY__ALERT_BYTES > {tmp_path}/told; touch {tmp_path}/ready"
    server.write_text(f"#!/bin/bash\ntrap 'exit 5' TERM\n{told}\nwhile true; do sleep 0.1; done\n")
    server.chmod(0o755)
    environment = {"REPLAY": str(tmp_path), "REPLAY_PYTHON": str(server), "REPLAY_NODES": "localhost"}
    environment |= {"REPLAY_SRUN": "env SLURM_PROCID=0", "SLURM_MEM_PER_NODE": "8192"}
    with subprocess.Popen([str(SCRIPT)], env={**os.environ, **environment}, start_new_session=True) as job:
        try:
            eventually((tmp_path / "ready").exists, "the server runs")
            assert 0.89 < int((tmp_path / "told").read_text()) / 2**33 < 0.91
            job.send_signal(signal.SIGUSR1)
            assert job.wait(60) == 5
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)


def test_fewer_nodes_than_shards_with_checkpoints_are_refused(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"shard-{number}").mkdir()

    def submit(nodes: str) -> subprocess.CompletedProcess[str]:
        environment = {"REPLAY": str(tmp_path), "REPLAY_PYTHON": "false", "REPLAY_SRUN": "echo", "REPLAY_NODES": nodes}
        env = {**os.environ, **environment}
        return subprocess.run([str(SCRIPT)], env=env, capture_output=True, text=True, timeout=60, check=False)

    refused = submit("a b")
    assert refused.returncode == 2
    assert f"{tmp_path}/shard-2 has a shard's checkpoints, and the job has 2 nodes" in refused.stderr
    assert not (tmp_path / "shards").exists()
    assert submit("a b c").returncode == 0
    assert (tmp_path / "shards").read_text().split() == ["shard-0", "a:8000", "shard-1", "b:8000", "shard-2", "c:8000"]


@pytest.mark.skipif(not HAS_REVERB, reason="dm-reverb is not installed")
def test_script_serves_a_shard_again_after_a_crash_and_saves_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "server.toml").write_text("[tables.replay]\nmax_size = 1000\n")
    port = free_port()
    environment = {
        "REPLAY": str(tmp_path),
        "REPLAY_PYTHON": SERVER_PYTHON,
        "REPLAY_PORT": str(port),
        "REPLAY_NODES": "localhost",
        "REPLAY_SRUN": "env SLURM_PROCID=0",
    }
    with subprocess.Popen([str(SCRIPT)], env={**os.environ, **environment}, start_new_session=True) as job:
        try:
            eventually((tmp_path / "shards").exists, "the file of shards is written")
            assert (tmp_path / "shards").read_text() == f"shard-0 localhost:{port}\n"
            with rw.Client(f"file:{tmp_path}/shards", timeout_s=120) as client:
                client.insert(np.array([1]), {"replay": 1.0})
                client.checkpoint()
                (server,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
                os.kill(server, signal.SIGKILL)
                eventually(lambda: not Path(f"/proc/{server}").exists(), "the server has ended")
                client.insert(np.array([2]), {"replay": 1.0})
                assert client.server_info()["replay"].current_size == 2
            for process in psutil.Process(job.pid).children(recursive=True):  # Slurm signals all of a step
                process.send_signal(signal.SIGUSR1)
            job.send_signal(signal.SIGUSR1)
            assert job.wait(120) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    with subprocess.Popen([str(SCRIPT)], env={**os.environ, **environment}, start_new_session=True) as job:
        try:
            with rw.Client(f"file:{tmp_path}/shards", timeout_s=120) as client:
                assert client.server_info()["replay"].current_size == 2
        finally:
            os.killpg(job.pid, signal.SIGKILL)
