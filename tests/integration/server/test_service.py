"""The life of a server: it starts, restores, serves, writes a last checkpoint and stops. Real processes and signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import SERVER_PYTHON
from service_process import ServiceProcess, configuration, flip, insert, kept, run_command, service, sizes
from waiting import eventually, process_state

import reverb_writer as rw
from reverb_writer.ray.addresses import newest_claim

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = pytest.mark.timeout(300)  # several servers a test, and TensorFlow takes seconds to load


def contents(address: str, count: int, table: str = "replay") -> set[int]:
    with rw.Client(address) as client:
        return {int(np.squeeze(sample.data)) for sample in client.sample(table, count)}


def test_stopped_server_comes_back_with_its_data(tmp_path: Path) -> None:
    text = configuration(tmp_path, 'sampler = "fifo"\nmax_times_sampled = 1')
    with service(tmp_path, text) as server:
        insert(server.address, *range(10))
        assert server.end(signal.SIGTERM) == 0
    with service(tmp_path, text) as server:
        assert contents(server.address, 10) == set(range(10))
        assert server.status()["starts"] == 2
        assert server.end(signal.SIGINT) == 0
        assert "restored checkpoint" in server.log()


def test_killed_server_comes_back_with_its_last_checkpoint(tmp_path: Path) -> None:
    text = configuration(tmp_path)
    with service(tmp_path, text) as server:
        insert(server.address, 1, 2)
        with rw.Client(server.address) as client:
            client.checkpoint()
        insert(server.address, 3)
        eventually(lambda: server.status()["checkpoints"]["kept"] == 1, "the checkpoint is kept")
        server.end(signal.SIGKILL)
        child_port = server.port
    eventually(lambda: _is_free(child_port), "the Reverb process ends with the service")
    with service(tmp_path, text) as server:
        assert sizes(server.address) == {"replay": 2}


@pytest.mark.slow
def test_what_is_confirmed_before_the_end_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    text = configuration(tmp_path)
    confirmed: list[int] = []
    with service(tmp_path, text) as server:
        client = rw.Client(server.address, timeout_s=1.0)

        def write() -> None:
            with contextlib.suppress(rw.errors.ReverbWriterError):
                while True:
                    client.insert(np.array([len(confirmed)]), {"replay": 1.0})
                    confirmed.append(len(confirmed))

        writer = threading.Thread(target=write)
        writer.start()
        eventually(lambda: len(confirmed) > 20, "the writer writes")
        assert server.end() == 0
        writer.join()
        with contextlib.suppress(rw.errors.ReverbWriterError):
            client.close()  # it says that one is unconfirmed
    with service(tmp_path, text) as server, rw.Client(server.address) as client:
        size = client.server_info()["replay"].current_size
    assert len(confirmed) <= size <= len(confirmed) + 1  # the one under way may have arrived unconfirmed


@pytest.mark.slow
def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path)) as server:
        insert(server.address, 1)
        os.kill(server.child(), signal.SIGSTOP)  # so that no last checkpoint can be written
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "refusing new work" in server.log(), "the first signal is heard")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_signal_before_the_service_knows_that_reverb_serves_loses_nothing(tmp_path: Path) -> None:
    """Reverb takes inserts a moment earlier than its service hears of that: here, the service is paused meanwhile."""
    with service(tmp_path, configuration(tmp_path)) as server:
        insert(server.address, *range(10))
        with rw.Client(server.address) as client:
            client.insert(
                np.random.default_rng(0).integers(1 << 62, size=1 << 21), {"replay": 1.0}
            )  # takes a while to read
        assert server.end() == 0
    with contextlib.closing(ServiceProcess(tmp_path, configuration(tmp_path))) as server:
        eventually(server.restores, "Reverb reads its checkpoint", pause_s=0.001)
        server.process.send_signal(signal.SIGSTOP)
        insert(server.address, 10)
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGCONT)
        assert server.process.wait(60) == 0, server.log()
    with service(tmp_path, configuration(tmp_path)) as server:
        assert sizes(server.address) == {"replay": 12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "cause"),
    [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGKILL, "has died of SIGKILL. Its last log lines:")],
)
def test_death_of_reverb_is_an_exit_code_of_its_own_and_not_called_want_of_memory(
    tmp_path: Path, number: signal.Signals, cause: str
) -> None:
    with service(tmp_path, configuration(tmp_path)) as server:
        os.kill(server.child(), number)
        assert server.process.wait(60) == 4
        assert "the Reverb process has died" in server.log()
        assert cause in server.log()


@pytest.mark.slow
def test_named_checkpoint_is_restored(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path)) as server:
        for number in range(2):
            insert(server.address, number)
            with rw.Client(server.address) as client:
                client.checkpoint()
            eventually(lambda count=number + 1: len(kept(tmp_path)) == count, "the checkpoint is kept")  # type: ignore[misc]
        server.end(signal.SIGKILL)
    older, _ = kept(tmp_path)
    with service(tmp_path, configuration(tmp_path), "--restore", older) as server:
        assert sizes(server.address) == {"replay": 1}
        server.end(signal.SIGKILL)
    with service(tmp_path, configuration(tmp_path), "--restore", "none") as server:
        assert sizes(server.address) == {"replay": 0}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints, the newest with items 0 to 5 in `replay` and 9 in `other`."""
    tmp_path = tmp_path_factory.mktemp("saved")
    text = configuration(tmp_path, 'sampler = "fifo"\n[tables.other]')
    with service(tmp_path, text) as server:
        with rw.TrajectoryObserver(server.address, "replay", sequence_length=1, chunk_length=1) as observer:
            for number in range(6):
                observer({"n": np.int64(number)})
        insert(server.address, 9, table="other")
        assert server.end() == 0
    return tmp_path / "checkpoints"


OTHERS = 'sampler = "fifo"\nrate_limiter = "ratio"\nsamples_per_insert = 2\nmin_size = 3\nerror_buffer = 6'


def test_difference_is_told_and_refused(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "checkpoints")
    text = configuration(tmp_path, OTHERS).replace("max_size = 1000", "max_size = 4")
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
        assert server.process.wait(60) == 3
        for line in (
            "table `other`: in the checkpoint, not configured",
            "table `replay`: max_size is 1000 in the checkpoint, 4 in the configuration",
            "table `replay`: samples_per_insert is 1.0 in the checkpoint, 2.0 in the configuration",
            "Set checkpoints.on_mismatch to `checkpoint` or `config`",
        ):
            assert line in server.log()


@pytest.mark.slow
def test_tables_of_the_checkpoint_may_count(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "checkpoints")
    with service(tmp_path, configuration(tmp_path, OTHERS), "--on-mismatch", "checkpoint") as server:
        with rw.Client(server.address) as client:
            info = client.server_info()
        assert {name: table.current_size for name, table in info.items()} == {"replay": 6, "other": 1}
        assert info["replay"].rate_limiter.samples_per_insert == 1


@pytest.mark.slow
def test_tables_of_the_configuration_may_count(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path / "checkpoints")
    text = configuration(tmp_path, OTHERS).replace("max_size = 1000", "max_size = 4")
    with service(tmp_path, text, "--on-mismatch", "config") as server:
        with rw.Client(server.address) as client:
            info = client.server_info()
            limiter = info["replay"].rate_limiter
            assert (limiter.samples_per_insert, limiter.min_diff, limiter.max_diff) == (2, 0, 12)
            assert limiter.min_diff <= limiter.diff <= limiter.max_diff
            assert {name: table.current_size for name, table in info.items()} == {"replay": 4}
            (oldest,) = client.sample("replay", 1)
            assert oldest.data["n"].tolist() == [2]  # with the structure that it had; 0 and 1 were older
        assert "table `replay`: 2 items of the checkpoint do not fit" in server.log()
        assert "table `other`: 1 items of the checkpoint do not fit" in server.log()


def test_checkpoints_are_listed_and_inspected_without_a_server(saved: Path) -> None:
    listed = run_command("checkpoints", "list", str(saved))
    (line,) = listed.stdout.splitlines()
    name = line.split()[0]
    assert line.endswith("complete")
    inspected = run_command("checkpoints", "inspect", str(saved / "kept" / name))
    assert inspected.returncode == 0
    assert inspected.stdout.startswith(f"{name}: sound, 7 items in 7 chunks, 7 steps\n")
    assert "table `replay`: 6 of 1,000 items" in inspected.stdout
    assert "6 inserts, 0 samples, 0 deletes" in inspected.stdout
    assert "max_times_sampled: 0" in inspected.stdout


def _of_something_else(path: Path) -> None:
    """Put a sound file of something else in the place of the chunks, without what tells it."""
    (path / "MANIFEST.json").unlink()
    shutil.copy(path / "tables.tfrecord", path / "chunks.tfrecord")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: flip(path / "chunks.tfrecord"), "chunks.tfrecord: is damaged"),
        (_of_something_else, "chunks that items refer to"),
    ],
)
def test_damage_is_found(tmp_path: Path, saved: Path, damage: Any, message: str) -> None:
    shutil.copytree(saved, tmp_path / "checkpoints")
    (path,) = (tmp_path / "checkpoints" / "kept").iterdir()
    damage(path)
    inspected = run_command("checkpoints", "inspect", str(path))
    assert inspected.returncode == 1
    assert message in inspected.stderr


@pytest.mark.slow
def test_json_log_has_an_object_a_line_no_noise_and_tells_tables_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVERB_WRITER__LOG__FORMAT", "json")
    text = configuration(tmp_path, 'sequence_length = 4\nsignature = {obs = "uint8[100]"}')
    with service(tmp_path, text) as server:
        with rw.Client(server.address) as client:
            client.insert({"obs": np.zeros((4, 100), np.uint8)}, {"replay": 1.0})
        eventually(lambda: "replay 1/1,000" in server.log(), "a line of figures")
        assert server.end() == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
    assert {"time", "level", "logger", "message"} <= set.intersection(*(set(line) for line in lines))
    assert not [line for line in lines if "reverb/cc" in line["message"] or line["level"] in ("warning", "error")]
    said = "\n".join(line["message"] for line in lines)
    assert "blocks samples while it is empty" in said
    # 1000 items of 4 steps, 1 apart, in chunks of 16: 600 + 145 x 19 / 16 + 1400 / 16 + 1.15 x 100 bytes for each.
    assert "memory of table `replay`: about 951.8 KiB (1,003 steps of 100 bytes before compression)" in said
    assert (
        "total memory: about 573.8 MiB (572.2 MiB for the processes, 684.5 KiB while a checkpoint is written)" in said
    )


# Servers on one folder of checkpoints, as after a partition: the newer one gets all that the older has confirmed.


@pytest.mark.slow
def test_newer_server_has_all_that_the_older_one_has_confirmed(tmp_path: Path) -> None:
    """While actors insert: in tests/ray_shards, beyond a partition."""
    text = configuration(tmp_path)
    with service(tmp_path, text, "--claim", "localhost") as old:
        insert(old.address, *range(20))
        first = eventually(lambda: (one := newest_claim(tmp_path)) and one.phase == "serving" and one, "it serves")
        assert (first.number, first.address) == (1, old.address)
        with contextlib.closing(ServiceProcess(tmp_path, text, "--claim", "localhost")) as new:
            new.wait_ready()
            assert old.process.wait(60) == 7, old.log()
            assert sizes(new.address) == {"replay": 20}
            second = eventually(lambda: (one := newest_claim(tmp_path)) and one.phase == "serving" and one, "it serves")
            assert (second.number, second.address) == (2, new.address)
            assert new.end() == 0
    third = newest_claim(tmp_path)
    assert third is not None
    assert (third.number, third.phase) == (2, "ended")


@pytest.mark.slow
def test_server_stands_still_while_its_folder_is_away_and_ends_if_its_reverb_dies_meanwhile(tmp_path: Path) -> None:
    """The folder is away for longer than a newer server waits. The second time, the server is told to end meanwhile."""
    folder, away = tmp_path / "shard", tmp_path / "away"
    with service(tmp_path, configuration(folder), "--claim", "localhost") as server:
        child = server.child()
        folder.rename(away)
        eventually(lambda: process_state(child) == "T", "Reverb stands still")
        away.rename(folder)
        eventually(lambda: process_state(child) != "T", "Reverb goes on")
        assert sizes(server.address) == {"replay": 0}
        folder.rename(away)
        eventually(lambda: process_state(child) == "T", "Reverb stands still")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.status()["phase"] == "draining", "it waits for the folder")
        os.kill(child, signal.SIGKILL)
        assert server.process.wait(60) == 4, server.log()


@pytest.mark.slow
def test_end_of_the_parent_and_signals_after_it_leave_time_for_the_last_checkpoint(tmp_path: Path) -> None:
    """As of a node that leaves Ray: its actors end, and then its servers are told to write their last checkpoints."""
    text = configuration(tmp_path)
    with service(tmp_path, text, "--end-with-input") as server:
        insert(server.address, 1)
        os.kill(server.child(), signal.SIGSTOP)  # the service continues Reverb before the last checkpoint
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


@pytest.mark.slow
def test_server_whose_input_ends_before_it_serves_stops_at_once() -> None:
    line = [SERVER_PYTHON, "-m", "reverb_writer_server", "serve", "--port", "0", "--end-with-input"]
    assert subprocess.run(line, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode == 128 + signal.SIGHUP


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
