"""Ctrl-C at any moment of an observer's call: the step is taken or it is not, and the caller can tell which.

`stats().steps` counts the steps that were taken. A caller that is interrupted gives the other ones again; then each
window is written once.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from episodes import cut, windows_after_reset
from interrupting import EachMoment, await_end_of_threads
from kinds import both_ways
from reading import Place
from server_process import HostedServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.client import same_process

# An interrupt in a function that Python calls when it deletes something is printed, and has no other effect.
pytestmark = [both_ways, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

_NUM_SIGNALS = 300  # of each kind
_END_WITHIN_S = 60.0

BLANK = rw.Episode(observations=np.zeros(2, np.int64), actions=np.zeros(1), rewards=np.zeros(1), len_lookback_buffer=0)

Interrupt = Callable[[Callable[[], object]], None]
"""Makes a call, and interrupts it at some moment, or not."""


class Signals:
    """Interrupts calls by a timer's real signals at random moments."""

    def __init__(self) -> None:
        self.num_interrupted = 0
        self._chance, self._is_inside, self._typical_s = random.Random(7), False, 1e-4  # noqa: S311  # no secrets

    def raise_interrupt(self, *_: object) -> None:
        if self._is_inside:
            self._is_inside = False
            raise KeyboardInterrupt

    def __call__(self, call: Callable[[], object]) -> None:
        began_at = time.perf_counter()
        try:
            try:
                self._is_inside = True
                signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, 2 * self._typical_s))
                call()
            finally:
                self._is_inside = False
        except KeyboardInterrupt:
            self.num_interrupted += 1
        else:
            self._typical_s = 0.9 * self._typical_s + 0.1 * (time.perf_counter() - began_at)


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals()
    former = signal.signal(signal.SIGALRM, made.raise_interrupt)
    yield made
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, former)


def nest(numbers: Any) -> dict[str, Any]:
    """Return steps as an `Episode` has them, with these numbers."""
    count = len(numbers)
    steps = {name: np.repeat(leaf[:1], count) for name, leaf in BLANK.steps().items()}
    return {**steps, "observation": np.asarray(numbers, np.int64)}


def step_of(number: int) -> dict[str, Any]:
    return {name: leaf[0] for name, leaf in nest([number]).items()}


def sum_of_window(window: Any) -> float:
    return float(np.sum(window["observation"]))


def trajectories(length: int, stride: int = 1, mode: str = "drop", **options: Any) -> tuple[Any, rw.WindowSpec]:
    """Return what observes windows, written to table `a`, and the windows."""
    options = {"end_of_episode": mode, **options}
    make = functools.partial(rw.TrajectoryObserver, table="a", sequence_length=length, stride_length=stride, **options)
    return make, rw.WindowSpec(length, stride, mode)


KINDS: dict[str, tuple[Any, rw.WindowSpec]] = {
    "drop": trajectories(2),
    "tile": trajectories(2, 1, "tile", chunk_length=2),
    "align_end": trajectories(3, 3, "align_end"),
    "function": trajectories(3, 2, "cover", priority=sum_of_window),
    "episode": (
        functools.partial(rw.EpisodeObserver, table="a", max_sequence_length=20),
        rw.WindowSpec.whole_episode(),
    ),
}


class Caller:
    """Gives numbered steps to an observer of one environment, and keeps the windows that it must write."""

    def __init__(self, observer: Any, spec: rw.WindowSpec, interrupt: Interrupt) -> None:
        self.observer, self.spec, self.interrupt = observer, spec, interrupt
        self.windows: list[list[int]] = []
        self.num_episodes = 0
        self._next = 1
        self._missing = 0  # steps of episodes that were interrupted
        self._open: list[int] = []  # steps of the episode under way

    def numbers(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))

    def surely(self, call: Callable[[], object]) -> int:
        """Make a call, interrupted; return how many steps it has taken."""
        before = self.observer.stats().steps
        self.interrupt(call)
        taken: int = self.observer.stats().steps - before
        return taken

    def step(self, *, last: bool = False) -> None:
        """Give a step, again if it was not taken."""
        (number,) = self.numbers(1)
        call = functools.partial(self.observer, step_of(number), end_of_episode=last)
        taken = self.surely(call)
        assert taken in (0, 1)
        if not taken:
            call()
        self._open.append(number)
        if last:
            self._end(self.spec.windows(len(self._open)))

    def extend(self, count: int) -> None:
        """Give several steps in one call, and again those that were not taken."""
        numbers = self.numbers(count)
        taken = self.surely(lambda: self.observer.extend(nest(numbers)))
        assert 0 <= taken <= count
        self.observer.extend(nest(numbers[taken:]))
        self._open += numbers

    def write_episode(self, count: int) -> None:
        """Write a whole episode; if it is interrupted, its windows that were complete stay."""
        numbers = self.numbers(count)
        zeros = np.zeros(count - 1)
        episode = rw.Episode(observations=np.array(numbers), actions=zeros, rewards=zeros, len_lookback_buffer=0)
        taken = self.surely(lambda: self.observer.write_episode(episode))
        assert 0 <= taken <= count
        self._missing += count - taken
        self._open = numbers[:taken]
        if taken == count:
            self._end(self.spec.windows(count))
        elif taken:
            self._discard()

    def reset(self, *, discard: bool) -> None:
        """End the episode, again if it has not ended."""
        before = self.observer.stats().episodes
        self.interrupt(lambda: self.observer.reset(discard=discard))
        ended = self.observer.stats().episodes - before
        assert ended in (0, bool(self._open))
        if not ended:
            self.observer.reset(discard=discard)
        if not self._open:
            return
        if discard:
            self._discard()
        else:
            count, is_whole = len(self._open), self.spec.sequence_length is None
            self._end(self.spec.windows(count) if is_whole else windows_after_reset(self.spec, count))

    def flush(self) -> None:
        """Flush; an interrupt does not matter."""
        self.interrupt(self.observer.flush)

    def reopen(self) -> None:
        """Close and open again; the episode under way is lost but for its windows that were complete."""
        self.interrupt(self.observer.close)
        self.observer.close()
        stats = self.observer.stats()
        assert (stats.pending_items, stats.dropped_items) == (0, 0)
        assert stats.items == stats.acknowledged_items
        self.interrupt(self.observer.open)
        self.observer.open()
        if self._open:
            self._discard()

    def check(self, place: Place) -> None:
        """End the episode, flush, and see that each window is there once, in order."""
        if self._open:
            self.observer.reset(discard=True)
            self._discard()
        self.observer.flush()
        stats = self.observer.stats()
        assert (stats.steps, stats.episodes) == (self._next - 1 - self._missing, self.num_episodes)
        found = {sample.info.key: sample for sample in place.client.sample("a", stats.items)}.values()
        assert [sample.data["observation"].tolist() for sample in found] == self.windows
        assert len(found) == stats.items == stats.acknowledged_items
        if self.observer._target.priority is sum_of_window:
            assert all(sample.info.priority == sample.data["observation"].sum() for sample in found)

    def _end(self, windows: Any) -> None:
        self.windows += cut(self._open, windows)
        self.num_episodes += 1
        self._open = []

    def _discard(self) -> None:
        length, stride = self.spec.sequence_length, self.spec.stride_length
        self._end([] if length is None else rw.WindowSpec(length, stride).windows(len(self._open)))


def call_all(caller: Caller) -> None:
    caller.step()
    caller.step()
    caller.extend(3)
    caller.step(last=True)
    caller.write_episode(4)
    caller.extend(4)
    caller.reset(discard=True)
    caller.extend(4)
    caller.reset(discard=False)
    caller.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_interrupt_at_any_moment_of_a_call_loses_and_doubles_nothing(place: Place, kind: str) -> None:
    interrupt = EachMoment(40)
    with KINDS[kind][0](place.client) as observer:
        caller = Caller(observer, KINDS[kind][1], interrupt)
        for _ in interrupt:
            call_all(caller)
        assert interrupt.moment > 20
        caller.check(place)


@pytest.mark.parametrize("kind", ["drop", "episode"])
def test_interrupt_at_any_moment_of_a_close_loses_and_doubles_nothing(place: Place, kind: str) -> None:
    interrupt = EachMoment(40)
    with KINDS[kind][0](place.client) as observer:
        caller = Caller(observer, KINDS[kind][1], interrupt)
        for moment in interrupt:
            caller.extend(3)
            caller.step(last=True)
            caller.extend(moment % 3)
            caller.reopen()
        assert interrupt.moment > 20
        caller.check(place)
    await_end_of_threads(_END_WITHIN_S)


@pytest.mark.slow
@pytest.mark.only_server("local", "an interrupt meets the caller's thread, whatever the server is")
@pytest.mark.parametrize("kind", KINDS)
def test_signals_at_random_moments_lose_and_double_nothing(place: Place, kind: str, signals: Signals) -> None:
    with KINDS[kind][0](place.client, max_delay_s=0.01) as observer:
        caller = Caller(observer, KINDS[kind][1], signals)
        while signals.num_interrupted < _NUM_SIGNALS:
            call_all(caller)
            caller.reopen()
        caller.check(place)
    await_end_of_threads(_END_WITHIN_S)


def write_three(place: Place, interrupt: Interrupt, go_on: Iterator[object], **options: Any) -> None:
    """Write random episodes of three environments, some of which have a step in each call."""
    chance = np.random.default_rng(1)
    windows: list[list[int]] = []
    number = num_steps = 0
    with rw.TrajectoryObserver(place.client, "a", 2, num_envs=3, **options) as observer:
        started: list[list[int]] = [[], [], []]
        for _ in go_on:
            for _ in range(4):
                number += 1
                mask, ends = chance.random(3) < 2 / 3, chance.random(3) < 1 / 4
                before = observer.stats().steps
                call = functools.partial(observer, {"n": number + np.arange(3) * 1_000_000}, ends, mask)
                interrupt(call)
                if (taken := observer.stats().steps - before) == 0:
                    call()
                assert taken in (0, mask.sum())
                num_steps += int(mask.sum())
                for env in np.flatnonzero(mask):
                    started[env].append(number + int(env) * 1_000_000)
                    windows += [started[env][-2:]] * (len(started[env]) > 1)
                    if ends[env]:
                        started[env] = []
            env = int(chance.integers(3))
            before = observer.stats().episodes
            reset = functools.partial(observer.reset, discard=True, env_ids=[env])
            interrupt(reset)
            if observer.stats().episodes == before:
                reset()
            started[env] = []
        observer.flush()
        stats = observer.stats()
        assert stats.steps == num_steps
        assert stats.items == stats.acknowledged_items == len(windows)
        assert sorted(place.column()) == sorted(windows)


@pytest.mark.parametrize("priority", [1.0, lambda window: float(window["n"].sum())], ids=["number", "function"])
def test_interrupt_of_a_call_of_many_environments_loses_and_doubles_nothing(place: Place, priority: Any) -> None:
    interrupt = EachMoment(40)
    write_three(place, interrupt, iter(interrupt), priority=priority)
    assert interrupt.moment > 20


@pytest.mark.slow
@pytest.mark.only_server("local", "as above")
def test_signals_at_random_moments_of_many_environments_lose_and_double_nothing(place: Place, signals: Signals) -> None:
    write_three(place, signals, iter(lambda: signals.num_interrupted < _NUM_SIGNALS, False), max_delay_s=0.01)


def test_interrupt_at_any_moment_of_the_first_step_leaves_no_thread(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_process, "EXIT_S", 60.0)  # a busy machine takes longer to deliver what was forgotten
    interrupt = EachMoment(40)
    for moment in interrupt:
        observer = rw.TrajectoryObserver(place.client, "a", 1)
        write = functools.partial(observer, {"n": np.int64(moment)}, end_of_episode=False)
        interrupt(write)
        if not observer.stats().steps:
            write()
        if moment % 2:
            observer.close()
            assert observer.stats().acknowledged_items == 1
        else:
            del observer, write
            gc.collect()  # not in the next call, whose interrupt may meet the finalizer
        eventually(lambda: place.client.server_info()["a"].current_size == 1)
        assert place.column() == [[moment]]
    assert interrupt.moment > 50
    await_end_of_threads(_END_WITHIN_S)


@pytest.mark.parametrize("num_envs", [None, 2])
def test_interrupt_at_any_moment_of_a_step_that_waits_takes_it_or_not(
    replay_server: Callable[..., HostedServer], num_envs: int | None
) -> None:
    interrupt, size = EachMoment(40), num_envs or 1
    server = replay_server(rw.TableConfig.queue("replay", 4 * size))
    with (
        rw.Client(server.address) as client,
        rw.TrajectoryObserver(
            client, "replay", 1, num_envs=num_envs, max_in_flight_items=4 * size, timeout_s=0.02
        ) as observer,
    ):
        number = 0
        found: list[int] = []
        ends = [True] * size if num_envs else True

        def write() -> None:
            numbers = number * size + np.arange(size)
            observer({"n": numbers if num_envs else numbers[0]}, end_of_episode=ends)

        for _ in interrupt:
            with contextlib.suppress(rw.errors.ReplayTimeoutError):
                while True:
                    write()
                    number += 1
            with contextlib.suppress(rw.errors.ReplayTimeoutError):
                interrupt(write)
            assert observer.stats().steps == number * size
            # On a busy machine no call may have found room in time, several times in a row: then fewer are there.
            if num_samples := min(2 * size, number * size - len(found)):
                found += [int(sample.data["n"][0]) for sample in client.sample("replay", num_samples)]
        if num_left := number * size - len(found):
            found += [int(sample.data["n"][0]) for sample in client.sample("replay", num_left)]
        assert sorted(found) == list(range(number * size))
    assert interrupt.moment > 20
