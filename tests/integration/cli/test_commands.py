"""Commands of `reverb-writer`, as a person runs them: `status` on real servers, `reset`, help, exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner, Result
from kinds import by_socket
from reading import Serve
from server_process import StartServer
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.cli.status import command

pytestmark = by_socket

COMMAND = [sys.executable, "-m", "reverb_writer.cli", "status"]


def status(*arguments: str, columns: str = "80") -> Result:
    """Run the command in this process: another one takes seconds to start on a busy machine."""
    return CliRunner().invoke(command, arguments, env={"COLUMNS": columns})


def words_of(done: Result) -> str:
    """Return what a command says, as one line."""
    return " ".join(done.stdout.split())


@contextlib.contextmanager
def blocked_writer(address: str, table: str) -> Iterator[None]:
    """Insert one item more than the table lets in, in the background."""
    with rw.Client(address) as client, soon(lambda: client.insert(np.zeros(1), {table: 1.0}, timeout_s=60), 0):
        yield
        list(client.sample(table, 1))  # lets it in


def test_server_at_which_nobody_waits_is_shown_with_exit_code_0(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", 50, rate_limiter=rw.MinSize(5)))
    client.insert(np.zeros(1), {"replay": 1.0})
    done = status(client.address, "--why")
    assert done.exit_code == 0, done.stderr
    assert "1 / 50" in done.stdout
    assert "no inserts or samples are blocked now, but new ones would wait: samples of `replay`" in words_of(done)
    assert "healthy" not in done.stdout
    assert (
        "Inserts never wait. Samples would wait now. Table `replay` has 1 items; its rate limiter waits for 4 more "
        "(min_size_to_sample 5). 4 inserts"
    ) in words_of(done)


def test_server_that_blocks_nothing_is_healthy(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", 50))
    client.insert(np.zeros(1), {"replay": 1.0})
    done = status(client.address, "--why")
    assert done.exit_code == 0, done.stderr
    assert "healthy: no inserts or samples are blocked" in done.stdout
    assert "would wait" not in done.stdout


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_no_figure_is_cut_however_narrow_the_terminal(replay_server: StartServer, columns: str) -> None:
    ratio = rw.SampleToInsertRatio(32.0, 100_000, 1_000_000.0)
    server = replay_server(
        rw.TableConfig("transitions_of_all_actors", 100_000_000, rate_limiter=ratio),
        rw.TableConfig("replay", 1_000_000),
    )
    shown = status(server.address, columns=columns).stdout
    assert "…" not in shown
    for figure in ("0 / 100,000,000", "0 / 1,000,000", "131,250", "transitions_of_all_actors"):
        assert figure in shown
    for heading in ("size", "fill", "inserts/s", "samples/s", "ratio", "wanted", "may insert", "may sample"):
        assert heading in shown


def test_blocked_side_is_named_with_exit_code_1(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("queue", 2))
    for _ in range(2):
        client.insert(np.zeros(1), {"queue": 1.0})
    with blocked_writer(client.address, "queue"):
        shown, machine = status(client.address), status(client.address, "--json")
    assert (shown.exit_code, machine.exit_code) == (1, 1)
    assert "table `queue`: inserts have stood still for 1 s or more." in words_of(shown)
    assert "1 sample unblocks the next insert; so does a larger `max_size`." in words_of(shown)
    told = json.loads(machine.stdout)
    assert told["health"] == "blocked"
    assert [(one["table"], one["side"]) for one in told["blocked"]] == [("queue", "inserts")]
    assert (told["tables"]["queue"]["size"], told["tables"]["queue"]["insert_room"]) == (2, 0)


@pytest.mark.only_server("reverb", "a local server drops what an actor that has gone was waiting to insert")
def test_insert_of_an_actor_that_has_died_is_told_as_what_it_is(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("queue", 2))
    actor = (
        "import reverb_writer as rw\n"
        f"observer = rw.TrajectoryObserver({server.address!r}, 'queue', 1, max_delay_s=0.01)\n"
        "for number in range(3):\n"
        "    observer({'number': number})\n"
        "observer.flush(timeout_s=60)\n"
    )
    with (
        subprocess.Popen([sys.executable, "-c", actor], stderr=subprocess.DEVNULL) as process,
        rw.Client(server.address) as client,
    ):
        waits = "waiting_for_sampling"
        eventually(lambda: client.server_info()["queue"].worker_time_ms[waits] > 0, "the third item waits")
        process.kill()
    words = words_of(status(server.address, "--why"))
    for claim in ("start the learner", "start the actors", "blocked for"):
        assert claim not in words
    assert "its actor may have ended" in words  # the server keeps its insert


def test_watch_goes_on_until_it_is_interrupted_and_outlasts_a_server_that_does_not_answer(
    lone_server: StartServer,
) -> None:
    server = lone_server()
    line = [*COMMAND, server.address, "--watch", "--json", "--interval", "0.1", "--timeout", "0.5"]
    with (
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process,
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as interrupted,
    ):
        assert process.stdout is not None
        assert interrupted.stdout is not None
        assert json.loads(interrupted.stdout.readline())["health"] == "healthy"
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(60) == 0
        lines = (json.loads(line)["health"] for line in process.stdout)
        assert next(lines) == next(lines) == "healthy"
        server.process.pause()
        assert "unreachable" in lines  # reads up to it
        server.process.resume()
        assert "healthy" in lines
        server.process.kill()
        assert "unreachable" in lines
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 2


def test_shard_that_blocks_is_named(lone_server: StartServer) -> None:
    tables = (rw.TableConfig.queue("queue", 1), rw.TableConfig("replay"))
    free, blocked, lost = (lone_server(*tables) for _ in range(3))
    with rw.Client(blocked.address) as client:
        client.insert(np.zeros(1), {"queue": 1.0})
    with blocked_writer(blocked.address, "queue"):
        done = status(free.address, blocked.address, "--why")
        assert done.exit_code == 1, done.stderr
        assert f"shard {blocked.address} blocks: table `queue`, inserts" in words_of(done)
        assert f"shard {free.address} blocks" not in words_of(done)
        assert re.search(rf"{free.address} (queue|replay) size 0 / 1", words_of(done))  # each on its own
        lost.process.kill()
        done = status(free.address, blocked.address, lost.address, "--json", "--timeout", "1")
        assert done.exit_code == 2, done.stderr
        states = [json.loads(line) for line in done.stdout.splitlines()]
        healths = {free.address: "healthy", blocked.address: "blocked", lost.address: "unreachable"}
        assert {state["address"]: state["health"] for state in states} == healths
        done = status(free.address, lost.address, "--timeout", "1")
        assert f"shard {lost.address} is unreachable" in words_of(done)
    done = status(free.address, blocked.address)
    assert done.exit_code == 0
    assert "none of 2 shards is blocked" in words_of(done)
