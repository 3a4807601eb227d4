"""Work in the background, and what waits for room or for a window: no thread too many, and no race."""

from __future__ import annotations

import collections
import itertools
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


def test_room_that_is_gone_again_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender would look for it without a pause, for as long as a rate limiter blocks."""
    now = 100.0
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    wait = waits.Wait("room", 60.0)
    assert not wait.had_room_for(0.002, has_room=True)
    assert wait.left_s() == pytest.approx(0.002)
    now += 0.01
    assert not wait.had_room_for(0.002, has_room=False)
    assert wait.left_s() > 0.1
    assert not wait.had_room_for(0.002, has_room=True)
    now += 0.01
    assert wait.had_room_for(0.002, has_room=True)


def test_wait_that_nothing_has_extended_names_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(100.0, 0.25)  # no two looks at the clock are the same
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: next(times)))
    flight = SimpleNamespace(tables=lambda: {"a"})
    questions = SimpleNamespace(explain=lambda: "It is slow.", ask=lambda **_: None)
    to: Any = SimpleNamespace(flight=flight, loss=None, questions=questions)
    wait = waits.Wait("flush", 0.5)
    error = None
    while error is None:
        error = wait.proceed(to, 0, 5)
    assert str(error) == "table `a`: 5 items unconfirmed after 0.5 s. It is slow."


def test_wait_until_the_run_has_ended_goes_on_while_answers_name_a_rate_limiter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, silent_from = 0.0, 1_000.0
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    asked: list[float] = []
    to: Any = SimpleNamespace(
        flight=SimpleNamespace(tables=lambda: {"a"}),
        channel=SimpleNamespace(address="HOST:1"),
        loss=None,
        questions=SimpleNamespace(
            explain=lambda: "It does not answer.",
            ask=lambda **_: asked.append(now),
            limited_at=lambda: max((at for at in asked if at < silent_from), default=-np.inf),
            limiter_text=lambda: "It is full.",
            others_progress=lambda: False,
        ),
    )
    wait = waits.Wait("room", 30.0, extends=True, outlasts=True)
    logged = []
    while (error := wait.proceed(to, 0.0, 5)) is None:
        logged += [now] * len(caplog.messages)
        caplog.clear()
        now += 1.0
    assert logged[:6] == [10, 30, 70, 150, 310, 630]  # after 10 s, and each time after twice as long
    assert str(error).endswith("It does not answer.")
    assert (
        max(at for at in asked if at < silent_from) + 30 <= now <= silent_from + 30 + 1
    )  # a question is due each second


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
