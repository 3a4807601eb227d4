"""Priorities and sizes of items on a real server: constants, functions of the window that fail, the server's limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episodes import expected, feed, observed
from kinds import contents
from reading import Place, read
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.rows import ACTION, PADDING
from reverb_writer.writing import waiting

pytestmark = [contents, pytest.mark.filterwarnings("ignore:`stride_length`")]


def test_function_sees_the_nest_of_the_window_and_the_kinds_of_its_rows(place: Place) -> None:
    seen: list[Any] = []

    def keep(window: Any, kinds: Any) -> float:
        seen.append((window, kinds))
        return 1.0

    step = rw.Trajectory(np.int32(1), {"x": np.ones(2)}, "name", (), np.int32(1), 0.5, np.float32(1))
    with rw.TrajectoryObserver(place.client, "a", 3, end_of_episode="cover", priority=keep) as observer:
        observer(step)
        observer(step, end_of_episode=True)
    ((window, kinds),) = seen
    assert kinds.tolist() == [ACTION, ACTION, PADDING]  # neither row has `step_type` FIRST or LAST
    assert isinstance(window, rw.Trajectory)
    assert window.observation["x"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert window.step_type.tolist() == [1, 1, 2]
    assert window.action.tolist() == [b"name", b"name", b""]
    assert window.policy_info == ()


def broken(window: Any) -> float:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    "answer", [broken, lambda _: float("nan"), lambda _: -1, lambda _: float("inf"), lambda _: "x", lambda _: None]
)
def test_function_that_fails_loses_its_window_counted_and_logged_once(
    place: Place, answer: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Two tables get each window, so a lost one is two items."""
    spec = rw.WindowSpec(3, 2, "tile")
    with observed(
        place, spec, ["a", "b"], priority=lambda w: answer(w) if w["n"][0] in (3, 7) else float(w["n"][0])
    ) as observer:
        feed(observer, [9])
        observer.flush()
        stats = observer.stats()
    assert (stats.steps, stats.items, stats.acknowledged_items) == (9, 10, 6)
    assert (stats.failed_priorities, stats.dropped_items, stats.pending_items) == (4, 4, 0)
    for table in ("a", "b"):
        items = read(place.client, table)
        assert [item.data[0].tolist() for item in items] == [w for w in expected(spec, [9]) if w[0] not in (3, 7)]
        assert [item.info.priority for item in items] == [1, 5, 9]
    assert len([record for record in caplog.records if "A window is lost because" in record.getMessage()]) == 1


def test_function_may_take_a_lock_that_its_caller_holds_while_a_dataset_waits(place: Place) -> None:
    """An actor's thread and a learner's thread share a network and its lock, as in a program of one process."""
    net = threading.Lock()

    def value_of(window: Any) -> float:
        with net:
            return float(window["n"].sum())

    with (
        observed(place, rw.WindowSpec(2), priority=value_of, max_delay_s=1000) as observer,
        rw.ReplayDataset(place.client, "a", 2, timeout_s=60) as dataset,
    ):
        holds = threading.Event()

        def learn() -> None:
            with net:
                holds.set()
                with pytest.raises(rw.errors.ReplayTimeoutError):  # its windows need the lock that this thread holds
                    next(learner)

        with rw.ReplayDataset(place.client, "a", 2, timeout_s=2) as learner, soon(learn):
            assert holds.wait(30)
            feed(observer, [50])  # never waits for the lock
        observer.flush()
        assert observer.stats().acknowledged_items == 49
        assert next(dataset).data["n"].shape == (2, 2)


def test_function_that_calls_its_own_observer_loses_its_window(place: Place) -> None:
    observer: rw.TrajectoryObserver = observed(place, rw.WindowSpec(1), priority=lambda _: observer.flush())
    with observer:
        feed(observer, [2])
        observer.flush()
        assert observer.stats().failed_priorities == 2


def test_sender_that_did_not_hear_of_close_counts_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held up by a function while its observer is closed, opened again, and written to."""
    monkeypatch.setattr(waiting, "_HANDOVER_S", 0.1)
    threads: list[threading.Thread] = []
    may_go_on = threading.Event()

    def wait(_: Any) -> float:
        threads.append(threading.current_thread())
        may_go_on.wait()
        return 1.0

    observer = observed(place, rw.WindowSpec(1), priority=wait, max_delay_s=0.01)
    feed(observer, [1])
    eventually(lambda: bool(threads))
    feed(observer, [1])
    with pytest.raises(rw.errors.ReplayTimeoutError, match="the observer has done nothing for"):
        observer.close(timeout_s=0.1)
    observer.open()
    feed(observer, [1])
    may_go_on.set()
    threads[0].join()
    observer.close()
    stats = observer.stats()
    assert (stats.steps, stats.items, stats.acknowledged_items) == (3, 2, 1)


def priorities_of(place: Place) -> list[float]:
    return [item.info.priority for item in read(place.client, "a")]


def test_new_items_get_the_largest_priority_that_a_learner_has_set_or_a_constant(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1, priority="max") as observer:
        feed(observer, [1, 1])
        observer.flush()
        assert priorities_of(place) == [1.0, 1.0]
        feed(observer, [1])
        observer.flush()
        for largest in (7.5, 2.0):
            place.client.mutate_priorities("a", {1: largest})  # the server ignores keys that it does not have
            feed(observer, [1])
            observer.flush()
        assert priorities_of(place) == [1.0, 7.5, 7.5]
        feed(observer, [1, 1])
        observer.flush()
        with rw.ReplayDataset(place.client, "a", 2) as dataset:
            dataset.update_priorities(next(dataset), [0.5, 8.5])
            dataset.flush_priorities()
        feed(observer, [1])
        observer.flush()
        assert priorities_of(place) == [8.5]
        place.client.reset("a")
    with rw.TrajectoryObserver(place.client, "a", 1, num_envs=2, priority="max") as vector:
        vector({"n": np.arange(2)}, end_of_episode=[True, True])
    assert priorities_of(place) == [1.0, 1.0]
    with observed(place, rw.WindowSpec(1), priority=0) as observer:
        feed(observer, [1])
    assert priorities_of(place) == [0]


LIMIT = 100


@pytest.mark.parametrize("restored", [False, True])
def test_local_server_refuses_larger_items_from_anyone(tmp_path: Path, restored: bool) -> None:
    server = rw.LocalServer([rw.TableConfig("replay")], max_item_bytes=LIMIT)
    if restored:
        with server:
            server.save(tmp_path)
        server = rw.LocalServer.restore(tmp_path, max_item_bytes=LIMIT)
    rows = np.zeros((8, 10), np.uint8)
    with server, rw.Client(server.address) as client:
        client.insert([rows, np.array([b"x" * 20], object)], {"replay": 1.0})
        with pytest.raises(
            rw.errors.ReverbWriterError,
            match=r"takes 101 bytes, expected at most 100, the server's `max_item_bytes`; .* column, 0, takes 80",
        ):
            client.insert([rows, np.array([b"x" * 20, b"y"], object)], {"replay": 1.0})
        assert client.server_info()["replay"].current_size == 1
    with pytest.raises(rw.errors.SpecError, match="`max_item_bytes` must be >= 1, got 0"):
        rw.LocalServer([rw.TableConfig("replay")], max_item_bytes=0)
