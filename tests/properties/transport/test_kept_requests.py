"""Whatever a server does, each confirmed item is there once after a restart, or it is counted.

The model is a server with one table that removes its oldest item: a list of numbers, its counts, its checkpoints.
"""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reverb_writer.tables.saves import NO_SAVE, Saves
from reverb_writer.tables.table_info import RateLimiterInfo, ServerInfo, TableInfo
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.transport.kept_requests import KeptRequests

ROW_BYTES = 40
NEVER = float("inf")


def request(first: int, count: int) -> InsertRequest:
    """Return a request of `count` items with keys from `first` on, without chunks."""
    return InsertRequest(frozenset(["t"]), first, [np.zeros((count, ROW_BYTES), np.uint8)], {})


@dataclass
class Table:
    """A table of `max_size` numbers that removes the oldest, as a server and its checkpoints have it."""

    max_size: int
    items: list[int] = field(default_factory=list)
    num_inserts: int = 0
    num_deleted: int = 0
    begun: int = 0
    safe: int = 0
    life: int = 0
    restored: tuple[str, int] = NO_SAVE

    def insert(self, keys: list[int]) -> None:
        for key in keys:
            if key not in self.items:
                self.items.append(key)
                self.num_inserts += 1
        self.num_deleted += max(len(self.items) - self.max_size, 0)
        del self.items[: -self.max_size]

    def copy(self) -> Table:
        return replace(self, items=[*self.items])

    def restore(self, life: int) -> Table:
        """Return the table of the server that restores this checkpoint."""
        return replace(self, items=[*self.items], life=life, restored=(f"life{self.life}", self.begun))

    def info(self) -> ServerInfo:
        limiter = RateLimiterInfo(1, -NEVER, NEVER, 1, self.num_inserts, 0)
        table = TableInfo(
            "t", "uniform", "fifo", self.max_size, 0, len(self.items), 0, self.num_deleted, 0, limiter, None, {}
        )
        return ServerInfo(
            1, {"t": table}, time.monotonic(), Saves(self.begun, self.safe, f"life{self.life}", self.restored)
        )


class Writer:
    """A writer: its confirmed items, and a question that the server may answer late."""

    def __init__(self, number: int, max_bytes: int) -> None:
        self.next_key, self.confirmed = number << 32, list[int]()
        self.counts: collections.Counter[str] = collections.Counter()
        self.kept = KeptRequests(max_bytes, self.counts)
        self.flight = InFlight()
        self.answer: ServerInfo | None = None

    def write(self, table: Table, count: int) -> None:
        self.flight.add(request(self.next_key, count))
        self.deliver(table)
        self.confirmed += range(self.next_key, self.next_key + count)
        self.next_key += count

    def deliver(self, table: Table) -> None:
        """Have the server insert and confirm all items in flight."""
        while self.flight.has_queued:
            self.flight.take_message(1 << 20)
            for sent in [*self.flight._sent]:  # the items without their encoding
                keys = [sent.first_key + int(row) for row in np.flatnonzero(sent._is_pending)]
                table.insert(keys)
                self.flight.acknowledge(np.array(keys, np.uint64))
                for finished in self.flight.take_finished():
                    self.kept.add(finished)


class Restarts(RuleBasedStateMachine):
    """Writers on a server that saves, fails to save, is killed, and may restore a checkpoint that is not the newest."""

    @initialize(
        max_size=st.sampled_from([6, 10_000]),
        max_bytes=st.sampled_from([10 * ROW_BYTES, 1 << 30]),
        safe_after=st.sampled_from([1, 2]),
    )
    def begin(self, max_size: int, max_bytes: int, safe_after: int) -> None:
        self.table = Table(max_size)
        self.writers = [Writer(number, max_bytes) for number in (1, 2)]
        for writer in self.writers:
            writer.kept.seen(self.table.info())
        self.safe_after = safe_after
        self.checkpoints: list[Table] = []  # newest last
        self.saving: Table | None = None
        self.order: list[int] = []  # confirmed items, as they were inserted
        self.num_lives, self.has_lost = 0, False
        self.gone: set[int] = set()  # items of before a reset

    @rule(number=st.sampled_from([0, 1]), count=st.integers(1, 5))
    def write(self, number: int, count: int) -> None:
        writer = self.writers[number]
        writer.write(self.table, count)
        self.order += writer.confirmed[-count:]

    @rule(number=st.sampled_from([0, 1]))
    def ask(self, number: int) -> None:
        writer = self.writers[number]
        writer.kept.asked()
        writer.answer = self.table.info()

    @precondition(lambda self: any(writer.answer for writer in self.writers))
    @rule()
    def answer(self) -> None:
        for writer in self.writers:
            if writer.answer is not None:
                writer.kept.answered(writer.answer)
                writer.answer = None

    @rule()
    def begin_save(self) -> None:
        self.table.begun += 1
        self.saving = self.table.copy()

    @precondition(lambda self: self.saving is not None)
    @rule(is_good=st.booleans())
    def end_save(self, *, is_good: bool) -> None:
        if is_good and self.saving is not None:
            self.checkpoints.append(self.saving)
        self.saving = None
        self.publish()

    def publish(self) -> None:
        if len(self.checkpoints) >= self.safe_after:
            self.table.safe = max(self.table.safe, self.checkpoints[-self.safe_after].begun)

    @rule()
    def reset(self) -> None:
        """Reset the table; both writers see it before anything else is inserted."""
        self.gone |= set(self.order)
        self.order = []
        self.table.items, self.table.num_inserts, self.table.num_deleted = [], 0, 0
        self.saving = None
        self.checkpoints = []  # a checkpoint of before the reset would bring the items back
        for number in (0, 1):
            self.answer() if any(writer.answer for writer in self.writers) else None
            self.ask(number)
            self.answer()

    @rule(
        num_damaged=st.integers(0, 3),
        is_published=st.booleans(),
        num_between=st.integers(0, 8),
        num_unseen=st.integers(0, 4),
    )
    def restart(self, *, num_damaged: int, is_published: bool, num_between: int, num_unseen: int) -> None:
        """Kill the server; both writers come back, the first one writes on before the second one is back.

        Before they are back, the server may live another life, in which it saves.
        """
        self.restore(num_damaged)
        for _ in range(num_unseen):
            self.begin_save()
            self.end_save(is_good=True)
        if num_unseen:
            self.restore(0)
        restored = {*self.table.items}
        if is_published:
            self.publish()
        for number, writer in enumerate(self.writers):
            writer.answer = None
            writer.flight.requeue()
            writer.flight.send_again(writer.kept.restarted(self.table.info()))
            writer.deliver(self.table)
            if not number and num_between:
                self.write(0, num_between)
            writer.kept.asked()
            writer.kept.answered(self.table.info())
        self.order = [key for key in self.order if key in restored or key not in self.gone]
        self.check()

    def restore(self, num_damaged: int) -> None:
        self.saving = None
        self.num_lives += 1
        self.has_lost = self.has_lost or num_damaged >= self.safe_after
        del self.checkpoints[max(len(self.checkpoints) - num_damaged, 0) :]
        found = self.checkpoints[-1] if self.checkpoints else None
        empty = Table(self.table.max_size, life=self.num_lives)
        self.table = empty if found is None else found.restore(self.num_lives)

    def check(self) -> None:
        """Of the newest `max_size` confirmed items, each is there, or counted."""
        newest = self.order[-self.table.max_size :]
        missing = {*newest} - {*self.table.items}
        counted = sum(writer.counts["uncovered_items"] + writer.counts["displaced_items"] for writer in self.writers)
        assert len(missing) <= counted
        if self.table.max_size > len(self.order) and self.writers[0].kept.max_bytes == 1 << 30 and not self.has_lost:
            assert not missing

    @invariant()
    def has_no_doubles(self) -> None:
        if hasattr(self, "table"):
            assert len({*self.table.items}) == len(self.table.items)
            assert not self.gone & {*self.table.items}
            for writer in self.writers:
                assert not writer.flight.pending
                assert writer.flight.again_bytes == 0
                assert writer.kept.num_bytes <= max(writer.kept.max_bytes, 0)


TestRestarts: Any = Restarts.TestCase
TestRestarts.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
