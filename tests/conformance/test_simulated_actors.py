"""The simulated actors of the benchmark `shards` write items that servers take, and count what is confirmed."""

from __future__ import annotations

import contextlib

import pytest
from server_process import ServerProcess

import reverb_writer as rw

pytest.importorskip("psutil", reason="the benchmarks' packages are not installed")


def test_what_simulated_actors_count_is_in_the_table(shared_process: ServerProcess) -> None:
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
