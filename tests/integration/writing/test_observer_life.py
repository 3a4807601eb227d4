"""When an observer's items are there, and how it is opened, closed and configured."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from episodes import feed, observed
from interrupting import EachMoment
from kinds import client_alone
from reading import Place
from server_process import HostedServer
from threads import at_once, soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.background import LateThread
from reverb_writer.transport import loop
from reverb_writer.writing.cutter import Cutter


def test_windows_are_there_in_time_and_after_a_flush_although_their_chunk_is_not_full(place: Place) -> None:
    with observed(place, rw.WindowSpec(2), chunk_length=1000, max_delay_s=0.02) as observer:
        observer({"n": np.int64(1)})
        observer({"n": np.int64(2)})
        eventually(lambda: place.client.server_info()["a"].current_size == 1)
        observer({"n": np.int64(3)})
        eventually(lambda: place.client.server_info()["a"].current_size == 2)
        assert place.column() == [[1, 2], [2, 3]]
    with observed(place, rw.WindowSpec(2), chunk_length=1000, max_delay_s=1000) as observer:
        for number in range(1, 4):
            observer({"n": np.int64(number)})
        stats = observer.stats()
        assert (stats.items, stats.acknowledged_items, stats.pending_items) == (2, 0, 2)
        observer.flush()
        stats = observer.stats()
        assert (stats.items, stats.acknowledged_items, stats.pending_items) == (2, 2, 0)
        assert place.client.server_info()["a"].current_size == 2
        observer.flush()
        observer({"n": np.int64(4)})
        observer.flush()
        assert place.column() == [[1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize("kind", [rw.TrajectoryObserver, rw.SequenceObserver, rw.EpisodeObserver])
def test_closed_observer_says_so_until_it_is_opened_again(place: Place, kind: Any) -> None:
    with kind(place.client, "a", 3) as observer:
        assert observer.client is place.client
        observer({"n": np.int64(1)})
        observer.close()
    observer.close()
    for call in (lambda: observer({"n": np.int64(2)}), observer.flush, observer.reset):
        with pytest.raises(rw.errors.ClosedError, match=r"the observer is closed. Call `open\(\)`"):
            call()
    assert observer.stats().dropped_steps == {"reset": 1}
    observer.open()
    observer.open()
    with pytest.raises(rw.errors.StructureError, match="step 1, leaf `n`: float64"):  # the structure stays
        observer({"n": np.float64(1)})
    for number in range(2, 5):
        observer({"n": np.int64(number)}, end_of_episode=number == 4)
    observer.flush()
    assert place.column() == [[2, 3, 4]]  # the client is still usable
    assert (observer.stats().steps, observer.stats().items) == (4, 1)
    observer.close()
    assert (observer.stats().steps, observer.stats().acknowledged_items) == (4, 1)


@client_alone
@pytest.mark.parametrize("error", [MemoryError("no rows"), SystemExit(1)])
def test_observer_whose_thread_fails_says_so_and_can_be_opened_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: Cutter) -> None:
        raise error

    def write_and_fail(observer: Any) -> None:
        feed(observer, [2])
        with monkeypatch.context() as failing:
            failing.setattr(Cutter, "take", fail)
            sender = observer._sender
            sender.post()
            eventually(lambda: sender.is_ended)

    with observed(place, rw.WindowSpec(1), max_delay_s=1000) as observer:
        write_and_fail(observer)
        with pytest.raises(rw.errors.ClosedError, match=r"the observer is closed. Call `open\(\)`"):
            feed(observer, [1])
        observer.open()
        write_and_fail(observer)
        with pytest.raises(rw.errors.ReverbWriterError, match=f"the observer has failed .*{type(error).__name__}"):
            observer.close()
        observer.open()
        feed(observer, [1], first=9)
        observer.flush()
        assert place.column()[-1] == [9]


@client_alone
def test_observer_can_be_opened_and_written_to_after_an_interrupted_close(place: Place) -> None:
    interrupt, num_steps = EachMoment(40), 0
    with rw.TrajectoryObserver(place.address, "a", 1) as observer:
        for moment in interrupt:
            feed(observer, [moment % 3 + 1])
            num_steps += moment % 3 + 1
            interrupt(observer.close)
            observer.open()
        assert interrupt.moment > 20
    assert observer.stats().acknowledged_items == num_steps


def test_close_after_an_interrupted_one_has_its_own_time() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    with rw.LocalServer([rw.TableConfig.queue("queue", 1)]) as server, rw.Client(server, timeout_s=60) as client:
        observer = rw.TrajectoryObserver(client, "queue", 1)
        feed(observer, [2])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            observer.close(timeout_s=1)
        signal.signal(signal.SIGALRM, former)
        with soon(lambda: next(client.sample("queue")), after_s=2):
            observer.close(timeout_s=60)
        assert observer.stats().acknowledged_items == 2


def test_sender_ends_at_the_time_out_of_an_interrupted_close() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    with rw.LocalServer([rw.TableConfig.queue("queue", 1)]) as server:
        observer = rw.TrajectoryObserver(server, "queue", 1)
        feed(observer, [3])
        sender = observer._sender
        assert sender is not None
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            observer.close(timeout_s=0.5)
        signal.signal(signal.SIGALRM, former)
        eventually(lambda: sender.is_ended, "nobody waits for it")
        observer.close()
        stats = observer.stats()
    assert (stats.items, stats.acknowledged_items, stats.dropped_items, stats.pending_items) == (3, 1, 2, 0)


def test_open_after_an_interrupted_close_completes_it() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    with rw.LocalServer([rw.TableConfig.queue("queue", 1)]) as server, rw.Client(server, timeout_s=60) as client:
        observer = rw.TrajectoryObserver(client, "queue", 1)
        feed(observer, [3])
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            observer.close()
        signal.signal(signal.SIGALRM, former)
        with soon(lambda: list(client.sample("queue", 2))):
            observer.open()
        assert observer.stats().acknowledged_items == 3
        with soon(lambda: list(client.sample("queue", 1))):
            feed(observer, [1])
            observer.close()
    assert observer.stats().acknowledged_items == 4


def test_observer_that_is_forgotten_while_its_thread_begins_delivers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LateThread.run

    def begin_late(thread: LateThread) -> None:
        time.sleep(0.3)
        begin(thread)

    loop.submit(int)  # the loop has begun
    monkeypatch.setattr(LateThread, "run", begin_late)
    rw.TrajectoryObserver(place.address, "a", 1)({"n": np.int64(1)}, end_of_episode=True)
    gc.collect()
    eventually(lambda: place.client.server_info()["a"].current_size == 1)


@pytest.mark.parametrize("num_envs", [None, 2])
def test_second_thread_in_mid_episode_is_refused_and_may_go_on_after_it(place: Place, num_envs: int | None) -> None:
    def step(number: int) -> dict[str, Any]:
        return {"n": np.int64(number) if num_envs is None else np.full(num_envs, number)}

    end = True if num_envs is None else [True] * num_envs
    refusal = "is in the middle of an episode of another thread, at step "
    with rw.TrajectoryObserver(place.client, "a", 2, num_envs=num_envs) as observer:
        observer(step(1))
        with pytest.raises(rw.errors.SpecError, match=refusal):
            at_once(lambda: observer(step(99)))
        observer(step(2), end_of_episode=end)
        at_once(lambda: observer(step(3)))  # between episodes
        with pytest.raises(rw.errors.SpecError, match=refusal):
            observer(step(99))
        observer.reset(discard=True)
        observer(step(4))
        observer(step(5), end_of_episode=end)
    assert place.column() == [[1, 2]] * (num_envs or 1) + [[4, 5]] * (num_envs or 1)


@pytest.mark.parametrize("mark", ["none", "argument", "leaf", "reset", "spanning"])
def test_steps_without_any_mark_of_an_end_are_a_warning_once_and_counted(
    place: Place, caplog: pytest.LogCaptureFixture, mark: str
) -> None:
    kind = rw.SequenceObserver if mark == "spanning" else rw.TrajectoryObserver
    with kind(place.client, "a", 20, 20, timeout_s=60) as observer:
        if mark == "reset":
            observer.reset()
        for number in range(25_000 if mark == "none" else 12_000):
            step = {"n": np.int64(number), **({"is_last": False} if mark == "leaf" else {})}
            observer(step, end_of_episode=False if mark == "argument" else None)
            if number == 4_000:
                assert observer.stats().unmarked_steps == 0
        unmarked = observer.stats().unmarked_steps
        assert unmarked >= 5_000 if mark == "none" else unmarked == 0
    said = [text for text in caplog.messages if "No end of an episode" in text]
    assert len(said) == (mark == "none")
    assert all("`terminated`" in text and "`reset()`" in text for text in said)


def test_restart_of_a_server_says_how_many_items_are_sent_again_and_promises_no_checkpoint(
    lone_server: Callable[..., HostedServer], caplog: pytest.LogCaptureFixture
) -> None:
    """A rate limiter holds the items back until the restart."""
    server = lone_server(rw.TableConfig.queue("queue", 4))
    with rw.TrajectoryObserver(server.address, "queue", 1, timeout_s=60) as observer:
        feed(observer, [10])
        eventually(lambda: observer.stats().acknowledged_items == 4)
        server.process.kill()  # one that stops confirms items that it has not inserted
        server.process.restart()
        eventually(lambda: observer.stats().server_restarts == 1)
        with rw.Client(server.address, timeout_s=60) as client:
            assert [int(sample.data["n"][0]) for sample in client.sample("queue", 10)] == list(range(1, 11))
        stats = observer.stats()
        assert (stats.resent_items, stats.recovered_items, stats.reconnects) == (6, 4, 1)
    (said,) = [text for text in caplog.messages if "the server was restarted" in text]
    assert "or empty. 6 unconfirmed and 4 confirmed items are sent again." in said
