"""Ctrl-C at any moment in which an observer goes to another server: the next call completes it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import await_end_of_threads, interrupted
from reading import fifo, read_column
from server_process import HostedServer

import reverb_writer as rw

# An interrupt in a function that Python calls when it deletes something is printed, and has no other effect.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

_TIMEOUT_S = 60.0
_EVERY = 47  # moments, of some 1,800

StartServer = Callable[..., HostedServer]


class TwoServers:
    """Servers of which the actor prefers one. That one may take no inserts: then nothing is confirmed there."""

    def __init__(self, replay_server: StartServer, path: Path, *, is_blocked: bool = True) -> None:
        tables = {"a": fifo("replay"), "b": fifo("replay")}
        self._left = rw.choose_shard("actor", list(tables))
        if is_blocked:
            tables[self._left] = rw.TableConfig.queue("replay", 1)
        servers = {name: replay_server(table) for name, table in tables.items()}
        self._addresses = {name: server.address for name, server in servers.items()}
        self._path = path
        if is_blocked:
            with rw.Client(self._addresses[self._left], timeout_s=_TIMEOUT_S) as client:
                client.insert({"n": np.zeros(1, np.int64)}, {"replay": 1.0})
        self._write("up")
        self.client = rw.Client(f"file:{path}", timeout_s=_TIMEOUT_S)

    def _write(self, state: str) -> None:
        states = dict.fromkeys(self._addresses, "up") | {self._left: state}
        self._path.write_text(
            "\n".join(f"{name} {address} {states[name]}" for name, address in self._addresses.items())
        )

    def call(self, state: str) -> None:
        """Have the client know that the preferred server is in this state."""
        self._write(state)
        self.client.connections.refresh()

    def observe(self, make: Callable[..., Any], **options: Any) -> Any:
        self.call("up")
        return make(self.client, "replay", 2, actor_id="actor", patience_s=0.5, **options)

    def written(self, *, everywhere: bool = False) -> list[list[int]]:
        """Take out the windows of the server to which the actor goes, or of both."""
        found = []
        for name, address in self._addresses.items():
            if everywhere or name != self._left:
                with rw.Client(address, timeout_s=_TIMEOUT_S) as client:
                    found += read_column(client, "replay")
        return sorted(found)


def checked(observer: Any, resend: bool) -> rw.ObserverStats:
    """Flush and close the observer, and see that each item is counted once."""
    observer.flush()
    stats: rw.ObserverStats = observer.stats()
    observer.close()
    assert (stats.shard_changes, stats.pending_items) == (1, 0)
    assert stats.items == stats.acknowledged_items + stats.dropped_items
    assert stats.dropped_items == stats.unconfirmed_items
    assert not (resend and stats.dropped_items)
    assert resend == bool(stats.resent_items)
    return stats


@pytest.mark.parametrize("resend", [False, True])
def test_environments_go_on_elsewhere_after_an_interrupt_at_any_moment_of_it(
    replay_server: StartServer, tmp_path: Path, resend: bool
) -> None:
    """Of the one whose episode is given up no further step is in a window."""
    servers = TwoServers(replay_server, tmp_path / "shards")
    moment, done, first = int(resend) * _EVERY // 2, False, 0
    while not done:
        moment, first = moment + _EVERY, first + 10
        observer = servers.observe(rw.VectorObserver, num_envs=2, resend_unconfirmed=resend)

        def step(number: int, *last: bool, observer: Any = observer) -> None:
            observer({"n": np.array([number, -number])}, end_of_episode=np.array(last))

        step(first, False, False)
        step(first + 1, False, False)
        servers.call("lost")
        reset = functools.partial(observer.reset, env_ids=[0], discard=True)
        done = interrupted(reset, moment)
        while not observer.stats().shard_changes:
            reset()
        step(first + 2, False, False)
        step(first + 3, True, True)
        step(first + 4, False, False)
        step(first + 5, True, True)
        stats = checked(observer, resend)
        assert (stats.steps, stats.dropped_steps["lost_shard"]) == (12, 2)
        assert stats.items == 5
        before = [[first, first + 1], [-first, -first - 1]]
        after = [[first + 2, first + 3], [first + 4, first + 5], [-first - 4, -first - 5]]
        assert servers.written() == sorted([*before, *after] if resend else after)
    assert moment > 50
    servers.client.close()
    await_end_of_threads(_TIMEOUT_S)


@pytest.mark.parametrize("resend", [False, True])
def test_stream_of_steps_goes_on_elsewhere_after_an_interrupt_at_any_moment_of_it(
    replay_server: StartServer, tmp_path: Path, resend: bool
) -> None:
    """And an observer that was interrupted can be closed at any moment, too."""
    servers = TwoServers(replay_server, tmp_path / "shards")
    moment, done, first = int(resend) * _EVERY // 2, False, 0
    while not done:
        moment, first = moment + _EVERY, first + 1000
        observer = servers.observe(rw.SequenceObserver, resend_unconfirmed=resend)
        observer.extend({"n": np.array([first, first + 1])})
        servers.call("lost")
        done = interrupted(functools.partial(observer.reset, discard=True), moment)
        observer.reset(discard=True)
        starts = [first]
        while not observer.stats().shard_changes:
            starts.append(starts[-1] + 2)
            observer.extend({"n": np.array([starts[-1], starts[-1] + 1])})
            observer.reset(discard=True)
        starts.append(starts[-1] + 2)
        observer.extend({"n": np.array([starts[-1], starts[-1] + 1])})
        stats = checked(observer, resend)
        assert stats.items == len(starts)
        left = [] if resend else starts[: stats.dropped_items]
        assert servers.written() == [[number, number + 1] for number in starts if number not in left]

        observer = servers.observe(rw.SequenceObserver, resend_unconfirmed=resend)
        observer.extend({"n": np.array([first, first + 1])})
        servers.call("lost")
        interrupted(functools.partial(observer.reset, discard=True), moment)
        for at in (moment // 2, sys.maxsize):
            with contextlib.suppress(rw.ReplayTimeoutError, rw.ServerUnavailableError):
                interrupted(functools.partial(observer.close, 0.01), at)
        stats = observer.stats()
        assert (stats.items, stats.pending_items) == (1, 0)
        assert stats.items == stats.acknowledged_items + stats.dropped_items
        servers.written()
    assert moment > 50
    servers.client.close()
    await_end_of_threads(_TIMEOUT_S)


def test_nothing_is_dropped_by_an_interrupt_of_an_actor_that_leaves_a_server_which_is_drained(
    replay_server: StartServer, tmp_path: Path
) -> None:
    servers = TwoServers(replay_server, tmp_path / "shards", is_blocked=False)
    moment, done, first = 0, False, 0

    def episode() -> None:
        starts.append(starts[-1] + 2)
        observer.extend({"n": np.array([starts[-1], starts[-1] + 1])})
        observer.flush()

    while not done:
        moment, first = moment + _EVERY, first + 1000
        observer = servers.observe(rw.SequenceObserver)
        starts = [first]
        episode()
        servers.call("draining")
        observer.reset(discard=True)  # begins to look for another one
        episode()
        done = interrupted(functools.partial(observer.reset, discard=True), moment)
        observer.reset(discard=True)
        while not observer.stats().shard_changes:
            episode()
            observer.reset(discard=True)
        episode()
        stats = observer.stats()
        observer.close()
        assert (stats.shard_changes, stats.dropped_items, stats.unconfirmed_items) == (1, 0, 0)
        assert servers.written(everywhere=True) == [[start, start + 1] for start in starts[1:]]
    assert moment > 50
    servers.client.close()
    await_end_of_threads(_TIMEOUT_S)
