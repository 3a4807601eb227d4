"""The soak's workers: actors that log what was acknowledged, learners that log what they have sampled.

    python -m soak.worker actor ADDRESS FOLDER NAME SEED
    python -m soak.worker learner ADDRESS FOLDER NAME SEED

SIGINT, and an alarm that an actor sets itself, interrupt the call of the library that is under way: `KeyboardInterrupt`
is caught, and the same observer or dataset is used on. SIGUSR1 asks for a fork: the child uses what it has inherited,
ends as programs do, and is waited for. SIGTERM ends a worker;
SIGUSR2 has it tell where it is.

An item is a window of `LENGTH` numbers that follow each other, and is named by the first. No two are alike.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import reverb_writer as rw
from soak.books import LENGTH, Journal

TABLES = ("replay", "queue")
EPISODES, WINDOWS = 10, 2  # of a batch, and of an episode
PAUSE_S = 0.05
PATIENCE_S = 60.0
LEARNER_WAITS_S = 5.0
BATCH_SIZE = 32
_LOOKS = 5
CHILD_ENDS_WITHIN_S = 60.0
ALARM_CHANCE, ALARM_WITHIN_S = 0.5, 0.01
_LATER = (rw.errors.ReplayTimeoutError, rw.errors.ServerUnavailableError)


class Signals:
    """The signals received by this process. SIGINT and SIGALRM raise only inside `interrupts`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._forks = 0
        self.num_interrupted = 0
        self._inside = False
        signal.signal(signal.SIGTERM, lambda *_: self.ended.set())
        signal.signal(signal.SIGUSR1, self._fork)
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._interrupt)

    def interrupts(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[bool, Any]:
        """Call a function; return whether it ended without an interrupt, and its result."""
        value = None
        try:
            try:
                self._inside = True
                value = call(*arguments, **options)
            finally:
                self._inside = False
        except KeyboardInterrupt:
            self.num_interrupted += 1
            return False, None
        return True, value

    def wants_fork(self) -> bool:
        """Return whether a fork was asked for since the last call."""
        wanted, self._forks = self._forks > 0, 0
        return wanted

    def _interrupt(self, *_: object) -> None:
        if self._inside:
            self._inside = False
            raise KeyboardInterrupt

    def _fork(self, *_: object) -> None:
        self._forks += 1


class Children:
    """Forked children; a child that does not end is a fault."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._since: dict[int, float] = {}

    def fork(self) -> bool:
        """Fork; return whether this is the child."""
        number = os.fork()
        if number:
            self._since[number] = time.monotonic()
        return not number

    def look(self, *, wait: bool = False) -> None:
        """Reap children that have ended, and kill overdue ones; with `wait`, until none is left."""
        while self._since:
            for number, since in list(self._since.items()):
                ended, status = os.waitpid(number, os.WNOHANG)
                if ended and status:
                    self._journal.fault(f"a forked child ended with {os.waitstatus_to_exitcode(status)}")
                elif not ended and time.monotonic() - since > CHILD_ENDS_WITHIN_S:
                    self._journal.fault(f"a forked child did not end within {CHILD_ENDS_WITHIN_S:g} s")
                    os.kill(number, signal.SIGUSR2)  # where it is
                    time.sleep(1)
                    os.kill(number, signal.SIGKILL)
                    os.waitpid(number, 0)
                    ended = number
                if ended:
                    del self._since[number]
            if not wait:
                return
            time.sleep(PAUSE_S)


class Actor:
    """Writes episodes through one observer, and replaces it only if it has failed."""

    def __init__(self, client: rw.Client, journal: Journal, first: int, chance: random.Random) -> None:
        self._client, self._journal, self._chance = client, journal, chance
        self._next = first
        self._certain = self._maybe = 0  # items of the observer: those that are whole, and interrupted calls
        self.observer = self._new_observer()

    def write_batch(self, call: Callable[..., tuple[bool, Any]]) -> None:
        """Write and flush a batch, and log that. `call` makes the calls of the library."""
        since, whole = time.time(), []
        for _ in range(EPISODES):
            whole += self._write_episode(call)
        while not self._flush(call):
            pass
        self._check_counts()
        self._journal.confirmed(since, time.time(), whole)

    def _write_episode(self, call: Callable[..., tuple[bool, Any]]) -> list[int]:
        """Return the first numbers of the windows that are certainly complete."""
        whole: list[int] = []
        first = self._next
        self._next += LENGTH * WINDOWS
        for number in range(first, self._next):
            last = number == self._next - 1
            if not self._step(call, number, last=last):
                self._maybe += 1
                while not call(self.observer.reset, discard=True)[0]:
                    pass
                break
            if (number - first) % LENGTH == LENGTH - 1:
                whole.append(number - LENGTH + 1)
        self._certain += len(whole)
        return whole

    def _step(self, call: Callable[..., tuple[bool, Any]], number: int, *, last: bool) -> bool:
        while True:
            try:
                done, _ = call(self.observer, {"number": np.int64(number)}, end_of_episode=last)
            except _LATER:  # no room for long, or the server is away: the step was not taken
                continue
            return done

    def _flush(self, call: Callable[..., tuple[bool, Any]]) -> bool:
        try:
            done, _ = call(self.observer.flush)
        except _LATER:  # a server that is away for long: all is kept
            return False
        return done

    def _check_counts(self) -> None:
        """Check that the observer's counters agree: all that was flushed is acknowledged.

        On a busy machine the counters may be those of an earlier call, so they are read again.
        """
        tables = len(TABLES)
        least, most = tables * self._certain, tables * (self._certain + self._maybe)
        for _ in range(_LOOKS):
            stats = self.observer.stats()
            if not stats.pending_items and stats.acknowledged_items == stats.items and least <= stats.items <= most:
                return
        self._journal.fault(f"after a flush of {least} to {most} items an observer counts {stats}")
        self._certain = self._maybe = 0
        self.observer = self._new_observer()

    def failed(self, error: BaseException) -> None:
        self._journal.fault(f"{type(error).__name__}: {error}")
        self.close()
        self.observer = self._new_observer()

    def close(self) -> None:
        """Close the observer; items that it cannot deliver were not acknowledged."""
        try:
            self.observer.close()
        except _LATER:
            pass
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a fault
            self._journal.fault(f"close: {type(error).__name__}: {error}")

    def _new_observer(self) -> Any:
        self._certain = self._maybe = 0
        while True:
            try:
                return rw.TrajectoryObserver(self._client, list(TABLES), LENGTH, LENGTH)
            except _LATER:
                time.sleep(PAUSE_S)


def act(address: str, folder: Path, name: str, chance: random.Random, signals: Signals) -> None:
    """Write in two threads. Interrupts and forks hit the main one; the other one writes continuously."""
    first = (int(name) << 56) | (int(time.time() * 1000) << 12)
    journals = [Journal(folder / f"actor-{name}{half}") for half in "ab"]
    children = Children(journals[0])

    def plain(function: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[bool, Any]:
        return True, function(*arguments, **options)

    with rw.Client(address, timeout_s=PATIENCE_S) as client:
        main, other = (Actor(client, journal, first + (half << 55), chance) for half, journal in enumerate(journals))

        def write_on() -> None:
            while not signals.ended.is_set():
                _guarded(other, plain)
                time.sleep(PAUSE_S / 10)
            other.close()

        thread = threading.Thread(target=write_on)
        thread.start()
        while not signals.ended.is_set():
            if chance.random() < ALARM_CHANCE:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, ALARM_WITHIN_S))
            _guarded(main, signals.interrupts)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if signals.wants_fork() and children.fork():
                _use_as_child(main.observer, other.observer, chance)
                return
            children.look()
            time.sleep(PAUSE_S * chance.random())
        thread.join()
        main.close()
    children.look(wait=True)


def _guarded(actor: Actor, call: Callable[..., tuple[bool, Any]]) -> None:
    try:
        actor.write_batch(call)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is a fault
        actor.failed(error)


def _use_as_child(main: Any, other: Any, chance: random.Random) -> None:
    """Call what a child may call: it is refused or has no effect, and never waits."""
    for observer in (main, other):
        deed = chance.randrange(3)
        if deed == 1:
            observer.close()
        elif deed == 2:  # the third deed
            try:
                observer({"number": np.int64(-1)})
            except rw.errors.ClosedError:
                continue
            raise RuntimeError("a forked child could write")


def learn(address: str, folder: Path, name: str, chance: random.Random, signals: Signals) -> None:
    """Sample from both tables despite interrupts, and set priorities; samples of the queue are logged."""
    journal = Journal(folder / f"learner-{name}")
    children = Children(journal)
    with rw.Client(address, timeout_s=PATIENCE_S) as client:
        replay, queue = _dataset(client, "replay"), _dataset(client, "queue")
        num_got = 0
        while not signals.ended.is_set():
            try:
                batch = signals.interrupts(next, queue)[1]
                if batch is not None:
                    num_got += len(batch.info.keys)
                    journal.sampled(time.time(), batch.data["number"])
                batch = signals.interrupts(next, replay)[1]
                if batch is not None:
                    priorities = [chance.random() for _ in batch.info.keys]
                    signals.interrupts(replay.update_priorities, batch.info.keys, priorities)
            except _LATER:
                pass
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a fault
                journal.fault(f"{type(error).__name__}: {error}")
            if signals.wants_fork() and children.fork():
                for dataset in chance.choice([(), (queue, replay)]):
                    dataset.close()
                return
            children.look()
        for dataset in (queue, replay):
            dataset.close()
        stats = queue.stats()
    at_interrupts = stats.received_samples - num_got - stats.ready_samples - stats.skipped_samples
    if not 0 <= at_interrupts <= signals.num_interrupted * BATCH_SIZE:
        journal.fault(f"{num_got} samples were handed out with {signals.num_interrupted} interrupts, of {stats}")
    journal.lost(stats.lost_samples, stats.ready_samples, max(at_interrupts, 0))
    children.look(wait=True)


def _dataset(client: rw.Client, table: str) -> rw.ReplayDataset:
    while True:
        try:
            return rw.ReplayDataset(client, table, BATCH_SIZE, timeout_s=LEARNER_WAITS_S)
        except _LATER:
            time.sleep(PAUSE_S)


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    signals = Signals()
    role, address, folder, name, seed = sys.argv[1:]
    work = act if role == "actor" else learn
    work(address, Path(folder), name, random.Random(seed), signals)  # noqa: S311  # no secrets


if __name__ == "__main__":
    main()
