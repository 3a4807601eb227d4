"""Work in the background, and what waits for room or for a window: no thread too many, and no race."""

from __future__ import annotations

import collections
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interrupting import many_signals
from waiting import eventually

import reverb_writer as rw
from reverb_writer.background import Flag, Inbox, LateThread, in_background, may_be_interrupted, start_thread
from reverb_writer.client.same_process import add_sender, send_due
from reverb_writer.transport import wait as waits

END_WITHIN_S = 30.0


def test_outcome_is_what_the_work_returns_or_raises() -> None:
    assert in_background(lambda: 3).result() == 3
    failed = in_background(lambda: 1 // 0)
    assert failed.wait(END_WITHIN_S)
    assert failed.done()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()


@pytest.mark.parametrize("wait", [Flag().wait, lambda seconds: has_come(Inbox(), seconds)], ids=["Flag", "Inbox"])
def test_time_out_of_a_wait_comes_although_signals_arrive_at_that_moment(wait: Callable[[float], bool]) -> None:
    """Before CPython 3.13, a wait at a `queue.SimpleQueue` with these signals hangs within some hundred time-outs."""
    with many_signals():
        assert not any(wait(0.002) for _ in range(1500))


def has_come(inbox: Inbox[int], within_s: float) -> bool:
    try:
        inbox.get(within_s)
    except queue.Empty:
        return False
    return True


def test_inbox_gives_each_thing_once_in_order_while_another_thread_puts() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.empty()
    putting = in_background(lambda: collections.deque(map(inbox.put, range(20_000)), maxlen=0))
    assert [inbox.get(END_WITHIN_S) for _ in range(20_000)] == [*range(20_000)]
    putting.result()
    assert inbox.empty()
    assert not has_come(inbox, 0.0)
    inbox.put(3)
    assert inbox.get(-1.0) == 3


def test_flag_wakes_all_that_wait_and_may_be_set_by_many_at_once() -> None:
    flag, begun = Flag(), queue.SimpleQueue[None]()

    def wait() -> bool:
        begun.put(None)
        return flag.wait(END_WITHIN_S)

    for _ in range(20):
        flag.clear()
        waiting = [in_background(wait) for _ in range(4)]
        for _ in waiting:
            begun.get(timeout=END_WITHIN_S)
        for setting in [in_background(flag.set) for _ in range(4)]:
            setting.result()
        assert all(one.result() for one in waiting)
    assert flag.wait(0)
    flag.clear()
    assert not flag.wait(0)
    assert not flag.wait(-1.0)


def test_work_that_takes_long_keeps_no_other_waiting() -> None:
    release: queue.SimpleQueue[int] = queue.SimpleQueue()
    slow = in_background(release.get)
    assert in_background(lambda: 1).result() == 1
    assert not slow.done()
    assert not slow.wait(0.01)
    release.put(2)
    assert slow.result() == 2


def test_only_the_main_thread_may_be_interrupted() -> None:
    assert may_be_interrupted()
    assert not in_background(may_be_interrupted).result()


def test_started_thread_is_one_that_threading_knows() -> None:
    found: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    thread = start_thread(lambda: found.put(threading.current_thread()), "named")
    assert found.get(timeout=END_WITHIN_S) is thread
    assert (thread.name, thread.daemon) == ("named", True)
    thread.join()


def test_late_thread_begins_once() -> None:
    begun: list[int] = []
    release: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run() -> None:
        begun.append(threading.get_ident())
        release.get()

    thread = LateThread(run, "late")
    for _ in range(20):
        thread.start()
    eventually(lambda: sum(one.name == "late" for one in threading.enumerate()) == 1)
    thread.start()
    release.put(None)
    assert len(begun) == 1


class Clock:
    """A clock for a wait whose looks take a second, or their whole time if it is shorter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 0.0) -> None:
        self.now = now
        monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: self.now))

    def look(self, seconds: float, status: waits.Status) -> waits.Status:
        self.now += min(seconds, 1.0)
        return status


def test_wait_that_nothing_has_extended_names_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = Clock(monkeypatch, 100.0), list[float]()
    monkeypatch.setattr(
        waits,
        "Questions",
        lambda channel, *_: SimpleNamespace(
            channel=channel,
            ask=lambda: asked.append(clock.now),
            explain=lambda _: "It is slow.",
            limiter_text=lambda: None,
            limited_at=lambda: -np.inf,
            others_progress=lambda: False,
        ),
    )
    status = waits.Status(SimpleNamespace(address="HOST:1"), 5, 99.0, None, None)  # type: ignore[arg-type]
    with pytest.raises(rw.errors.ReplayTimeoutError) as late:
        waits.Wait({"a"}, 0.5, lambda _: None).run(lambda seconds: clock.look(seconds, status))
    assert str(late.value) == "table `a`: 5 items unconfirmed after 0.5 s. It is slow."
    assert clock.now == 100.5
    assert asked == [
        100.125,
        100.25,
        100.25,
    ]  # a quarter and half of the time-out; then its last second, which has begun


def test_progress_counts_from_its_own_time_and_a_fault_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A confirmation 0.3 s after the beginning is seen when the first time-out ends."""
    clock = Clock(monkeypatch)
    channel: Any = SimpleNamespace(address="HOST:1", start_info=lambda *_: None, last_response_at=0.0)
    status = waits.Status(channel, 5, 0.3, None, None)
    for extends, ends_at in ((True, 0.8), (False, 0.5)):
        clock.now = 0.0
        with pytest.raises(rw.errors.ReplayTimeoutError):
            waits.Wait({"a"}, 0.5, lambda _: None, extends=extends).run(lambda seconds: clock.look(seconds, status))
        assert clock.now == pytest.approx(ends_at)
    fault = rw.errors.StructureError, "no table `a`"
    with pytest.raises(rw.errors.StructureError, match="no table `a`"):
        waits.Wait({"a"}, 0.5, lambda _: None).run(lambda _: waits.Status(channel, 5, 0.0, None, fault))


def test_wait_until_the_run_has_ended_goes_on_while_answers_name_a_rate_limiter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, silent_from = Clock(monkeypatch), 1_000.0
    asked: list[float] = []
    questions = SimpleNamespace(
        explain=lambda _: "It does not answer.",
        ask=lambda: asked.append(clock.now),
        limited_at=lambda: max((at for at in asked if at < silent_from), default=-np.inf),
        limiter_text=lambda: "It is full.",
        others_progress=lambda: False,
    )
    monkeypatch.setattr(waits, "Questions", lambda channel, *_: SimpleNamespace(channel=channel, **vars(questions)))
    status = waits.Status(SimpleNamespace(address="HOST:1"), 5, 0.0, None, None)  # type: ignore[arg-type]
    logged: list[float] = []

    def look(seconds: float) -> waits.Status:
        logged.extend([clock.now] * len(caplog.messages))
        caplog.clear()
        return clock.look(seconds, status)

    with pytest.raises(rw.errors.ReplayTimeoutError) as late:
        waits.Wait({"a"}, 30.0, lambda _: None, extends=True, outlasts=True).run(look)
    assert logged[:6] == pytest.approx([10, 30, 70, 150, 310, 630])  # each time after twice as long
    assert str(late.value).endswith("It does not answer.")
    last = max(at for at in asked if at < silent_from)
    assert clock.now == pytest.approx(last + 30)


class Holder:
    def __init__(self) -> None:
        self.num_calls = 0
        add_sender(self)

    def send_due(self) -> None:
        self.num_calls += 1


@pytest.fixture
def _fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_fast_switches")
def test_observers_are_made_and_forgotten_while_a_learner_begins_to_wait() -> None:
    holders = [Holder() for _ in range(100)]
    others = threading.Thread(target=lambda: [Holder() for _ in range(5_000)])
    others.start()
    num_waits = 0
    while others.is_alive() or not num_waits:
        send_due()
        num_waits += 1
    others.join()
    assert {holder.num_calls for holder in holders} == {num_waits}
