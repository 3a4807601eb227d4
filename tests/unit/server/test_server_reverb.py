"""The process of Reverb: jemalloc, the levels of its lines, the connections that it drains, and what is counted."""

from __future__ import annotations

import contextlib
import ctypes.util
import itertools
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from reverb_writer_server.checkpoints.folder import Kept
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.metrics import exposition
from reverb_writer_server.observability.state import Job, ServiceState
from reverb_writer_server.observability.systemd import _lines
from reverb_writer_server.reverb.sockets import Drain, Endpoint, connections_to, restrict_to_loopback
from reverb_writer_server.reverb.supervisor import ReverbProcess, level_of, with_jemalloc
from reverb_writer_server.service import is_high
from reverb_writer_server.turn import Turn

LIBRARY = ctypes.util.find_library("jemalloc")


@pytest.mark.parametrize(
    ("environment", "added"),
    [
        ({}, LIBRARY and {"LD_PRELOAD": LIBRARY}),
        ({"LD_PRELOAD": ""}, {}),
        ({"LD_PRELOAD": "/lib/libtcmalloc.so"}, {}),
    ],
)
def test_library_of_the_system_is_preloaded_unless_another_or_none_is_chosen(
    environment: dict[str, str], added: dict[str, str] | None
) -> None:
    before = {"HOME": "/root", **environment}
    assert with_jemalloc(before) == {**before, **(added or {})}


@pytest.mark.skipif(LIBRARY is None, reason="the system has no jemalloc")
def test_reverb_process_has_it_loaded_and_this_one_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    process = ReverbProcess()
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        loaded = ""
        while process.alive() and "libc.so" not in loaded:  # which is loaded after what is preloaded
            loaded = maps.read_text()
        assert "jemalloc" in loaded
    finally:
        process.kill()
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[reverb/cc/platform/default/server.cc:71] Started replay server on port 40963", logging.DEBUG),
        ("[reverb/cc/platform/tfrecord_checkpointer.cc:162]  Initializing TFRecordCheckpointer in /d.", logging.DEBUG),
        ("[reverb/cc/reverb_service_impl.cc:164] Stored checkpoint to /data/incoming/2026-08-01", logging.DEBUG),
        ("2026-11-22 05:34:12.862515: I tensorflow/core/platform/cpu_feature_guard.cc:182] This", logging.DEBUG),
        ("I1122 05:34:12.862515734   32492 server_builder.cc:70] hello", logging.DEBUG),
        ("[reverb/cc/table.cc:517] Table worker encountered a fatal error: INTERNAL", logging.ERROR),
        ("[reverb/cc/chunker.cc:71] something that no version has said yet", logging.WARNING),
        ("2026-11-22 05:34:12.862515: W tensorflow/core/x.cc:182] beware", logging.WARNING),
        ("terminate called after throwing an instance of 'std::bad_alloc'", logging.WARNING),
        ("E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Too many open", logging.ERROR),
        ("[reverb/cc/rate_limiter.cc:71] Check failed: min_size > 0 (0 vs. 0)", logging.ERROR),
        ("Fatal Python error: Segmentation fault", logging.ERROR),
    ],
)
@pytest.mark.parametrize("drains", [False, True])
def test_line_has_the_level_of_what_it_says(line: str, level: int, drains: bool) -> None:
    assert level_of(line, drains=drains) == level


def test_listener_that_fails_is_expected_only_where_it_was_shut_down() -> None:
    line = "E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Invalid argument"
    assert level_of(line, drains=True) == logging.DEBUG
    assert level_of(line, drains=False) == logging.ERROR


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server's socket on all addresses of the machine."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as one:
        yield one


def connect(listener: socket.socket, source: tuple[str, int]) -> tuple[socket.socket, socket.socket]:
    """Return the client's and the server's end of a connection from that address."""
    port = listener.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port), 60, source_address=source)
    client.settimeout(60)
    server, _ = listener.accept()
    return client, server


def test_connection_is_kept_by_its_address_and_not_by_its_port_alone(listener: socket.socket) -> None:
    with contextlib.ExitStack() as ends:
        ours, served = map(ends.enter_context, connect(listener, ("127.0.0.1", 0)))
        own_port = ours.getsockname()[1]
        other, _ = map(ends.enter_context, connect(listener, ("127.0.0.2", own_port)))
        port = listener.getsockname()[1]
        assert connections_to(port) == {Endpoint("127.0.0.1", own_port), Endpoint("127.0.0.2", own_port)}
        assert Drain(port).end_connections({Endpoint("127.0.0.1", own_port)}) == 1
        assert other.recv(1) == b""  # its end
        served.sendall(b"x")
        assert ours.recv(1) == b"x"
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), 60)


def test_port_that_is_restricted_to_this_machine_loses_its_connections_and_no_other_does(
    listener: socket.socket,
) -> None:
    with contextlib.ExitStack() as ends:
        other = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        ours, kept = (tuple(map(ends.enter_context, connect(one, ("127.0.0.1", 0)))) for one in (listener, other))
        restrict_to_loopback(listener.getsockname()[1])
        assert ours[0].recv(1) == b""
        kept[1].sendall(b"x")
        assert kept[0].recv(1) == b"x"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b"lo\0"


def test_draining_needs_no_descriptor(listener: socket.socket) -> None:
    with contextlib.ExitStack() as ends:
        client, _ = map(ends.enter_context, connect(listener, ("127.0.0.1", 0)))
        drain = Drain(listener.getsockname()[1])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = ends.enter_context(socket.socket()).fileno()  # the lowest that is free
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    ends.enter_context(socket.socket())
            ended = drain.end_connections(())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ended == 1
        assert client.recv(1) == b""


PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


@pytest.mark.parametrize("job", get_args(Job))
def test_failures_of_every_job_are_counted_from_zero_and_described(job: Job) -> None:
    state = ServiceState()
    assert f'reverb_job_failures_total{{job="{job}"}} 0.0' in exposition(state).decode()
    state.failures[job] += 1
    assert f'reverb_job_failures_total{{job="{job}"}} 1.0' in exposition(state).decode()
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| `reverb_job_failures_total`"))
    assert f"`{job}`" in row


# The state of the service: its age, what systemd hears of it, and when memory counts as high.


MORE_TIME = "EXTEND_TIMEOUT_USEC=30000000"


@pytest.mark.parametrize(
    ("phase", "is_alive", "expected"),
    [
        ("starting", True, ["STATUS=starting", "WATCHDOG=1", MORE_TIME]),
        ("serving", True, ["STATUS=serving", "WATCHDOG=1", "READY=1"]),
        ("draining", True, ["STATUS=draining", "WATCHDOG=1", "STOPPING=1", MORE_TIME]),
        ("serving", False, ["STATUS=the service's loop has not run for 31 s", "READY=1"]),
        ("draining", False, ["STATUS=the service's loop has not run for 31 s", "STOPPING=1"]),
    ],
)
def test_systemd_hears_the_phase_and_gives_more_time_only_to_a_service_that_lives(
    phase: str, is_alive: bool, expected: list[str]
) -> None:
    state = ServiceState()
    state.phase = phase
    state._loop_ran_at -= 0 if is_alive else 31
    assert list(_lines(state)) == expected


def test_work_hangs_after_ten_times_the_silence_that_is_allowed_and_never_without_a_limit() -> None:
    state = ServiceState()
    state._work_ran_at -= 50
    for max_silence_s, hangs in ((0.0, False), (4.0, True), (6.0, False)):
        state.max_silence_s = max_silence_s
        assert state.work_hangs() is hangs


def test_age_of_a_checkpoint_is_not_negative_when_the_clock_was_set_back() -> None:
    state = ServiceState()
    assert state.snapshot()["checkpoints"]["age_s"] is None
    for written_s_ago, least in ((100.0, 100.0), (-100.0, 0.0)):
        state.kept = Kept(1, "newest", 5, time.time() - written_s_ago)
        assert least <= state.snapshot()["checkpoints"]["age_s"] < least + 100


def test_turn_of_a_server_that_claims_nothing_is_never_over() -> None:
    turn = Turn(ServerConfig(), None, ServiceState())
    assert (turn.is_claimed, turn.is_over, turn.must_end_at_once(None)) == (False, False, False)


@pytest.mark.parametrize(
    ("now_bytes", "crosses"),
    [
        ([90, 100, 101, 102], [False, False, True, False]),
        ([101, 86, 101], [True, False, False]),  # it swings about the limit: once
        ([101, 85, 101, 85, 86], [True, False, True, False, False]),
        ([101, 0, 300], [True, False, True]),
    ],
)
def test_limit_is_crossed_again_when_memory_has_fallen_to_85_percent_of_it(
    now_bytes: list[int], crosses: list[bool]
) -> None:
    states = [False]
    for now in now_bytes:
        states.append(is_high(now, 100, was_high=states[-1]))
    assert [now and not before for before, now in itertools.pairwise(states)] == crosses
