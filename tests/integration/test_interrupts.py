"""Ctrl-C at every line of an observer's code: what was taken is written once, and what was not can be given again."""

from __future__ import annotations

import contextlib
import linecache
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from episodes import cut
from reading import Place

import reverb_writer as rw

_OWN_CODE = str(Path(rw.__file__).parent)
_NUM_STEPS = 5
_HOLDS_LOCK = re.compile(r"\s*with .*lock\b.*:$")


class Interrupts:
    """Raise KeyboardInterrupt at the n-th line of this package's code that this thread comes to.

    Not at one line event: after the block of `with lock:` comes one of that line, before `__exit__` gives the lock
    back. CPython raises nothing there: it looks for signals at the begin of a function, after a call, and where a loop
    goes back, and none of them lies between the block's last call, which is in the block, and the return of `__exit__`,
    by when a lock of C's is free. `test_signal_at_any_moment_leaves_no_lock_taken` sees that with signals.
    """

    def __init__(self) -> None:
        self.left = 0
        self._lines: dict[FrameType, int] = {}

    @contextlib.contextmanager
    def at(self, line: int) -> Iterator[None]:
        self.left = line
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            self._lines.clear()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OWN_CODE):
            return None
        if event == "line":
            number, last = frame.f_lineno, self._lines.get(frame, 0)
            self._lines[frame] = number
            if number < last and _HOLDS_LOCK.match(linecache.getline(frame.f_code.co_filename, number)):
                return self._trace
            self.left -= 1
            if not self.left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def test_signal_at_any_moment_leaves_no_lock_taken() -> None:
    lock = threading.RLock()
    num_signals = 0

    def hold(wanted: int) -> None:
        while num_signals < wanted:  # for a finalizer that is under way swallows an interrupt
            with lock:
                len("a call at the end of the block")
            with lock:
                for _ in range(2):
                    pass
            with lock:
                pass

    def is_free() -> bool:
        taken = lock.acquire(blocking=False)  # in a thread that does not hold it
        if taken:
            lock.release()
        return taken

    def interrupt(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        with ThreadPoolExecutor(1) as other:
            for number in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001 + number * 1e-6)
                    hold(number + 1)
                assert other.submit(is_free).result()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def interrupted(call: Callable[[], None], line: int) -> int:
    """Call, interrupted at a line of it; return how many lines were left, 0 if it was interrupted."""
    interrupts = Interrupts()
    with contextlib.suppress(KeyboardInterrupt), interrupts.at(line):
        call()
    return max(interrupts.left, 0)


def write_surely(observer: Any, step: Callable[..., None], line: int) -> int:
    """Make a call that is interrupted at a line; again, if the step was not taken."""
    before = observer.stats().steps
    left = interrupted(step, line) if line else 0
    if observer.stats().steps == before:
        step()
    return left


def sum_of_window(window: Any) -> float:
    return float(np.sum(window["n"]))


KINDS: dict[str, Callable[[Place], Any]] = {
    "drop": lambda place: rw.TrajectoryObserver(place.client, "a", 2, max_delay_s=1000, chunk_length=3),
    "tile": lambda place: rw.TrajectoryObserver(
        place.client, "a", 2, end_of_episode="tile", max_delay_s=1000, chunk_length=2
    ),
    "align_end": lambda place: rw.TrajectoryObserver(
        place.client, "a", 3, 3, end_of_episode="align_end", max_delay_s=1000
    ),
    "function": lambda place: rw.TrajectoryObserver(
        place.client, "a", 3, 2, sum_of_window, end_of_episode="cover", max_delay_s=1000
    ),
    "spanning": lambda place: rw.SequenceObserver(place.client, "a", 2, max_delay_s=1000, chunk_length=3),
    "episode": lambda place: rw.EpisodeObserver(place.client, "a", 9, max_delay_s=1000, chunk_length=2),
    "drop_oldest": lambda place: rw.TrajectoryObserver(
        place.client, "a", 2, max_delay_s=1000, chunk_length=3, on_block="drop_oldest"
    ),
}
MODES = {"drop": (2, 1), "tile": (2, 1), "align_end": (3, 3), "function": (3, 2), "drop_oldest": (2, 1)}


def windows_of(kind: str, first: int) -> list[list[int]]:
    steps = range(first, first + _NUM_STEPS)
    if kind == "episode":
        return [list(steps)]
    mode = "cover" if kind == "function" else "drop" if kind == "drop_oldest" else kind
    return cut(steps, rw.WindowSpec(*MODES[kind], mode).windows(_NUM_STEPS))


@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_at_any_line_of_an_episode_loses_and_doubles_no_window(place: Place, kind: str) -> None:
    expected: list[list[int]] = []
    number, line = 1, 0
    done = False
    with KINDS[kind](place) as observer:
        observer({"n": np.int64(0)}, end_of_episode=True)
        observer.reset(discard=True)
        if kind == "tile":
            expected.append([0, 0])
        if kind == "episode":
            expected.append([0])
        if kind == "function":
            expected.append([0, 0, 0])
        begin = number
        while not done:
            line += 1
            left = line
            if kind != "spanning":
                expected += windows_of(kind, number)
            for i in range(_NUM_STEPS):
                step = {"n": np.int64(number)}
                last = i == _NUM_STEPS - 1
                left = write_surely(observer, lambda step=step, last=last: observer(step, end_of_episode=last), left)
                number += 1
            done = left > 0
        observer.flush()
        stats = observer.stats()
        assert line > 100
        assert (stats.steps, stats.episodes) == (number, 1 + line)
        assert stats.dropped_items == 0
    if kind == "spanning":
        expected = cut(range(begin, number), rw.WindowSpec(2).windows(number - begin))
    if kind == "function":
        samples = {sample.info.key: sample for sample in place.client.sample("a", len(expected))}
        assert [sample.data["n"].tolist() for sample in samples.values()] == expected
        assert all(sample.info.priority == sample.data["n"].sum() for sample in samples.values())
    else:
        assert place.column() == expected


@pytest.mark.slow
@pytest.mark.parametrize("priority", [1.0, sum_of_window], ids=["constant", "function"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
def test_interrupt_at_any_line_of_many_environments_loses_and_doubles_no_window(
    place: Place, priority: Any, some: bool
) -> None:
    expected: list[list[int]] = []
    number, line = 0, 0
    done = False
    envs = np.array([True, not some, True])
    with rw.VectorObserver(place.client, "a", 2, 1, priority, num_envs=3, max_delay_s=1000, chunk_length=3) as observer:
        observer({"n": np.zeros(3, np.int64)}, end_of_episode=[True] * 3)
        while not done:
            line += 1
            left = line
            first = number + 1
            for i in range(_NUM_STEPS):
                number += 1
                step, last = {"n": number + np.array([0, 1_000_000, 2_000_000])}, np.full(3, i == _NUM_STEPS - 1)
                left = write_surely(
                    observer, lambda step=step, last=last: observer(step, end_of_episode=last, env_mask=envs), left
                )
            for env in np.flatnonzero(envs):
                expected += [[n + env * 1_000_000, n + 1 + env * 1_000_000] for n in range(first, number)]
            done = left > 0
        observer.flush()
        stats = observer.stats()
        assert line > 100
        assert (stats.steps, stats.episodes) == (3 + number * envs.sum(), 3 + line * envs.sum())
    assert sorted(place.column()) == sorted(expected)


@pytest.mark.parametrize("kind", ["drop", "tile", "episode", "spanning"])
def test_interrupted_close_accounts_for_every_window_and_ends(place: Place, kind: str) -> None:
    for line in range(1, 80):
        observer = KINDS[kind](place)
        for number in range(7):
            observer({"n": np.int64(number)}, end_of_episode=number == 4)
        interrupted(observer.close, line)
        observer.close()
        stats = observer.stats()
        assert stats.items == stats.acknowledged_items + stats.dropped_items
        assert stats.pending_items == 0
        with pytest.raises(rw.ClosedError):
            observer({"n": np.int64(0)}, end_of_episode=False)


def test_episode_after_a_long_one_that_was_cut_off_is_written(place: Place) -> None:
    def episode(num_steps: int) -> rw.Episode:
        zeros = np.zeros(num_steps)
        return rw.Episode(observations=np.arange(num_steps + 1), actions=zeros, rewards=zeros, len_lookback_buffer=0)

    line, written = 1, 0
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        observer.write_episode(episode(2))
        while not interrupted(lambda: observer.write_episode(episode(6)), line):
            observer.write_episode(episode(1))
            written += 1
            line += 7
        observer.flush()
        assert written > 50
        assert observer.stats().items == 1 + written
