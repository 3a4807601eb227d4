"""Servers on one folder of checkpoints, as after a partition: the newer one gets all that the older has confirmed."""

from __future__ import annotations

import contextlib
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from server_process import HAS_REVERB
from service_process import ServiceProcess, eventually, service, sizes

import reverb_writer as rw
from reverb_writer.ray.addresses import newest_claim

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_REVERB, reason="the server needs an interpreter with dm-reverb"),
]


def configuration(folder: Path) -> str:
    return f'[checkpoints]\ndirectory = "{folder}/checkpoints"\nevery_s = 0\n[tables.replay]\nmax_size = 1_000_000\n'


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
