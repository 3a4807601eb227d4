"""Faults of the supervised service: clocks, disks, damage, descriptors, deaths. Real processes and signals.

After each the newest complete checkpoint is restored, and the exit code is that of docs/reference/configuration.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from service_process import ServiceProcess, configuration, flip, insert, kept, run_command, service, sizes
from waiting import eventually, process_state

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # several servers a test, and TensorFlow takes seconds to load
]

MIB = 1 << 20
LARGE_MIB = int(os.environ.get("REVERB_WRITER_CHECKPOINT_MIB", "100"))
LARGE_ITEMS = int(os.environ.get("REVERB_WRITER_CHECKPOINT_ITEMS", "5000"))  # with millions, `ServerInfo` takes seconds
FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)


def fill(address: str, mib: int) -> None:
    """Insert so many items of 1 MiB that do not compress: Reverb saves some 20 to 40 of them a second."""
    noise = np.random.default_rng(0)
    with rw.Client(address) as client:
        for _ in range(mib):
            client.insert(noise.integers(0, 256, (1, MIB), np.uint8), {"replay": 1.0})


def fill_with_small_items(address: str, mib: int, items: int) -> None:
    steps = np.random.default_rng(0).integers(0, 256, (4096, mib * MIB // items), np.uint8)
    with rw.TrajectoryObserver(address, "replay", 1, timeout_s=300) as observer:
        for number in range(items):
            observer({"noise": steps[number % len(steps)]})


def save(server: ServiceProcess, tmp_path: Path) -> str:
    """Have a client ask for a checkpoint; return the name under which it is kept."""
    before = kept(tmp_path)
    with rw.Client(server.address) as client:
        client.checkpoint()
    eventually(lambda: set(kept(tmp_path)) - set(before), "the checkpoint is kept")
    return kept(tmp_path)[-1]


def ask_for_a_checkpoint(server: ServiceProcess) -> threading.Thread:
    """Have a client ask for a checkpoint, which may fail, in the background."""

    def ask() -> None:
        with contextlib.suppress(rw.errors.ReverbWriterError), rw.Client(server.address, timeout_s=100) as client:
            client.checkpoint()

    asking = threading.Thread(target=ask)
    asking.start()
    return asking


def saving(tmp_path: Path) -> bool:
    """Return whether Reverb writes chunks, the last and longest part of a save."""
    return any((tmp_path / "checkpoints" / "incoming").glob("*/chunks.tfrecord"))


def restored(tmp_path: Path, text: str = "") -> int:
    """Start a server of the folder's checkpoints, and stop it; return how many items it had at once."""
    with service(tmp_path, text or configuration(tmp_path)) as server:
        return sizes(server.address)["replay"]


@contextlib.contextmanager
def service_with_clock(tmp_path: Path, text: str, zone: str, first: str) -> Iterator[tuple[ServiceProcess, Path]]:
    """Start a service whose wall clock is read from a file; its monotonic clock is the real one."""
    clock = tmp_path / "clock"
    clock.write_text(first)
    environment = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
        "TZ": zone,
    }
    process = ServiceProcess(tmp_path, text, environment=environment)
    with contextlib.closing(process):
        process.wait_ready()
        yield process, clock


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime: apt-get install libfaketime")
@pytest.mark.parametrize(
    ("zone", "first", "then"),
    [
        ("UTC", "@2027-03-01 12:00:00", "@2027-03-01 11:00:00"),
        ("UTC", "@2027-03-01 12:00:00", "@2028-03-01 12:00:00"),
        ("Europe/Berlin", "@2027-10-31 02:59:50", "@2027-10-31 02:00:10"),  # one hour back, in the local time
    ],
    ids=["set back", "set forward", "end of summer time"],
)
def test_clock_that_jumps_loses_nothing(tmp_path: Path, zone: str, first: str, then: str) -> None:
    text = configuration(tmp_path)
    with service_with_clock(tmp_path, text, zone, first) as (server, clock):
        insert(server.address, *range(10))
        before = save(server, tmp_path)
        clock.write_text(then)
        insert(server.address, *range(10, 20))
        after = save(server, tmp_path)
        insert(server.address, 20)
        assert server.end() == 0
    assert len(kept(tmp_path)) == 2
    assert [int(name.split("-")[0]) for name in (before, after, *kept(tmp_path))] == [1, 2, 2, 3]
    assert restored(tmp_path, text) == 21


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _truncate_without_manifest(path: Path) -> None:
    (path / "MANIFEST.json").unlink()
    _truncate(path / "chunks.tfrecord")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints: the older has 3 items, the newer 5."""
    tmp_path = tmp_path_factory.mktemp("two")
    with service(tmp_path, configuration(tmp_path)) as server:
        insert(server.address, *range(3))
        save(server, tmp_path)
        insert(server.address, 3, 4)
        assert server.end() == 0
    return tmp_path / "checkpoints"


def _of_another_server(path: Path) -> None:
    """Put the items of the older checkpoint beside the chunks of the newer one, without what tells it."""
    older = min(path.parent.iterdir())
    for name in ("tables.tfrecord", "chunks.tfrecord"):
        shutil.copy(older / name, path / name)
    (path / "MANIFEST.json").unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tables flipped": lambda path: flip(path / "tables.tfrecord"),
    "chunks flipped": lambda path: flip(path / "chunks.tfrecord"),
    "items cut short": lambda path: _truncate(path / "items.tfrecord"),
    "chunks cut short, without a manifest": _truncate_without_manifest,
    "chunks missing": lambda path: (path / "chunks.tfrecord").unlink(),
    "manifest damaged": lambda path: (path / "MANIFEST.json").write_text("[]"),
    "foreign": _of_another_server,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_checkpoint_falls_back_to_the_older_one_and_says_so(
    tmp_path: Path, two: Path, kind: str
) -> None:
    shutil.copytree(two, tmp_path / "checkpoints")
    older, newer = kept(tmp_path)
    DAMAGE[kind](tmp_path / "checkpoints" / "kept" / newer)
    with service(tmp_path, configuration(tmp_path)) as server:
        assert sizes(server.address) == {"replay": 3}
        loud = [line for line in server.log().splitlines() if " ERROR " in line and newer in line]
        assert loud
        assert f"THE NEXT OLDER ONE IS TRIED, {older}" in loud[0]
        assert f"restored checkpoint {older}" in server.log()
        assert server.status()["checkpoints"]["damaged"] == [newer]
        assert "reverb_checkpoints_damaged 1.0" in server.get("/metrics")[1]
        assert server.end() == 0
    if kind == "chunks flipped":  # the damaged one does not come back
        assert restored(tmp_path) == 3


def test_three_starts_that_fail_alike_are_followed_by_a_service_that_says_why(tmp_path: Path, two: Path) -> None:
    shutil.copytree(two, tmp_path / "checkpoints")
    before = tmp_path / "before"
    shutil.copytree(two, before)
    for name in kept(tmp_path):
        _zero(tmp_path / "checkpoints" / "kept" / name / "chunks.tfrecord")
    text = configuration(tmp_path)
    for _ in range(2):
        with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
            assert server.process.wait(60) == 3
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
        eventually(lambda: "stays up, not ready" in server.log(), "it stays up")
        status, reason = server.get("/readyz")
        assert status == 503
        assert "3 times with the same error" in reason
        assert "chunks.tfrecord is damaged" in reason
        assert server.get("/livez")[0] == 200
        assert server.status()["phase"] == "failed"
        shutil.rmtree(tmp_path / "checkpoints" / "kept")
        shutil.copytree(before / "kept", tmp_path / "checkpoints" / "kept")  # somebody restores the files
        assert server.end() == 3
    with service(tmp_path, text) as server:
        assert sizes(server.address) == {"replay": 5}
        assert server.end() == 0
    for name in kept(tmp_path):
        _zero(tmp_path / "checkpoints" / "kept" / name / "chunks.tfrecord")
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:  # a success has begun the count anew
        assert server.process.wait(60) == 3


def test_kill_after_the_fitted_copy_was_made_costs_nothing(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path, keep=1)) as server:
        insert(server.address, *range(10))
        fill(server.address, 90)  # so that the restore takes a moment
        assert server.end() == 0
    (good,) = kept(tmp_path)
    text = configuration(tmp_path, keep=1).replace("max_size = 1000", "max_size = 95")
    folder = tmp_path / "checkpoints"
    with contextlib.closing(ServiceProcess(tmp_path, text, "--on-mismatch", "config")) as server:
        while not [*folder.glob("*/*fitted*/DONE")]:  # it is there for a moment, so without `eventually`'s pauses
            time.sleep(0.001)
        child = server.child()
        server.process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # as a container's end does; by itself it would clear up
        server.process.wait(60)
    assert kept(tmp_path) == [good]
    with service(tmp_path, configuration(tmp_path, keep=1)) as server:
        assert sizes(server.address) == {"replay": 100}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=12m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["/bin/umount", "-l", str(folder)], check=True)


def test_disk_full_of_leftovers_is_no_obstacle(small_disk: Path) -> None:
    text = configuration(small_disk, keep=1)
    with service(small_disk, text) as server:
        insert(server.address, 1)
        save(server, small_disk)
        server.end(signal.SIGKILL)
    partial = small_disk / "checkpoints" / "incoming" / "2026-01-01T00:00:00+00:00"
    partial.mkdir()
    with contextlib.suppress(OSError), (partial / "chunks.tfrecord").open("wb", 0) as file:
        while True:
            file.write(bytes(MIB))
    assert shutil.disk_usage(small_disk).free == 0
    with service(small_disk, text) as server:
        assert sizes(server.address) == {"replay": 1}
        assert server.end() == 0


def test_save_without_room_fails_loudly_and_the_former_checkpoint_stays(small_disk: Path) -> None:
    text = configuration(small_disk, every_s=1)
    with service(small_disk, text) as server:
        insert(server.address, 1)
        eventually(lambda: server.status()["checkpoints"]["kept"], "a checkpoint of one item")
        fill(server.address, 16)
        eventually(lambda: server.status()["checkpoints"]["failures"] > 3, "saves fail")
        assert server.status()["job_failures"]["checkpoint"] > 3
        assert server.end() == 5
        told = [re.sub(r"\d", "", line) for line in server.log().splitlines() if "checkpoint failed: " in line]
        assert not [line for line, following in itertools.pairwise(told) if line == following]  # each was told once
        assert "Give the disk more room, or lower max_size of the tables; " in told[0]
        assert "could not write the last checkpoint: " in told[-1]
    assert kept(small_disk)
    with service(small_disk, configuration(small_disk)) as server:
        assert sizes(server.address)["replay"] >= 1


@pytest.mark.parametrize(("before_mib", "num_saves", "more_mib"), [(5, 2, 1), (2, 3, 5)], ids=["full", "grown"])
def test_older_checkpoints_make_room_for_the_last_one(
    small_disk: Path, before_mib: int, num_saves: int, more_mib: int
) -> None:
    """The second time, the disk of 12 MiB has room for two more as large as the newest one, but 7 MiB need more."""
    text = configuration(small_disk, keep=3)
    with service(small_disk, text) as server:
        fill(server.address, before_mib)
        for _ in range(num_saves):
            save(server, small_disk)
        fill(server.address, more_mib)
        assert server.end() == 0
        assert "the disk has no room for another checkpoint" in server.log()
    assert restored(small_disk, text) == before_mib + more_mib


def test_want_of_descriptors_ends_nothing(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path, every_s=0.5)) as server:
        insert(server.address, 1)
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        eventually(lambda: "figures failed" in server.log(), "the service has no descriptors left")
        time.sleep(2)  # several rounds of each job
        assert server.process.poll() is None
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        insert(server.address, 2)
        assert server.status()["job_failures"]["figures"] >= 1
        assert server.end() == 0
    assert restored(tmp_path) == 2


def test_last_checkpoint_is_written_though_clients_have_all_descriptors_of_reverb(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path)) as server, contextlib.ExitStack() as connections:
        insert(server.address, 1, 2)
        child = server.child()
        in_use = len(list(Path(f"/proc/{child}/fd").iterdir()))
        resource.prlimit(child, resource.RLIMIT_NOFILE, (in_use + 4, 4096))
        for _ in range(40):
            connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        eventually(lambda: _refuses(server), "Reverb accepts no more connections")
        assert server.end() == 0
    assert restored(tmp_path) == 2


def _refuses(server: ServiceProcess) -> bool:
    try:
        with rw.Client(server.address, timeout_s=2) as client:
            client.server_info()
    except rw.errors.ReverbWriterError:
        return True
    return False


@pytest.mark.parametrize("which", ["last checkpoint", "checkpoint under way"])
def test_reverb_that_is_stopped_in_a_checkpoint_is_continued_when_the_server_ends(tmp_path: Path, which: str) -> None:
    """A busy machine stops it late, too: after the service has looked whether it is stopped."""
    with service(tmp_path, configuration(tmp_path, every_s=0 if which == "last checkpoint" else 1)) as server:
        fill(server.address, 120)
        child = server.child()
        if which == "last checkpoint":
            server.process.send_signal(signal.SIGTERM)
        eventually(lambda: saving(tmp_path), f"the {which} is written", pause_s=0.001)
        os.kill(child, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM if which != "last checkpoint" else signal.SIGHUP)  # not a second one
        assert server.process.wait(150) == 0, server.log()
        assert "the save stands still" not in server.log()
    assert restored(tmp_path) == 120


@pytest.mark.parametrize("asks", ["clock", "client"])
def test_save_under_way_does_not_delay_or_damage_the_last_one(tmp_path: Path, asks: str) -> None:
    with service(tmp_path, configuration(tmp_path, every_s=1 if asks == "clock" else 0)) as server:
        fill(server.address, 120)
        asking = ask_for_a_checkpoint(server) if asks == "client" else None
        eventually(lambda: saving(tmp_path), "a save is under way")
        insert(server.address, 1)  # not in it
        assert server.end() == 0
        if asking:
            asking.join()
        else:
            assert "the checkpoint under way was ended" in server.log()
            assert not re.search("ERROR .*(checkpoint|save)", server.log())  # a probe may fail on a busy machine
    assert restored(tmp_path) == 121


def test_clients_and_the_clock_asking_at_once_lose_no_checkpoint(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path, every_s=1)) as server:
        fill(server.address, 10)
        with rw.Client(server.address, timeout_s=60) as client:
            for _ in range(12):
                # Reverb keeps one: the client's is gone if the service's comes to its end at the same moment.
                with contextlib.suppress(rw.errors.StructureError):
                    client.checkpoint()
        eventually(lambda: server.status()["checkpoints"]["kept"] == 2, "checkpoints are kept")
        assert server.status()["job_failures"] == {}
        assert server.end() == 0
    assert restored(tmp_path) == 10


@pytest.mark.timeout(3600)
def test_probes_and_a_pause_of_reverb_during_a_long_save_begin_no_other_one(tmp_path: Path) -> None:
    text = configuration(tmp_path, every_s=1).replace("max_size = 1000", f"max_size = {LARGE_ITEMS}")
    with service(tmp_path, text) as server:
        fill_with_small_items(server.address, LARGE_MIB, LARGE_ITEMS)
        ended = threading.Event()

        def probe() -> None:
            with rw.Client(server.address, timeout_s=1) as client:  # of less patience than a save takes
                while not ended.wait(0.1):
                    with contextlib.suppress(rw.errors.ReverbWriterError):
                        client.server_info()

        probes = [threading.Thread(target=probe) for _ in range(2)]
        for one in probes:
            one.start()
        eventually(lambda: saving(tmp_path), "a save is under way")
        before, incoming, most = kept(tmp_path), tmp_path / "checkpoints" / "incoming", 0
        child = server.child()
        os.kill(child, signal.SIGSTOP)
        for _ in range(6):  # longer than any client waits for `ServerInfo`, and the container's health check goes on
            server.get("/readyz")
            time.sleep(2)
        os.kill(child, signal.SIGCONT)

        def ends() -> bool:
            nonlocal most
            most = max(most, len(list(incoming.iterdir())))
            return bool(set(kept(tmp_path)) - set(before))

        eventually(ends, "the save comes to its end", patience_s=3000)
        ended.set()
        for one in probes:
            one.join()
        assert most == 1  # none was begun beside it
        assert server.status()["checkpoints"]["failures"] == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(3000) == 0
    assert restored(tmp_path, text) == LARGE_ITEMS


def test_first_answer_of_a_restored_server_may_be_late(tmp_path: Path) -> None:
    text = configuration(tmp_path)
    with service(tmp_path, text) as server:
        insert(server.address, 1)
        fill(server.address, 20)  # so that the restore takes a moment
        assert server.end() == 0
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
        eventually(server.restores, "Reverb reads its checkpoint", pause_s=0.001)
        server.process.send_signal(signal.SIGSTOP)
        insert(server.address, 2)  # Reverb serves, and its service has not heard of it
        eventually(lambda: _waits_for_its_service(server.child()), "Reverb has told that it serves")
        os.kill(server.child(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGCONT)
        eventually(lambda: "the server has not answered for " in server.log(), "the first answer is late")
        assert server.get("/readyz")[0] == 503
        os.kill(server.child(), signal.SIGCONT)
        server.wait_ready()
        assert sizes(server.address) == {"replay": 22}
        assert server.end() == 0


def _waits_for_its_service(child: int) -> bool:
    """Return whether the main thread of the Reverb process sleeps, as it does until the next request."""
    return all(process_state(child) == "S" for _ in range(20))


def test_server_is_alive_while_a_save_moves_and_not_when_it_has_stopped_to(tmp_path: Path) -> None:
    """Two saves at once take all threads of gRPC, so that nothing answers: here, Reverb is stopped in a save."""
    text = configuration(tmp_path) + "\n[http]\nmax_silence_s = 20"
    with service(tmp_path, text) as server:
        fill(server.address, 60)
        asking = ask_for_a_checkpoint(server)
        eventually(lambda: saving(tmp_path), "a save is under way")
        child = server.child()
        os.kill(child, signal.SIGSTOP)
        stopped_at = time.monotonic()
        with (next((tmp_path / "checkpoints" / "incoming").iterdir()) / "more").open("wb", 0) as file:
            while time.monotonic() < stopped_at + 30:
                file.write(b"more")
                assert server.get("/livez") == (200, "alive\n")
                time.sleep(0.1)
        assert server.get("/readyz")[0] == 503
        eventually(lambda: server.get("/livez")[0] == 503, "now that nothing moves, a restart is due")
        os.kill(child, signal.SIGCONT)
        asking.join()
        server.end(signal.SIGKILL)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of one item, as of a disk that does not answer: a read waits for ever. A sound one is kept."""
    with service(tmp_path, configuration(tmp_path)) as server:
        insert(server.address, 1)
        assert server.end() == 0
    (name,) = kept(tmp_path)
    endless = tmp_path / "endless"
    shutil.copytree(tmp_path / "checkpoints" / "kept" / name, endless)
    (endless / "items.tfrecord").unlink()
    os.mkfifo(endless / "items.tfrecord")
    yield endless
    (tmp_path / INCOMING / "items.tfrecord").unlink()
    assert restored(tmp_path) == 1


INCOMING = "checkpoints/incoming/2026-01-01T00:00:00+00:00"
NO_LAST_CHECKPOINT = "ends without a last checkpoint: the thread that keeps checkpoints has stood still for "


def test_thread_that_hangs_while_it_keeps_a_checkpoint_ends_the_server(tmp_path: Path, endless: Path) -> None:
    """Reverb hangs, too, as on the same disk. It is given up first, and then nobody writes a last checkpoint."""
    with service(tmp_path, configuration(tmp_path) + "\n[http]\nmax_silence_s = 2") as server:
        incoming = endless.rename(tmp_path / INCOMING)
        eventually(lambda: _is_read(incoming / "items.tfrecord"), "the thread reads it")
        os.kill(server.child(), signal.SIGSTOP)
        assert server.process.wait(150) == 6
        assert "the server ends itself: the server has " in server.log()  # been silent
        assert NO_LAST_CHECKPOINT in server.log()


def test_thread_that_hangs_in_the_last_checkpoint_ends_the_server(tmp_path: Path, endless: Path) -> None:
    with service(tmp_path, configuration(tmp_path) + "\n[http]\nmax_silence_s = 3") as server:
        server.process.send_signal(signal.SIGTERM)
        endless.rename(tmp_path / INCOMING)
        assert server.process.wait(150) == 5
        assert NO_LAST_CHECKPOINT in server.log()


def _is_read(pipe: Path) -> bool:
    """Return whether a process reads a named pipe; from then on its read waits until this process ends."""
    with contextlib.suppress(OSError):
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        return True
    return False


PHASES = ("start", "restore", "serve", "checkpoint", "drain", "last checkpoint")


@pytest.fixture(scope="module")
def sixty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of 60 items of 1 MiB."""
    tmp_path = tmp_path_factory.mktemp("sixty")
    with service(tmp_path, configuration(tmp_path)) as server:
        fill(server.address, 60)
        assert server.end() == 0
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["service", "Reverb"])
def test_kill_in_any_phase_leaves_the_newest_complete_checkpoint(
    tmp_path: Path, sixty: Path, phase: str, victim: str
) -> None:
    text = configuration(tmp_path)
    shutil.copytree(sixty, tmp_path / "checkpoints")
    with contextlib.closing(ServiceProcess(tmp_path, text)) as server:
        if phase == "start":
            eventually(functools.partial(_has_reverb, server), "Reverb's process is there")
        elif phase == "restore":
            eventually(lambda: "%" in server.get("/readyz")[1], "it restores")
        else:
            server.wait_ready()
            insert(server.address, 1)
            child = server.child()
            if phase == "checkpoint":
                with contextlib.suppress(rw.errors.ReverbWriterError), rw.Client(server.address) as client:
                    client.checkpoint(0.2)
                eventually(lambda: saving(tmp_path), "a save is under way")
            elif phase == "drain":
                os.kill(child, signal.SIGSTOP)  # so that it stays in this phase
            if phase in ("drain", "last checkpoint"):
                server.process.send_signal(signal.SIGTERM)
                eventually(lambda: "refusing new work" in server.log(), "it drains")
            if phase == "last checkpoint":
                eventually(lambda: saving(tmp_path), "the last checkpoint is under way")
        child = server.child()
        os.kill(server.process.pid if victim == "service" else child, signal.SIGKILL)
        code = server.process.wait(60)
        assert code == (-signal.SIGKILL if victim == "service" else 4), server.log()
        eventually(lambda: process_state(child) in "ZX", "Reverb's process ends, too")
    assert restored(tmp_path) == 60


def _has_reverb(server: ServiceProcess) -> bool:
    with contextlib.suppress(AssertionError, OSError):  # no child yet, or one that looks for a library
        return b"reverb_writer_server.reverb.child" in Path(f"/proc/{server.child()}/cmdline").read_bytes()
    return False


def test_next_server_tells_how_the_one_before_has_ended(tmp_path: Path) -> None:
    before = "stopped"  # the first server has none before it
    for how in ("killed", "died", "unsaved", "stopped", ""):
        with service(tmp_path, configuration(tmp_path)) as server:
            assert server.metrics()[f'reverb_previous_end{{how="{before}"}}'] == 1
            if how == "stopped":
                assert server.end() == 0
            elif how == "unsaved":
                resource.prlimit(server.child(), resource.RLIMIT_FSIZE, (0, -1))  # as if its disk were full
                assert server.end() == 5
            elif how:
                os.kill(server.process.pid if how == "killed" else server.child(), signal.SIGKILL)
                server.process.wait(60)
            before = how


def test_sidecar_of_the_manual_copies_each_checkpoint(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[3] / "docs/reference/configuration.md").read_text()
    (script,) = re.findall(r"```sh\n(.*?)```", manual, re.DOTALL)
    second = tmp_path / "second"
    second.mkdir()
    script = script.replace("/data/checkpoints", str(tmp_path / "checkpoints")).replace("/mnt/second", str(second))
    text = configuration(tmp_path, keep=1)
    copies = []
    with service(tmp_path, text) as server:
        for number in range(3):
            insert(server.address, number)
            copies.append(save(server, tmp_path))
            for _ in range(2):  # the second time there is nothing to copy
                subprocess.run(["/bin/sh", "-euc", script], check=True, timeout=60)
    assert sorted(path.name for path in second.iterdir()) == copies
    inspected = run_command("checkpoints", "inspect", *(str(second / name) for name in copies))
    assert inspected.returncode == 0
    sound = [line for line in inspected.stdout.splitlines() if ": sound" in line]
    assert [line.split(": ")[1].split(" in ")[0] for line in sound] == [f"sound, {count} items" for count in (1, 2, 3)]
