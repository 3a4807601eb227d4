"""Work in other threads: its outcome, the threads that do it, and their end."""

from __future__ import annotations

import queue
import threading

import pytest
from waiting import eventually

from reverb_writer.background import LateThread, in_background, start_thread

END_WITHIN_S = 30.0


def test_outcome_is_what_the_work_returns_or_raises() -> None:
    assert in_background(lambda: 3).result() == 3
    failed = in_background(lambda: 1 // 0)
    assert failed.wait(END_WITHIN_S)
    assert failed.done()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_work_that_takes_long_keeps_no_other_waiting() -> None:
    release: queue.SimpleQueue[int] = queue.SimpleQueue()
    slow = in_background(release.get)
    assert in_background(lambda: 1).result() == 1
    assert not slow.done()
    assert not slow.wait(0.01)
    release.put(2)
    assert slow.result() == 2


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
