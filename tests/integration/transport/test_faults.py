"""Servers that are killed, paused, late or changed: an observer goes on, or says what is wrong.

If `a` items are acknowledged when their server is killed, the new server must get all others, in order, each once.
Those `a` are nearly always the first ones, but Reverb acknowledges in several threads, so none may be told by number.
Observers that keep confirmed items would send them again (`writing/test_kept_items`), so the first one keeps none.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from forwarder import Forwarder
from kinds import client_by_socket
from numbered import write_numbers
from reading import column_at, fifo, pairs
from server_process import HostedServer, StartServer
from threads import soon
from waiting import eventually

import reverb_writer as rw

_MANY = 16_384  # items that may be unconfirmed: more than a test writes while there is no server


def are_all_but(num_missing: int, found: list[Any], windows: list[Any]) -> bool:
    """Return whether so many windows are missing, and the others are there in order, each once, the last ones, too."""
    rest = iter(windows)
    in_order = all(window in rest for window in found)  # `in` takes from `rest` up to the window
    return in_order and len(found) == len(windows) - num_missing and found[-100:] == windows[-100:]


def kill_and_count(server: HostedServer, observer: Any) -> int:
    """Kill the server; return how many items it had acknowledged."""
    before = observer.stats().reconnects
    server.process.kill()
    eventually(lambda: observer.stats().reconnects > before)  # all that it said has been heard
    return int(observer.stats().acknowledged_items)


def test_server_that_is_killed_again_and_again_gets_what_it_had_not_acknowledged(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = lone_server(fifo("replay"))
    with rw.TrajectoryObserver(server.address, "replay", 2, max_in_flight_items=_MANY, max_kept_bytes=0) as observer:
        last = 0
        for kills in (1, 2, 3):
            write_numbers(observer, range(last, last + 3000))
            observer.flush() if kills == 1 else time.sleep(0.02 * kills)
            write_numbers(observer, range(last + 3000, last + 6000))
            acknowledged = kill_and_count(server, observer)
            write_numbers(observer, range(last + 6000, last + 7000))
            with soon(server.process.restart):
                write_numbers(observer, range(last + 7000, last + 8000))
            write_numbers(observer, range(last + 8000, last + 9000))
            observer.flush()
            last += 9000
            assert are_all_but(acknowledged, column_at(server.address), pairs(range(last)))
            stats = observer.stats()
            assert (stats.reconnects, stats.server_restarts) == (kills, kills)
            assert (stats.items, stats.acknowledged_items, stats.dropped_items) == (last - 1, last - 1, 0)
    assert caplog.text.count("insert stream lost") == 3
    assert caplog.text.count("the server was restarted") == 3
    assert "its tables are as in the checkpoint that it has restored, or empty" in caplog.text


def test_open_episode_goes_on_after_a_kill(lone_server: StartServer) -> None:
    """A window over steps of before and after the kill is whole, and the windows of before the kill come back."""
    server = lone_server(fifo("replay"))
    with rw.TrajectoryObserver(server.address, "replay", 40, chunk_length=10) as observer:
        write_numbers(observer, range(75))
        observer.flush()
        assert kill_and_count(server, observer) == 36
        server.process.restart()
        write_numbers(observer, range(75, 80))
        observer.flush()
    assert column_at(server.address) == [list(range(first, first + 40)) for first in range(41)]


def test_observer_closed_without_a_server_says_what_is_lost(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = lone_server(fifo("replay"))
    observer = rw.TrajectoryObserver(server.address, "replay", 2)
    write_numbers(observer, range(11))
    observer.flush()
    server.process.kill()
    write_numbers(observer, range(11, 51))
    begin = time.monotonic()
    with pytest.raises(
        rw.errors.ServerUnavailableError, match=r"40 items unconfirmed after \d+\.\d s.*is gone.*Start it again"
    ):
        observer.close(timeout_s=1)
    assert time.monotonic() - begin < 20
    assert "the observer has ended with 40 undelivered items" in caplog.text
    observer.close()
    stats = observer.stats()
    assert (stats.items, stats.acknowledged_items, stats.pending_items, stats.dropped_items) == (50, 10, 0, 40)
    with pytest.raises(rw.errors.ClosedError, match="closed"):
        write_numbers(observer, range(1))


@pytest.mark.slow
def test_server_paused_for_20_seconds_loses_and_doubles_nothing(lone_server: StartServer) -> None:
    server = lone_server(fifo("replay"))
    with rw.TrajectoryObserver(server.address, "replay", 2, max_in_flight_items=_MANY) as observer:
        write_numbers(observer, range(1000))
        observer.flush()
        server.process.pause()
        paused_at = time.monotonic()
        write_numbers(observer, range(1000, 2000))
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"1000 items unconfirmed.*does not answer"):
            observer.flush(timeout_s=2)
        time.sleep(paused_at + 20 - time.monotonic())
        server.process.resume()
        write_numbers(observer, range(2000, 3000))
        observer.flush()
        assert observer.stats().server_restarts == 0
    assert column_at(server.address) == pairs(range(3000))


@pytest.mark.slow
@client_by_socket
def test_paused_server_is_never_to_be_started_again(lone_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = lone_server(fifo("replay"))
    with (
        Forwarder(server.port) as forwarder,
        rw.TrajectoryObserver(forwarder.address, "replay", 1, max_delay_s=0.01) as observer,
        rw.ReplayDataset(forwarder.address, "replay", 1, timeout_s=15) as dataset,
    ):
        write_numbers(observer, range(1))
        observer.flush()
        next(dataset)
        server.process.pause()
        forwarder.cut()  # new connections are made, and nothing comes over them
        write_numbers(observer, range(1, 3))
        with (
            rw.Client(server.address) as new,
            pytest.raises(rw.errors.ReplayTimeoutError, match="did not answer") as late,
        ):
            new.server_info(timeout_s=5)
        with pytest.raises(rw.errors.ReplayTimeoutError, match="does not answer") as unconfirmed:
            observer.flush(timeout_s=15)
        with pytest.raises(rw.errors.ReverbWriterError, match=r"d(id|oes) not answer") as missing:
            next(dataset)
        server.process.resume()
        told = "".join(str(each.value) for each in (late, unconfirmed, missing)) + caplog.text
        assert "tart it" not in told
        assert "is gone" not in told
        observer.flush()


def test_server_that_comes_late_is_waited_for(lone_server: StartServer) -> None:
    server = lone_server(fifo("replay"))
    server.process.kill()
    with soon(server.process.restart, after_s=1), rw.TrajectoryObserver(server.address, "replay", 2) as observer:
        write_numbers(observer, range(3))
    assert column_at(server.address) == pairs(range(3))


def test_table_that_is_missing_after_a_restart_is_named_until_it_is_back(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))
    with rw.TrajectoryObserver(server.address, "replay", 2) as observer:
        write_numbers(observer, range(100))
        observer.flush()
        server.stop()
        server = replay_server(fifo("other"), fifo("another"), port=server.port)
        write_numbers(observer, range(100, 103))
        with pytest.raises(
            rw.errors.StructureError, match=r"table `replay` is not on the server.*it has `another`, `other`"
        ):
            observer.flush()
        before = observer.stats().steps
        with pytest.raises(rw.errors.StructureError, match="table `replay` is not on the server"):
            write_numbers(observer, range(103, 104))
        assert observer.stats().steps == before
        server.stop()
        server = replay_server(fifo("replay"), port=server.port)
        eventually(lambda: not observer.stats().pending_items)
        write_numbers(observer, range(103, 105))
        observer.flush()
        assert observer.stats().server_restarts == 2
    assert column_at(server.address) == pairs(range(105))


def test_client_closed_before_its_observer_is_named(
    replay_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = replay_server(rw.TableConfig.queue("replay", 1))
    client = rw.Client(server.address)
    observer = rw.TrajectoryObserver(client, "replay", 1)
    write_numbers(observer, range(5))
    client.close()
    with pytest.raises(rw.errors.ClosedError, match=r"client of .* (is|was) closed"):
        observer.close()
    with pytest.raises(rw.errors.ClosedError):
        client.server_info()
    # The stream's own thread may be the one that finds out, and it logs after it has ended the stream.
    eventually(lambda: any(record.levelno >= logging.ERROR for record in caplog.records))
