"""`reverb-writer status`: figures, causes and exit codes, on real servers."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from server_process import HostedServer
from service_process import free_port

import reverb_writer as rw

pytest.importorskip("click", reason="the extra `cli` is not installed")
pytest.importorskip("rich", reason="the extra `cli` is not installed")

StartServer = Callable[..., HostedServer]
COMMAND = [sys.executable, "-m", "reverb_writer.cli", "status"]


def status(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


@contextlib.contextmanager
def blocked_writer(address: str, table: str) -> Iterator[None]:
    """Insert one item more than the table lets in, in the background."""
    with rw.Client(address) as client:
        waiting = threading.Thread(target=lambda: client.insert(np.zeros(1), {table: 1.0}, timeout_s=60))
        waiting.start()
        try:
            yield
        finally:
            list(client.sample(table, 1))  # lets it in
            waiting.join()


def test_healthy_server_is_shown_with_exit_code_0(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay", 50, rate_limiter=rw.MinSize(5)))
    with rw.Client(server.address) as client:
        client.insert(np.zeros(1), {"replay": 1.0})
    done = status(server.address, "--why")
    assert done.returncode == 0, done.stderr
    assert "1 / 50" in done.stdout
    assert "healthy: no side of any table stands still" in done.stdout
    words = " ".join(done.stdout.split())
    assert "inserts never wait. samples have to wait. The table holds 1 items; sampling starts at 5. 4 inserts" in words


def test_blocked_side_is_named_with_exit_code_1(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("queue", 2))
    with rw.Client(server.address) as client:
        for _ in range(2):
            client.insert(np.zeros(1), {"queue": 1.0})
    with blocked_writer(server.address, "queue"):
        shown, machine = status(server.address), status(server.address, "--json")
    assert (shown.returncode, machine.returncode) == (1, 1)
    words = " ".join(shown.stdout.split())
    assert "table `queue`: inserts blocked for 1 s." in words
    assert "1 sample lets the next insert in: start the learner, or raise max_diff." in words
    told = json.loads(machine.stdout)
    assert told["health"] == "blocked"
    assert [(one["table"], one["side"]) for one in told["blocked"]] == [("queue", "inserts")]
    assert told["tables"]["queue"]["size"] == 2
    assert told["tables"]["queue"]["insert_room"] == 0


def test_missing_server_is_exit_code_2() -> None:
    address = f"localhost:{free_port()}"
    shown, machine = status(address, "--timeout", "0.5"), status(address, "--timeout", "0.5", "--json")
    assert (shown.returncode, machine.returncode) == (2, 2)
    assert f"unreachable: no Reverb server at {address}" in shown.stderr
    assert json.loads(machine.stdout)["health"] == "unreachable"


def test_watch_goes_on_until_it_is_interrupted(replay_server: StartServer) -> None:
    server = replay_server()
    line = [*COMMAND, server.address, "--watch", "--json", "--interval", "0.1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert [look["health"] for look in looks] == ["healthy"] * 3


def test_address_that_is_none_is_said_in_a_line() -> None:
    done = status("nowhere")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: `address` must be")
