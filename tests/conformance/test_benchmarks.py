"""The benchmarks run, count what they write, and model what a closed form says; what they measure is no matter here."""

from __future__ import annotations

import contextlib
import ctypes.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

import reverb_writer as rw
from benchmarks.__main__ import BENCHMARKS
from benchmarks.scaling_model import busiest_share, scaling_model

ROOT = Path(__file__).parents[2]
# These take minutes because they start several servers and peers, or share their code with another row.
LEFT_OUT = {
    *("failover", "gateway", "local_server", "one_process", "shards", "slices"),
    *("chunk_length_frames", "read_one_by_one", "read_tf_agents", "write_frames", "write_small_strided"),
    *("episode_getters", "rollout_mini_batches", "rollout_recurrent_mini_batches"),
}


@pytest.mark.slow
@pytest.mark.timeout(900)  # a benchmark with dozens of cells takes a minute even in a hurry, and more on a busy machine
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name not in LEFT_OUT])
def test_benchmark_runs_and_prints_a_table(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ale_py", reason="the benchmarks' packages are not installed")
    pytest.importorskip("optree", reason="the benchmarks' packages are not installed")
    pytest.importorskip("psutil", reason="the benchmarks' packages are not installed")
    if name == "allocator" and ctypes.util.find_library("jemalloc") is None:
        pytest.skip("the system has no jemalloc to compare with")
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--output", str(report)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| -" in report.read_text()


def test_what_simulated_actors_count_is_in_the_table(shared_process: ServerProcess) -> None:
    pytest.importorskip("psutil", reason="the benchmarks' packages are not installed")
    from benchmarks.shards import SimulatedActors

    server = shared_process.start(rw.TableConfig("replay"))
    with contextlib.closing(SimulatedActors(3)) as actors:
        actors.open([server.address], pause_s=0.01)
        sent = actors.write(seconds=0.2)
        with rw.Client(server.address) as client:
            assert client.server_info()["replay"].current_size == sent.items[server.address] + 3 * 10
            (sample,) = client.sample("replay", 1)
            assert [leaf.shape for leaf in sample.data] == [(10, 4)] * 6
    assert len(sent.call_s) * 10 == sent.items[server.address] > 0
    server.stop()


# The model of hosts: docs/deploy/sizing.md.


def test_busiest_of_two_shards_is_as_far_from_the_mean_as_heads_from_tails() -> None:
    # The mean deviation of n tosses of a coin is sqrt(n / (2 pi)).
    assert busiest_share(2, 1000) == pytest.approx(1 + math.sqrt(1000 / (2 * math.pi)) / 500, abs=0.002)
    assert busiest_share(1, 1000) == 1
    assert busiest_share(16, 1) == 16  # one actor, one shard


def test_network_limits_where_items_are_large() -> None:
    (one, *_) = scaling_model(server_cpu_us=8, item_bytes=1e6, num_actors=1000).rows
    assert one == ["1", "1,250", "1.00", "1,250", "1"]  # 10 Gbit/s = 1,250 MB/s
