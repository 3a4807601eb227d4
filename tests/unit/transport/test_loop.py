"""The loop of a process, without a server."""

from __future__ import annotations

import threading

import pytest

from reverb_writer.transport import loop


def test_two_threads_that_call_first_share_one_loop_and_leave_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)
    made: list[loop._Loop] = []

    class Slow(loop._Loop):
        """Is made by both threads before either can have it."""

        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            both.wait()

    monkeypatch.setattr(loop, "_loops", {})
    monkeypatch.setattr(loop, "_Loop", Slow)
    calls: list[int] = []
    called = threading.Barrier(3, timeout=60)

    def submit(number: int) -> None:
        loop.submit(calls.append, number)
        called.wait()

    for number in range(2):
        threading.Thread(target=submit, args=(number,)).start()
    called.wait()
    ended = threading.Event()
    loop.submit(ended.set)
    assert ended.wait(60)
    assert sorted(calls) == [0, 1]
    (used,) = loop._loops.values()
    assert [one.asyncio.is_closed() for one in made].count(True) == 1
    assert not used.asyncio.is_closed()
    used.asyncio.call_soon_threadsafe(used.asyncio.stop)
    assert used.has_ended.wait(60)
    used.asyncio.close()
