"""Confirmed items that a restarted server lacks come back from their writers, once; the rest is counted."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forwarder import Forwarder
from kills import numbers_in
from waiting import eventually

import reverb_writer as rw

FOREVER: Any = {"timeout_s": 60.0}


class Restartable:
    """A `LocalServer` that dies with its data, and comes back from its last save on the same port."""

    def __init__(self, folder: Path, *tables: rw.TableConfig) -> None:
        self.folder, self.tables = folder, tables
        self.server = rw.LocalServer(tables)
        self.port, self.address = self.server.port, self.server.address

    def save(self) -> None:
        self.server.save(self.folder)

    def restart(self, folder: Path | None = None) -> None:
        self.server.close()
        self.start(folder)

    def start(self, folder: Path | None = None) -> None:
        saved = folder or self.folder
        is_new = not saved.exists()
        self.server = rw.LocalServer(self.tables, self.port) if is_new else rw.LocalServer.restore(saved, self.port)

    def sizes(self) -> dict[str, int]:
        with rw.Client(self.address) as client:
            return {name: table.current_size for name, table in client.server_info().items()}

    def numbers(self, table: str = "replay") -> Counter[int]:
        """Return how often each number is in a table."""
        where = self.folder.with_name("looked-at")
        self.server.save(where)
        return numbers_in(where, table)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restartable]:
    one = Restartable(tmp_path / "saved", rw.TableConfig("replay", 1000))
    yield one
    one.server.close()


def write(observer: rw.TrajectoryObserver, *numbers: int) -> None:
    """Write an item per number, and wait until all are confirmed."""
    for number in numbers:
        observer({"number": np.int64(number)}, end_of_episode=True)
    observer.flush()


def observing(address: Any, table: Any = "replay", **options: Any) -> rw.TrajectoryObserver:
    return rw.TrajectoryObserver(address, table, 1, **{**FOREVER, **options})


def wait_kept(observer: rw.TrajectoryObserver, *, none: bool) -> None:
    eventually(lambda: (observer.stats().kept_bytes == 0) is none, "kept items are as expected")


def test_items_since_the_last_save_come_back_and_none_is_there_twice(server: Restartable) -> None:
    with observing(server.address) as observer:
        write(observer, *range(10))
        eventually(lambda: _is_marked(observer), "the server was asked")
        server.save()
        wait_kept(observer, none=True)
        write(observer, *range(10, 25))
        server.restart()
        write(observer, 25)
        assert server.numbers() == Counter(range(26))
        stats = observer.stats()
    assert (stats.recovered_items, stats.uncovered_items, stats.server_restarts) == (15, 0, 1)
    assert (stats.items, stats.acknowledged_items, stats.pending_items, stats.dropped_items) == (26, 26, 0, 0)


def test_items_come_back_without_another_step(server: Restartable) -> None:
    with observing(server.address) as observer:
        write(observer, *range(5))
        server.restart()
        eventually(lambda: server.sizes() == {"replay": 5}, "the items are back")


def test_items_come_back_after_each_of_several_restarts(server: Restartable) -> None:
    with observing(server.address) as observer:
        for start in range(0, 30, 10):
            write(observer, *range(start, start + 10))
            server.restart()
        write(observer, 30)
        assert server.numbers() == Counter(range(31))


def test_items_of_two_tables_come_back_to_their_tables(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig("a"), rw.TableConfig("b"))
    with contextlib.closing(server.server), observing(server.address, ["a", "b"]) as observer:
        write(observer, 1, 2)
        server.restart()
        write(observer, 3)
        assert (server.numbers("a"), server.numbers("b")) == (Counter([1, 2, 3]), Counter([1, 2, 3]))
        server.server.close()


def test_order_of_items_stays(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig("replay", 100, sampler="fifo"))
    with observing(server.address) as observer, rw.Client(server.address) as client:
        write(observer, 1, 2, 3)
        server.restart()
        write(observer, 4)
        sampled = [sample.data["number"].item() for sample in client.sample("replay", 4)]
        server.server.close()
    assert sampled == [1, 1, 1, 1]  # the oldest


def test_part_of_a_request_that_was_confirmed_comes_back_with_the_rest(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig.queue("replay", 3))
    observer = observing(server.address, max_in_flight_items=100)
    for number in range(5):
        observer({"number": np.int64(number)}, end_of_episode=True)
    eventually(lambda: observer.stats().acknowledged_items == 3, "the queue has taken what it holds")
    server.restart()
    eventually(lambda: server.sizes() == {"replay": 3}, "the queue is full again")
    with rw.Client(server.address) as client:
        sampled = [sample.data["number"].item() for sample in client.sample("replay", 5)]
    observer.close()
    server.server.close()
    assert sampled == [0, 1, 2, 3, 4]
    stats = observer.stats()
    assert (stats.items, stats.acknowledged_items, stats.pending_items) == (5, 5, 0)


def test_items_that_the_restarted_server_refuses_are_given_up_and_counted(server: Restartable) -> None:
    step = {"number": np.zeros(1000, np.int64)}
    with observing(server.address) as observer:
        observer(step, end_of_episode=True)
        observer.flush()
        server.server.close()
        server.server = rw.LocalServer(server.tables, server.port, max_item_bytes=100)
        eventually(lambda: observer.stats().uncovered_items == 1, "the server refuses the item")
        assert observer.stats().kept_bytes == 0
        server.restart()
        observer(step, end_of_episode=True)
        observer.flush()
        assert server.sizes() == {"replay": 1}


def test_nothing_is_kept_with_a_bound_of_zero(server: Restartable) -> None:
    with observing(server.address, max_kept_bytes=0) as observer:
        write(observer, *range(5))
        server.restart()
        write(observer, 5)
        assert server.numbers() == Counter([5])
        stats = observer.stats()
    assert (stats.kept_bytes, stats.recovered_items, stats.uncovered_items) == (0, 0, 0)


def test_items_beyond_the_bound_are_counted_and_named_in_the_log_once(
    server: Restartable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    server.save()
    with observing(server.address, max_kept_bytes=2000) as observer:
        for number in range(60):
            write(observer, number)
        stats = observer.stats()
        server.restart()
        write(observer, 60)
        there = server.numbers()
    assert max(there.values()) == 1
    assert 1 < len(there) < 61
    assert set(there) == set(range(61 - len(there), 61))  # the newest
    assert stats.uncovered_items == 61 - len(there)
    assert 0 < stats.kept_bytes <= 2000
    texts = [record.getMessage() for record in caplog.records if "max_kept_bytes" in record.getMessage()]
    assert len(texts) == 1
    assert "Raise `max_kept_bytes`, or lower `checkpoints.every_s` of the server" in texts[0]


def test_items_that_no_save_has_are_counted_and_logged_at_close(
    server: Restartable, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    observer = observing(server.address)
    write(observer, 1, 2, 3)
    observer.close()
    assert observer.stats().uncovered_items == 3
    assert "3 confirmed items that are in no checkpoint of the server yet" in caplog.text


def test_table_that_has_removed_an_item_lets_it_go_without_a_save(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig("replay", 4), rw.TableConfig("other", 100))
    with observing(server.address) as observer, observing(server.address) as another:
        write(observer, 1, 2, 3)
        wait_kept(observer, none=False)
        eventually(lambda: _is_marked(observer), "the server was asked")
        write(another, *range(10, 14))
        wait_kept(observer, none=True)
        assert observer.stats().uncovered_items == 0
    server.server.close()


def test_queue_lets_items_go_that_it_has_given_out_and_they_do_not_return(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig.queue("replay", 10))
    with observing(server.address) as observer, rw.Client(server.address) as client:
        write(observer, 1, 2, 3)
        assert len([*client.sample("replay", 3)]) == 3
        wait_kept(observer, none=True)
        write(observer, 4)
        server.restart()
        eventually(lambda: server.sizes() == {"replay": 1}, "the item is back")
        assert server.numbers() == Counter([4])
        stats = observer.stats()
    server.server.close()
    assert (stats.recovered_items, stats.repeatable_items, stats.uncovered_items) == (1, 1, 0)


def test_items_of_before_a_reset_do_not_return(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig("a"), rw.TableConfig("b"))
    with observing(server.address, ["a", "b"]) as observer, rw.Client(server.address) as client:
        write(observer, 1, 2)
        eventually(lambda: _is_marked(observer), "the server was asked")
        client.reset("a")
        eventually(lambda: _is_left_out(observer), "the reset was seen")
        write(observer, 3)
        server.restart()
        write(observer, 4)
        assert server.numbers("a") == Counter([3, 4])
        assert server.numbers("b") == Counter([1, 2, 3, 4])
        assert observer.stats().uncovered_items == 0
    server.server.close()


def test_older_save_that_is_restored_is_counted(server: Restartable, tmp_path: Path) -> None:
    with observing(server.address) as observer:
        write(observer, 1, 2)
        eventually(lambda: _is_marked(observer), "the server was asked")
        server.save()
        wait_kept(observer, none=True)
        write(observer, 3, 4, 5)
        eventually(lambda: _is_marked(observer), "the server was asked")
        server.server.save(tmp_path / "newer")
        wait_kept(observer, none=True)
        write(observer, 6)
        server.restart()  # from the older one
        write(observer, 7)
        assert server.numbers() == Counter([1, 2, 6, 7])
        assert observer.stats().uncovered_items == 3


def test_item_that_comes_back_late_pushes_out_nothing_that_is_newer_than_the_save(tmp_path: Path) -> None:
    server = Restartable(tmp_path / "saved", rw.TableConfig("replay", 10))
    may_connect = threading.Event()
    may_connect.set()

    def greet(_: object) -> None:
        may_connect.wait(60)

    held = Forwarder(server.port, greet=greet)
    with observing(server.address) as early, held, observing(held.address) as late:
        write(early, *range(100, 110))
        server.save()
        write(late, 0, 1, 2, 3)
        eventually(lambda: _is_marked(late), "the server was asked")
        may_connect.clear()
        server.restart()
        write(early, *range(200, 208))
        may_connect.set()
        write(late, 4)
        there, stats = server.numbers(), late.stats()
    server.server.close()
    # 8 of 10 are new: there is room for the newest two of the four; then comes 4, in the place of the oldest of all.
    assert there == Counter([*range(201, 208), 2, 3, 4])
    assert stats.uncovered_items == 2
    assert stats.recovered_items == 2


def test_shard_that_was_given_up_gets_its_items_when_it_comes_back(tmp_path: Path) -> None:
    one, two = (Restartable(tmp_path / name, rw.TableConfig("replay", 1000)) for name in ("one", "two"))
    with observing([one.address, two.address], patience_s=0.5) as observer:
        write(observer, *range(40))
        assert min(one.sizes()["replay"], two.sizes()["replay"]) > 0
        num_before = two.sizes()["replay"]
        two.server.close()
        for number in range(40, 100):
            observer({"number": np.int64(number)}, end_of_episode=True)
        eventually(lambda: observer.stats().lost_shards == 1, "the shard is given up")
        two.start()
        eventually(lambda: two.sizes()["replay"] >= num_before, "its items are back")
        observer.flush()
        there = one.numbers() + two.numbers()
        assert set(range(40)) <= set(there)
        assert max(there.values()) == 1
    one.server.close()
    two.server.close()


def _kept(observer: rw.TrajectoryObserver) -> Any:
    sender: Any = observer._sender
    return sender._outbox.delivery.kept


def _is_marked(observer: rw.TrajectoryObserver) -> bool:
    """Return whether the observer has asked the server since its last confirmation."""
    return all(kept.mark is not None for kept in [*_kept(observer)._kept])


def _is_left_out(observer: rw.TrajectoryObserver) -> bool:
    return all(kept.request.num_kept < kept.request.num_items for kept in [*_kept(observer)._kept])


def test_whole_items_come_back_to_a_restarted_server(server: Restartable) -> None:
    with rw.ItemWriter(server.address, "replay", **FOREVER) as writer:
        for number in range(30):
            writer.write({"number": np.full(1 + number, number)})
        writer.flush()
        server.restart()
        writer.write({"number": np.full(1, 30)})
        writer.flush()
        assert server.sizes() == {"replay": 31}
        stats = writer.stats()
        with rw.Client(server.address) as client:
            for sample in client.sample("replay", 50):
                values = sample.data["number"].tolist()
                assert values == [values[0]] * (1 + values[0] % 30)
    assert (stats.recovered_items, stats.items, stats.acknowledged_items) == (30, 31, 31)
