"""Probes, metrics and log tell what is true when something is short, or Reverb is silent; memory is as estimated."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from certificates import OPENSSL, make_identity
from service_process import ServiceProcess, configuration, insert, kept, service, sizes
from waiting import eventually

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TABLE = "[tables.replay]\nmax_size = 1000\n"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"


@contextlib.contextmanager
def idle_connections(port: int, count: int, greeting: bytes = b"") -> Iterator[None]:
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            one.sendall(greeting)
        yield


def test_probes_and_metrics_tell_that_reverb_is_stopped_and_that_it_goes_on(tmp_path: Path) -> None:
    with service(tmp_path, TABLE + "[http]\nmax_silence_s = 12") as server:
        insert(server.address, 1)
        eventually(lambda: server.metrics()['reverb_table_size{table="replay"}'] == 1, "the item is counted")
        os.kill(server.child(), signal.SIGSTOP)
        try:
            eventually(lambda: server.get("/readyz")[0] == 503, "it is not ready")
            assert server.get("/readyz")[1].startswith("the server has not answered for ")
            found = server.metrics()
            assert found["reverb_ready"] == 0
            assert not [name for name in found if name.startswith("reverb_table_")]  # old figures are not those of now
            assert found["reverb_answer_timestamp_seconds"] > found["reverb_start_time_seconds"]
            assert not server.status()["ready"]
            eventually(lambda: server.get("/livez")[0] == 503, "a restart is due")
            assert server.get("/livez")[1].endswith("http.max_silence_s is 12\n")
            assert " ERROR   the server has not answered for " in server.log()
        finally:
            os.kill(server.child(), signal.SIGCONT)
        eventually(lambda: server.get("/readyz") == (200, "serving\n"), "it is ready again")
        assert server.get("/livez") == (200, "alive\n")
        assert server.metrics()["reverb_ready"] == 1


def test_descriptor_limit_is_raised_and_told(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # of what is started now
    try:
        server = ServiceProcess(tmp_path, TABLE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.closing(server):
        server.wait_ready()
        found = server.metrics()
        assert (found["process_max_fds"], found["reverb_process_max_fds"]) == (hard, hard)
        assert psutil.Process(server.child()).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
        before = found["reverb_process_open_fds"]
        with idle_connections(server.port, 1000, HTTP2_PREFACE):  # as many idle actors
            eventually(lambda: server.metrics()["reverb_process_open_fds"] >= before + 1000, "all are accepted")
            insert(server.address, 1)
            assert server.get("/readyz")[0] == 200
            assert server.end() == 0


def test_server_that_accepts_no_more_connections_says_so_and_ends_with_its_last_checkpoint(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path) + "\n[http]\nmax_silence_s = 12") as server:
        insert(server.address, 1)
        psutil.Process(server.child()).rlimit(psutil.RLIMIT_NOFILE, (96, 96))
        with idle_connections(server.port, 136):
            eventually(lambda: server.metrics()["reverb_process_open_fds"] == 96, "there are no more")
        eventually(lambda: server.get("/readyz")[0] == 503, "it is not ready, though the connections are closed")
        assert server.get("/readyz")[1].startswith("the server has accepted no new connection for ")
        assert server.metrics()["reverb_ready"] == 0
        assert " ERROR   E" in server.log()
        assert "Failed accept4: Too many open files" in server.log()
        eventually(lambda: server.get("/livez")[0] == 503, "a restart is due")
        reason = "ERROR   the server ends itself: the server has accepted no new connection for "
        eventually(lambda: reason in server.log(), "nobody acts on /livez, as under Docker")
        server.process.send_signal(signal.SIGTERM)  # the first signal, so the last checkpoint is still written
        assert server.process.wait(150) == 6
    with service(tmp_path, configuration(tmp_path)) as server:
        assert sizes(server.address) == {"replay": 1}


@pytest.mark.parametrize("greeting", [b"", b"GET /readyz HTTP/1.1\r\n"], ids=["silent", "half a request"])
def test_idle_connections_of_http_shut_out_no_probe_and_take_few_descriptors(tmp_path: Path, greeting: bytes) -> None:
    with service(tmp_path, configuration(tmp_path)) as server:
        insert(server.address, 1)
        with idle_connections(server.http_port, 2000, greeting):
            for path in ("/livez", "/readyz", "/metrics", "/status.json", "/"):
                assert server.get(path)[0] == 200
            assert server.metrics()["process_open_fds"] < 400
            assert psutil.Process(server.process.pid).num_threads() < 100
            insert(server.address, 1)
            assert server.end() == 0
        assert "complete" not in server.log()
    assert len(kept(tmp_path)) == 1


def test_checkpoint_that_was_removed_by_hand_is_no_longer_counted_and_breaks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/kept"
    with service(tmp_path, configuration(tmp_path)) as server:
        with rw.Client(server.address) as client:
            for count in (1, 2):
                client.insert(np.zeros(3), {"replay": 1.0})
                client.checkpoint()
                eventually(lambda n=count: server.status()["checkpoints"]["kept"] == n, "it is kept")  # type: ignore[misc]
        older, newest = kept(tmp_path)
        assert server.status()["checkpoints"]["name"] == newest
        shutil.rmtree(folder / newest)
        assert server.get("/metrics")[0] == server.get("/status.json")[0] == 200
        eventually(lambda: server.metrics()["reverb_checkpoints_kept"] == 1, "the disk is looked at")
        assert server.status()["checkpoints"]["name"] == older
        shutil.rmtree(folder / older)
        eventually(lambda: server.metrics()["reverb_checkpoints_kept"] == 0, "the disk is looked at")
        assert "reverb_checkpoint_timestamp_seconds" not in server.metrics()
        assert server.status()["checkpoints"]["age_s"] is None
        assert server.end() == 0


def test_kill_for_want_of_memory_is_named(tmp_path: Path) -> None:
    with memory_cgroup() as limit, service(tmp_path, "[tables.replay]") as server:
        limit(server.child(), psutil.Process(server.child()).memory_info().rss + (64 << 20))
        with rw.Client(server.address, timeout_s=60) as client, contextlib.suppress(rw.errors.ReverbWriterError):
            while server.process.poll() is None:
                client.insert(np.random.default_rng(0).random((1, 1_000_000)), {"replay": 1.0}, timeout_s=5)
        assert server.process.wait(60) == 4
        assert "the Reverb process has died of SIGKILL: the kernel ended it because memory ran out." in server.log()


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Callable[[int, int], None]]:
    """Yield a function that limits the memory of a process; skip where that is not allowed."""
    root = Path("/sys/fs/cgroup")
    first = (root / "memory").is_dir()
    folder = (root / "memory" if first else root) / f"reverb-writer-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if first else "memory.max")
    try:
        folder.mkdir()
        limit.write_text(limit.read_text())  # there is a controller of memory
    except OSError as error:
        pytest.skip(f"this process may not make a control group: {error}")

    def apply(process: int, size: int) -> None:
        limit.write_text(str(size))
        (folder / "cgroup.procs").write_text(str(process))

    try:
        yield apply
    finally:
        eventually(lambda: not (folder / "cgroup.procs").read_text(), "its processes have ended")
        folder.rmdir()


STREAMS_BYTES = 36 << 20  # that the server takes for a stream, whatever is in its tables
TIMES_FILLED = 2


@pytest.mark.parametrize("seed", range(4))
def test_full_table_takes_about_what_was_estimated(tmp_path: Path, seed: int) -> None:
    from reverb_writer_server.config.schema import load

    chance = random.Random(seed)  # noqa: S311  # no secrets
    length = chance.randint(1, 24)
    stride = chance.randint(1, length)
    num_columns, column_bytes = chance.choice([(8, 64), (2, 2000), (5, 100)])
    episode = length + chance.randint(0, 100)
    per_item = 5000 + stride * num_columns * column_bytes
    max_size = 100_000_000 // per_item
    text = f"""
        [tables.replay]
        max_size = {max_size}
        sequence_length = {length}
        stride_length = {stride}
        episode_length = {episode}
        signature = {{{", ".join(f'c{number} = "uint8[{column_bytes}]"' for number in range(num_columns))}}}
    """
    noise = np.random.default_rng(seed).integers(0, 256, (1024, num_columns, column_bytes), np.uint8)
    with service(tmp_path, text) as server:
        reverb = psutil.Process(server.child())
        before = reverb.memory_info().rss
        windows = (episode - length) // stride + 1
        with rw.TrajectoryObserver(
            server.address, "replay", sequence_length=length, stride_length=stride, timeout_s=60
        ) as observer:
            for _ in range(TIMES_FILLED * max_size // windows + 1):
                for number in range(episode):
                    observer({f"c{column}": noise[number % 1024, column] for column in range(num_columns)})
                observer.reset()
        with rw.Client(server.address) as client:
            eventually(lambda: client.server_info()["replay"].current_size == max_size, "the table is full")
        taken = reverb.memory_info().rss - before
    (table,) = load(tmp_path / "server.toml", {}).tables
    said = table.estimate().total_bytes
    assert said is not None
    assert 0.8 * taken <= said + STREAMS_BYTES <= 1.8 * taken


def test_crossing_the_limit_writes_a_checkpoint_and_fires_the_alert_and_refuses_nobody(tmp_path: Path) -> None:
    limit = 700 << 20
    queue = '[tables.q]\nrate_limiter = "queue"\nmax_size = 100000\n'
    text = configuration(tmp_path, queue) + f"[memory]\nalert_bytes = {limit}\n"
    with service(tmp_path, text) as server:
        assert "\nreverb_memory_alert 0.0\n" in server.get("/metrics")[1]
        with rw.Client(server.address, timeout_s=60) as writer:
            held = _fill_until(writer, lambda: "\nreverb_memory_alert 1.0\n" in server.get("/metrics")[1])
        eventually(lambda: server.status()["checkpoints"]["kept"] == 1, "a checkpoint is written")
        assert "ERROR   the server takes" in server.log()
        assert "more than memory.alert_bytes = 700.0 MiB; a checkpoint is written." in server.log()
        assert server.get("/readyz") == (200, "serving\n")
        with rw.Client(server.address, timeout_s=60) as late:  # who comes above the limit is served, too
            late.insert(np.zeros(3), {"q": 1.0})
            assert len(list(late.sample("q", held + 1))) == held + 1
            late.insert(np.zeros(3), {"q": 1.0})
            late.reset("q")
            assert late.server_info()["q"].current_size == 0
        assert server.status()["checkpoints"]["kept"] == 1  # one for a crossing, however long it lasts
        assert server.status()["job_failures"] == {}
        assert server.end() == 0


def _fill_until(writer: rw.Client, is_enough: Callable[[], bool]) -> int:
    """Insert items of 4 MB; return how many."""
    noise = np.random.default_rng(0).random((1, 500_000))
    count = 0
    while not is_enough():
        writer.insert(noise, {"q": 1.0})
        count += 1
    return count


HEALTH_CHECK = Path(__file__).parents[3] / "docker/healthcheck"


def check_health(port: int) -> tuple[int, str]:
    environment = {"http_proxy": "http://127.0.0.1:1", "REVERB_WRITER__HTTP__PORT": str(port)}
    done = subprocess.run([HEALTH_CHECK], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="the health check is a script of bash")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1"])  # noqa: S104  # of a server that runs for a second
def test_http_listens_where_it_is_told_and_log_and_health_check_know_where(tmp_path: Path, host: str) -> None:
    with service(tmp_path, TABLE + f'[http]\nhost = "{host}"') as server:
        port = server.http_port
        for one in {"::": ("127.0.0.1", "[::1]"), "::1": ("[::1]",)}.get(host, ("127.0.0.1",)):
            with urllib.request.urlopen(f"http://{one}:{port}/readyz", timeout=60) as reply:
                assert reply.read() == b"serving\n"
        named = {"::1": "[::1]", "127.0.0.1": "127.0.0.1"}.get(host, "localhost")
        everywhere = "" if host in named else ", and at this machine's other addresses"
        line = f"status page, /metrics, /livez and /readyz at http://{named}:{port}/{everywhere}\n"
        assert line in server.log()
        assert check_health(port) == (0, "serving")
        os.kill(server.child(), signal.SIGSTOP)
        eventually(lambda: check_health(port)[0] == 1, "Reverb does not answer")
        assert check_health(port)[1].startswith("the server has not answered for ")
        os.kill(server.child(), signal.SIGCONT)
        assert server.end() == 0
        assert check_health(port) == (1, f"nothing listens at port {port}")


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_end_of_the_gateways_certificate_is_told_once_it_can_be_read(tmp_path: Path) -> None:
    identity = make_identity(tmp_path, "server")  # for a day
    both = tmp_path / "server.pem"  # as HAProxy wants it
    name, failures = "reverb_certificate_expiry_timestamp_seconds", 'reverb_job_failures_total{job="certificate"}'
    with service(tmp_path, TABLE + f'[gateway]\ncertificate = "{both}"') as server:
        eventually(lambda: server.metrics()[failures] > 0, "the file that does not exist is a failure")
        assert name not in server.metrics()
        both.write_text(identity.private_key.read_text() + identity.certificate.read_text())
        left_s = eventually(lambda: server.metrics().get(name), "the file is read again") - time.time()
        assert 86400 - 600 < left_s <= 86400
        assert server.log().count("certificate failed: ") == 1
