"""How a dataset's processes end: with it, before it, or with the learner; nothing hangs, nothing is left behind."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from numbered import first_numbers, insert_numbers
from reading import eventually
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.reading.shared_memory import MappedArrays

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")

StartServer = Callable[..., HostedServer]
LENGTH = 5000  # rows of an item; 40,000 bytes, so that batches are shared
END_WITHIN_S = 60.0  # far more than any of them takes


@pytest.fixture
def address(replay_server: StartServer) -> str:
    """A table of items that are full of 1, 2 and 3."""
    server = replay_server(rw.TableConfig("replay", 1000))
    insert_numbers(server.address, "replay", [1, 2, 3], LENGTH)
    return server.address


def workers(parent: int | None = None) -> list[psutil.Process]:
    """Return the processes that work for datasets of a process; None for this one."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("worker_process" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def have_ended(processes: list[psutil.Process]) -> bool:
    """Return whether all have, whoever was to wait for them."""

    def is_there(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return not any(map(is_there, processes))


def check_batch(batch: rw.Batch) -> None:
    (rows,) = batch.data
    assert rows.shape == (4, LENGTH)
    assert set(first_numbers(batch)) <= {1, 2, 3}
    np.testing.assert_array_equal(rows, np.repeat(rows[:, :1], LENGTH, axis=1))


# Processes that are killed.


def test_killed_process_is_named_and_the_others_go_on(address: str) -> None:
    with rw.ReplayDataset(address, "replay", 4, num_workers=2) as dataset:
        check_batch(next(dataset))
        killed, other = workers()
        killed.kill()

        def is_named() -> bool:
            try:
                check_batch(next(dataset))
            except rw.ReverbWriterError as error:
                return f"process {killed.pid} " in str(error) and "exit code -9" in str(error)
            return False

        assert eventually(is_named)
        for _ in range(20):
            check_batch(next(dataset))
        assert workers() == [other]
        assert dataset.stats().received_samples > 0


@pytest.mark.parametrize("at_once", [False, True])
def test_iteration_ends_when_all_are_killed(address: str, at_once: bool) -> None:
    with rw.ReplayDataset(address, "replay", 4, num_workers=2) as dataset:
        if not at_once:  # else they have hardly started
            check_batch(next(dataset))
        for process in workers():
            process.kill()
        named = []
        while True:
            try:
                batch = next(dataset, None)
            except rw.ReverbWriterError as error:
                named.append(str(error))
                continue
            if batch is None:
                break
            check_batch(batch)
        assert len(named) == 2
        assert all("exit code -9, expected none to end before `close()`" in message for message in named)
        assert next(dataset, None) is None
    assert workers() == []


def test_stopped_process_keeps_nobody_waiting(address: str) -> None:
    dataset = rw.ReplayDataset(address, "replay", 4, num_workers=1, timeout_s=0.3)
    (process,) = workers()
    process.suspend()

    def is_named() -> bool:
        try:
            check_batch(next(dataset))
        except rw.ReplayTimeoutError as error:
            return f"process {process.pid} " in str(error) and "does not answer" in str(error)
        return False

    assert eventually(is_named)
    assert eventually(is_named)
    dataset.close()
    assert have_ended([process])


def test_batch_that_cannot_be_mapped_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(MappedArrays, "receive", fail)
    with rw.ReplayDataset(address, "replay", 4, num_workers=1) as dataset:
        processes = workers()
        with pytest.raises(rw.ReverbWriterError, match=r"cannot read what .*Too many open files.*fewer `num_workers`"):
            next(dataset)
        assert list(dataset) == []
        assert eventually(lambda: have_ended(processes))


# The end of a dataset.


@pytest.mark.parametrize("reuse_buffers", [False, True])
def test_close_ends_all_and_what_had_come_can_be_read(address: str, reuse_buffers: bool) -> None:
    dataset = rw.ReplayDataset(address, "replay", 4, num_workers=2, reuse_buffers=reuse_buffers)
    first = next(dataset)
    numbers = first_numbers(first)
    assert eventually(lambda: dataset.stats().ready_samples == 24)  # two batches there and one here, of each
    processes = workers()
    assert len(processes) == 2
    dataset.close()
    dataset.close()
    assert have_ended(processes)
    assert dataset.stats().undelivered_samples == 24
    rest = list(dataset)
    assert len(rest) == 2
    for batch in (first, *rest):
        check_batch(batch)
    assert first_numbers(first) == numbers
    assert dataset.stats().undelivered_samples == 16  # which the processes had
    assert dataset.stats().samples == 12


def test_close_at_once_ends_what_has_hardly_started(address: str) -> None:
    with rw.ReplayDataset(address, "replay", 4, num_workers=2) as dataset:
        processes = workers()
    assert len(processes) == 2
    assert have_ended(processes)
    assert list(dataset) == []


def test_dataset_that_cannot_start_all_leaves_none(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start: Any = subprocess.Popen
    started: list[Any] = []

    def start_two(*arguments: Any, **options: Any) -> Any:
        if len(started) == 2:
            raise BlockingIOError("no more processes")
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_two)
    with pytest.raises(OSError, match="no more processes"):
        rw.ReplayDataset(address, "replay", 4, num_workers=3)
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


def test_processes_of_a_forgotten_dataset_end_with_it(address: str) -> None:
    dataset = rw.ReplayDataset(address, "replay", 4, num_workers=2)
    batch = next(dataset)
    processes = workers()
    assert len(processes) == 2
    del dataset
    gc.collect()
    assert have_ended(processes)
    check_batch(batch)


def test_nothing_is_left_open_or_mapped(address: str) -> None:
    process = psutil.Process()
    with rw.Client(address) as client:

        def open_and_close() -> tuple[int, int]:
            with rw.ReplayDataset(client, "replay", 4, num_workers=1, reuse_buffers=True) as dataset:
                check_batch(next(dataset))
            del dataset
            gc.collect()
            maps = process.memory_maps(grouped=False)
            return process.num_fds(), sum("reverb-writer" in mapping.path for mapping in maps)

        (before, _), *_, (after, num_mapped) = [open_and_close() for _ in range(21)]
    assert num_mapped == 0
    assert after <= before + 5  # gRPC's own come and go


# The end of the learner, which is a program here.

OPEN = """
import os, sys
import reverb_writer as rw

dataset = rw.ReplayDataset(sys.argv[1], "replay", 4, num_workers=2)
batch = next(dataset)
assert batch.data[0].shape[0] == 4

def told():
    print("ready", flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def program(address: str, folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that has opened a dataset and read a batch, until it is `told` or ends."""
    script = folder / "learner.py"
    script.write_text(OPEN + text)
    pipe = subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    process = subprocess.Popen(
        [sys.executable, script, address],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the workers of a program that is `told`."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    found = workers(process.pid)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("end", ["", "dataset.close()", "del dataset", "sys.exit(0)"])
def test_plain_script_leaves_no_process(address: str, tmp_path: Path, end: str) -> None:
    with program(address, tmp_path, f"told()\n{end}\n") as process:
        processes = workers_of(process)
        out, log = process.communicate("go\n", timeout=END_WITHIN_S)
        assert (process.returncode, out, log) == (0, "", "")
        assert eventually(lambda: have_ended(processes))


def test_error_of_the_script_ends_its_processes(address: str, tmp_path: Path) -> None:
    with program(address, tmp_path, "told()\n1 / 0\n") as process:
        processes = workers_of(process)
        _, log = process.communicate("go\n", timeout=END_WITHIN_S)
        assert process.returncode == 1
        assert log.count("Traceback") == 1
        assert eventually(lambda: have_ended(processes))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_when_the_learner_is_killed(address: str, tmp_path: Path, number: signal.Signals) -> None:
    with program(address, tmp_path, "told()\n") as process:
        processes = workers_of(process)
        process.send_signal(number)
        assert process.wait(END_WITHIN_S) == -number
        assert eventually(lambda: have_ended(processes), END_WITHIN_S)


@pytest.mark.parametrize("moment", ["reading", "starting"])
def test_interrupt_from_the_keyboard_is_the_learners_alone(address: str, tmp_path: Path, moment: str) -> None:
    text = "other = rw.ReplayDataset(sys.argv[1], 'replay', 4, num_workers=2)\n" if moment == "starting" else ""
    loop = "print('ready', flush=True)\nwhile True: next(dataset)\n"
    with program(address, tmp_path, text + loop) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        processes = workers(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, log = process.communicate(timeout=END_WITHIN_S)
        assert process.returncode == -signal.SIGINT
        assert log.count("Traceback") == log.count("KeyboardInterrupt") == 1
        assert eventually(lambda: have_ended(processes))


def test_forked_child_is_refused_and_disturbs_nobody(address: str, tmp_path: Path) -> None:
    text = """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    try:
        next(dataset)
    except rw.ClosedError as error:
        assert "forked child" in str(error), error
        dataset.stats()
        dataset.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert next(dataset).data[0].shape[0] == 4
dataset.close()
"""
    with program(address, tmp_path, text) as process:
        _, log = process.communicate(timeout=END_WITHIN_S)
        assert process.returncode == 0, log
