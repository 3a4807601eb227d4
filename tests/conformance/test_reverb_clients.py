"""dm-reverb's client and ours, at one table and in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reverb
import tree
from reverb_writer_server import ReplayServer

import reverb_writer as rw
from reverb_writer.tables import SAVES

from .nests import TABLES, WINDOW, assert_equal, window, write_windows


def test_the_highest_priority_is_sampled_first_whoever_changes_it(peer: Any, our_client: rw.Client) -> None:
    for number in range(4):
        our_client.insert([np.array([number])], {"heap": number})

    def first(client: Any) -> tuple[int, int]:
        (sample,) = client.sample("heap", 1) if client is our_client else client.sample("heap", 1, emit_timesteps=False)
        return int(sample.data[0][0]), sample.info.key

    number, key_of_3 = first(peer)
    assert number == 3
    peer.mutate_priorities("heap", updates={key_of_3: 0.5})
    number, key_of_2 = first(our_client)
    assert number == 2
    our_client.mutate_priorities("heap", updates={key_of_3: 9.0}, deletes=[key_of_2])
    assert first(peer) == first(our_client) == (3, key_of_3)
    peer.mutate_priorities("heap", deletes=[key_of_3])
    assert first(our_client)[0] == 1
    assert our_client.server_info()["heap"].current_size == 2


def test_both_see_the_same_tables(peer: Any, our_client: rw.Client) -> None:
    write_windows(our_client, "kept", 5, 2)
    list(our_client.sample("kept", 3))
    mine, other = our_client.server_info(), peer.server_info(timeout=60)
    assert mine.keys() == other.keys() - {SAVES}  # a table of the server's own
    for name, info in mine.items():
        for field in ("current_size", "max_size", "max_times_sampled", "num_episodes", "num_deleted_episodes"):
            assert getattr(info, field) == getattr(other[name], field), field
    assert (mine["kept"].current_size, mine["kept"].num_episodes) == (4, 1)
    specs = tree.map_structure(lambda spec: (tuple(spec.shape), spec.dtype.as_numpy_dtype), WINDOW)
    assert tree.map_structure(lambda spec: (spec.shape, spec.dtype.type), mine["windows"].signature) == specs


# Checkpoints


def test_our_items_outlive_a_server(tmp_path: Path) -> None:
    with ReplayServer(TABLES, checkpoints=tmp_path) as server, rw.Client(server) as client:
        write_windows(client, "windows", 30, 4, 2)
        client.insert([np.arange(3)], {"heap": 1.5})
        assert Path(client.checkpoint()).is_relative_to(tmp_path)
    with ReplayServer(TABLES, checkpoints=tmp_path) as server, rw.Client(server) as client:
        peer = reverb.Client(server.address)
        for start in range(0, 14, 2):
            (sample,) = peer.sample("windows", 1, emit_timesteps=False, unpack_as_table_signature=True)
            assert_equal(sample.data, window(start, start + 4))
        for start, sample in zip(range(14, 27, 2), client.sample("windows", 7), strict=True):
            assert_equal(sample.data, window(start, start + 4))
        (sample,) = client.sample("heap", 1)
        assert (sample.data[0].tolist(), sample.info.priority) == ([0, 1, 2], 1.5)


# In one process


@pytest.mark.parametrize("first", ["reverb", "reverb_writer"])
def test_either_may_be_imported_first(address: str, peer: Any, first: str) -> None:
    use_ours = """
import numpy as np, reverb_writer as rw
with rw.Client(address) as ours:
    ours.insert([np.arange(4)], {"ours": 1.0})
    (sample,) = ours.sample("ours", 1)
    assert sample.data[0].tolist() == [0, 1, 2, 3]
"""
    use_theirs = """
import numpy as np, reverb
theirs = reverb.Client(address)
theirs.insert([np.arange(4)], {"ours": 1.0})
(sample,) = theirs.sample("ours", 1, emit_timesteps=False)
assert sample.data[0].tolist() == [[0, 1, 2, 3]]
"""
    order = [use_theirs, use_ours] if first == "reverb" else [use_ours, use_theirs]
    program = "\n".join([f"address = {address!r}", *order, *order, "print('both', 'work')"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.endswith("both work\n"), done.stderr
