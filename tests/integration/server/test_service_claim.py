"""Servers on one folder of checkpoints, as after a partition: the newer one gets all that the older has confirmed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_process import HAS_REVERB, SERVER_PYTHON
from service_process import ServiceProcess, service, sizes
from waiting import eventually

import reverb_writer as rw
from reverb_writer.ray.addresses import newest_claim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_REVERB, reason="the server needs an interpreter with dm-reverb"),
]


def configuration(folder: Path) -> str:
    return f'[checkpoints]\ndirectory = "{folder}/checkpoints"\nevery_s = 0\n[tables.replay]\nmax_size = 1_000_000\n'


@contextlib.contextmanager
def server_that_stands_still(tmp_path: Path) -> Iterator[tuple[ServiceProcess, int]]:
    """Run a server whose folder `shard` has become `away`, until Reverb, whose process is the second value, stands."""
    folder = tmp_path / "shard"
    with service(tmp_path, configuration(folder), "--claim", "localhost") as server:
        child = server.child()
        folder.rename(tmp_path / "away")
        eventually(lambda: _state(child) == "T", "Reverb stands still")
        yield server, child


def test_newer_server_has_all_that_the_older_one_has_confirmed(tmp_path: Path) -> None:
    confirmed, may_end = [], threading.Event()

    def write(address: str) -> None:
        """Insert until the server refuses: an item counts as confirmed when `insert` returns."""
        with rw.Client(address, timeout_s=5) as client, contextlib.suppress(rw.errors.ReverbWriterError):
            for number in itertools.count():
                client.insert({"number": np.array([number])}, {"replay": 1.0})
                confirmed.append(number)
                if may_end.is_set():
                    return

    with service(tmp_path, configuration(tmp_path), "--claim", "localhost") as old:
        writer = threading.Thread(target=write, args=(old.address,))
        writer.start()
        eventually(lambda: len(confirmed) > 20, "items are confirmed")
        first = newest_claim(tmp_path)
        assert first is not None
        assert (first.number, first.address, first.phase) == (1, old.address, "serving")
        new = ServiceProcess(tmp_path, configuration(tmp_path), "--claim", "localhost")
        with contextlib.closing(new):
            new.wait_ready()
            assert old.process.wait(60) == 7, old.log()
            may_end.set()
            writer.join()
            assert sizes(new.address)["replay"] >= len(confirmed)
            second = eventually(lambda: (one := newest_claim(tmp_path)) and one.phase == "serving" and one, "it serves")
            assert (second.number, second.address) == (2, new.address)
            assert new.end() == 0
    third = newest_claim(tmp_path)
    assert third is not None
    assert (third.number, third.phase) == (2, "ended")


def test_server_whose_reverb_dies_in_the_doubt_ends(tmp_path: Path) -> None:
    """Its folder is away for longer than a newer server waits, and it was told to end meanwhile."""
    with server_that_stands_still(tmp_path) as (server, child):
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.status()["phase"] == "draining", "it waits for the folder")
        os.kill(child, signal.SIGKILL)
        assert server.process.wait(60) == 4, server.log()


def test_server_whose_folder_is_there_again_goes_on(tmp_path: Path) -> None:
    with server_that_stands_still(tmp_path) as (server, child):
        (tmp_path / "away").rename(tmp_path / "shard")
        eventually(lambda: _state(child) != "T", "Reverb goes on")
        assert sizes(server.address) == {"replay": 0}
        assert server.end() == 0


def test_end_of_the_parent_and_signals_after_it_leave_time_for_the_last_checkpoint(tmp_path: Path) -> None:
    """As of a node that leaves Ray: its actors end, and then its servers are told to write their last checkpoints."""
    text = configuration(tmp_path)
    with service(tmp_path, text, "--end-with-input") as server:
        with rw.Client(server.address) as client:
            client.insert({"number": np.array([1])}, {"replay": 1.0})
        os.kill(server.child(), signal.SIGSTOP)  # the service waits some seconds before it continues Reverb
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.stdin = None  # or the end of the test would flush it
        eventually(lambda: "SIGHUP: refusing new work" in server.log(), "it has seen the end")
        server.process.send_signal(signal.SIGTERM)
        while server.process.poll() is None:  # the last ones come when the interpreter ends
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.001)
        assert server.process.returncode == 0, server.log()
    with service(tmp_path, text) as server:
        assert sizes(server.address) == {"replay": 1}


def test_server_whose_input_ends_before_it_serves_stops_at_once() -> None:
    line = [SERVER_PYTHON, "-m", "reverb_writer_server", "serve", "--port", "0", "--end-with-input"]
    assert subprocess.run(line, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 128 + signal.SIGHUP


def _state(process: int) -> str:
    """Return the letter of a process's state; T if it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
