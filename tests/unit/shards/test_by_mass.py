"""Whose samples come next when servers are sampled as one: each draw is given, and its outcome worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from shard_feeds import BATCH_SIZE, MAX_SAMPLES, NOW, Shards, table_info

from reverb_writer.protocol.responses import Samples
from reverb_writer.shards.by_mass import ByMass, Mass

UNIFORM, PRIORITIZED = table_info("uniform"), table_info("prioritized")
READ_ONCE = table_info("uniform", max_times_sampled=1)


class Draws:
    """Draws what it is given, in the place of a random generator."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[float]]] = []  # samples and shares of each draw
        self.next: list[list[int]] = []

    def multinomial(self, num_samples: int, shares: Sequence[float]) -> npt.NDArray[np.int64]:
        self.seen.append((num_samples, [*shares]))
        return np.array(self.next.pop(0))

    def permutation(self, num_samples: int) -> npt.NDArray[np.int64]:
        return np.arange(num_samples)[::-1]


class Mixed(Shards):
    """Servers that are read by mass; so many samples of each that has items have arrived."""

    def __init__(self, table: Any, *sizes: int, num_waiting: int = 4) -> None:
        self.rule, self.draws = ByMass(table, BATCH_SIZE, MAX_SAMPLES), Draws()
        self.rule._rng = self.draws  # type: ignore[assignment]  # the draws are given
        super().__init__(self.rule, table, *sizes)
        self.proceed()
        for number, (name, size) in enumerate(zip("abc", sizes, strict=False)):
            if size:
                num_samples = min(num_waiting, size) if table.max_times_sampled else num_waiting
                self.receive(name, range(10 * number, 10 * number + num_samples), size)

    def mass(self, name: str) -> Mass:
        return self.rule._masses[self.of(name)]

    def due(self) -> list[int]:
        return [one.due for one in self.feeds.present]

    def waiting(self) -> list[int]:
        return [one.num_waiting for one in self.feeds.present]

    def take(self, num_samples: int, *, rest: bool = True) -> Samples:
        return self.rule.take(self.feeds.present, self.feeds._leaving, num_samples, NOW, rest=rest)


def test_drawn_samples_are_due_until_they_arrive() -> None:
    mixed = Mixed(UNIFORM, 3, 1)
    mixed.draws.next = [[3, 1], [3, 1]]
    first = mixed.take(4)
    assert mixed.draws.seen == [(4, [0.75, 0.25])]
    assert first.probabilities.tolist() == [0.25] * 4
    assert first.table_sizes.tolist() == [4] * 4
    # Twice the 8 samples that are held, by the share: 12 and 4; and two deviations and one more.
    assert [one.max_samples for one in mixed.feeds.present] == [20, 9]
    assert len(mixed.take(4)) == 2  # `a` has only one of its three
    assert (mixed.due(), mixed.waiting()) == ([2, 0], [0, 2])
    mixed.mass("a").waits_since = NOW - 0.05
    assert len(mixed.take(2)) == 0  # it is not slow yet, so both are awaited
    mixed.mass("a").waits_since = NOW - 0.2
    mixed.draws.next = [[0, 2]]
    assert len(mixed.take(2)) == 2  # others give samples in its place, and it still owes them
    assert mixed.due() == [2, 0]
    mixed.draws.next = [[2, 0]]
    assert len(mixed.take(4)) == 0  # no more than a batch is owed
    assert (mixed.draws.seen[-1][0], mixed.due()) == (2, [4, 0])
    assert len(mixed.take(4)) == 0
    assert len(mixed.draws.seen) == 4


def test_batch_is_given_when_it_is_whole_and_in_random_order() -> None:
    mixed = Mixed(UNIFORM, 3, 1)
    mixed.of("a").feed.take(9)
    mixed.draws.next = [[3, 1]]
    assert len(mixed.take(4, rest=False)) == 0  # the sample of `b` is drawn, and three of `a` have not arrived
    assert (mixed.due(), mixed.waiting()) == ([3, 0], [0, 3])
    assert (mixed.feeds.num_waiting, mixed.feeds.num_for_batch) == (4, 4)  # three of `b` wait for another draw
    mixed.receive("a", [5, 6, 7], 3)
    assert mixed.take(4, rest=False).keys.tolist() == [7, 6, 5, 10]  # `Draws` reverses the order
    assert (mixed.rule.num_drawn, mixed.due()) == (0, [0, 0])
    assert mixed.remembered == {5: "a", 6: "a", 7: "a", 10: "b"}


def test_slow_server_is_drawn_once_per_call() -> None:
    mixed = Mixed(UNIFORM, 2, 2)
    mixed.of("a").feed.take(9)
    mixed.mass("a").waits_since, mixed.draws.next = NOW - 0.2, [[1, 0]]
    assert len(mixed.take(1)) == 0
    assert (mixed.due(), len(mixed.draws.seen)) == ([1, 0], 1)


def test_no_more_samples_than_wanted_are_taken() -> None:
    mixed = Mixed(UNIFORM, 2, 2)
    mixed.of("a").due = mixed.of("b").due = 2
    assert [len(mixed.take(1)) for _ in range(4)] == [1] * 4
    assert (mixed.due(), mixed.waiting(), mixed.draws.seen) == ([0, 0], [2, 2], [])


def test_late_and_lost_servers_are_not_drawn() -> None:
    mixed = Mixed(UNIFORM, 2, 2)
    mixed.of("b").is_late = True
    assert len(mixed.take(4)) == 4
    assert (mixed.waiting(), mixed.draws.seen) == ([0, 4], [])
    mixed = Mixed(UNIFORM, 2, 2)
    mixed.connections.shards[1].state = "lost"
    assert len(mixed.take(4)) == 4
    assert (mixed.waiting(), mixed.draws.seen, mixed.stats().left_out_servers) == ([0, 4], [], 1)


def test_servers_without_items_and_servers_of_unknown_mass() -> None:
    mixed = Mixed(PRIORITIZED, 2, 0)
    assert len(mixed.take(4)) == 4
    assert mixed.draws.seen == []
    mixed = Mixed(PRIORITIZED, 2, 2)
    mixed.mass("b").mean = None
    assert len(mixed.take(4)) == 0
    assert (mixed.due(), mixed.draws.seen) == ([0, 0], [])
    mixed = Mixed(UNIFORM, 2, 0)
    mixed.draws.next = [[4, 0]]
    assert len(mixed.take(4)) == 4
    mixed = Mixed(UNIFORM, 0, 0)
    assert len(mixed.take(4)) == 0
    assert mixed.draws.seen == []


@pytest.mark.parametrize(
    ("table", "age_s", "is_late", "num_dropped"),
    [
        (PRIORITIZED, 1.0, False, 0),
        (PRIORITIZED, 1.5, False, 1),
        (PRIORITIZED, 1.5, True, 0),  # the only server that is left
        (UNIFORM, 1.5, False, 0),
    ],
)
def test_old_sample_makes_room_for_one_that_tells_the_mass(
    table: Any, age_s: float, is_late: bool, num_dropped: int
) -> None:
    mixed = Mixed(table, 2, 2)
    mixed.draws.next, mixed.of("b").is_late = [[1, 0]], is_late
    mixed.mass("a").told_at = NOW - age_s
    assert len(mixed.take(1)) == 1
    assert [one.num_dropped for one in mixed.feeds.present] == [num_dropped, 0]
    assert mixed.of("a").num_waiting == 3 - num_dropped


@pytest.mark.parametrize(
    ("table", "sizes", "num_dropped"),
    [(UNIFORM, (2, 2), 4), (UNIFORM, (2,), 0), (READ_ONCE, (4, 4), 0)],  # no one else gets the last ones
)
def test_samples_of_a_server_that_is_lost_are_dropped_if_others_are_sampled_meanwhile(
    table: Any, sizes: Sequence[int], num_dropped: int
) -> None:
    mixed = Mixed(table, *sizes)
    mixed.lose("a")
    assert (mixed.of("a").num_dropped, mixed.of("a").num_waiting) == (num_dropped, 4 - num_dropped)
    assert (mixed.num_refreshed, mixed.feeds.unreachable(), mixed.stats().left_out_servers) == (1, {"a"}, 1)


def test_mean_of_a_server_that_has_started_again_is_unknown() -> None:
    mixed = Mixed(PRIORITIZED, 2, 2)
    for name, state_id, mean in (("a", 0, 1.0), ("b", 7, None)):
        mixed.lose(name)
        mixed.find(name, mixed.info(state_id, 5))
        assert (mixed.mass(name).mean, mixed.mass(name).size) == (mean, 5)
    mixed.receive("b", [30], 5, priority=2.0)
    assert mixed.mass("b").mean == 2.0  # 2 / (1 / 5) is the mass of 5 items


def test_mean_of_a_server_that_has_started_again_between_two_looks_is_unknown() -> None:
    mixed = Mixed(PRIORITIZED, 2, 2)
    mixed.find("b", mixed.info(7, 5))
    assert (mixed.mass("b").mean, mixed.mass("b").size) == (None, 5)


def test_samples_that_no_one_else_gets_are_taken_at_the_end() -> None:
    mixed = Mixed(READ_ONCE, 3, 2)
    mixed.feeds.stop_requests()
    assert [len(mixed.take(4)) for _ in range(3)] == [4, 1, 0]
    assert mixed.draws.seen == []
    mixed = Mixed(UNIFORM, 3, 2)
    mixed.feeds.stop_requests()
    assert len(mixed.take(4)) == 0
    assert (mixed.waiting(), mixed.draws.seen) == ([4, 4], [])


def test_the_only_server_is_not_drawn() -> None:
    mixed = Mixed(UNIFORM, 3, num_waiting=8)
    assert [len(mixed.take(5)) for _ in range(2)] == [5, 3]
    assert (mixed.draws.seen, mixed.due()) == ([], [0])


def test_silent_and_blocked_servers_are_left_out_and_what_they_owe_is_forgiven() -> None:
    mixed = Mixed(UNIFORM, 2, 2)
    for name in "ab":
        mixed.of(name).feed.take(9)
    mixed.of("a").due, mixed.of("b").due = 3, 1
    mixed.streams["a"].unanswered_since = NOW
    assert mixed.proceed(NOW) == NOW + 0.05  # it looks again soon
    assert (mixed.streams["a"].asked, mixed.mass("a").is_slow(NOW + 0.2)) == ([], True)
    mixed.proceed(NOW + 0.5)  # their last samples are old: they are asked for their size
    assert (mixed.streams["a"].asked, mixed.due(), mixed.stats().left_out_servers) == ([NOW + 0.5], [3, 1], 0)
    mixed.proceed(NOW + 2.1)
    assert (mixed.due(), mixed.of("a").num_forgiven, mixed.of("a").is_late) == ([0, 1], 3, True)
    mixed.streams["b"].table = mixed.info(1, 0).tables["replay"]  # no item is ready
    mixed.proceed(NOW + 2.2)
    assert (mixed.due(), mixed.of("b").num_forgiven, mixed.stats().left_out_servers) == ([0, 0], 1, 2)
    mixed.receive("a", [7], 2)
    assert (mixed.of("a").is_late, mixed.stats().left_out_servers) == (False, 1)


def test_nothing_is_kept_of_servers_that_have_left() -> None:
    """A reference would keep the connection open."""
    mixed = Mixed(UNIFORM, 2, 2)
    mixed.draws.next = [[2, 2]]
    mixed.take(4)
    mixed.of("b").due = 3
    mixed.connections.shards = mixed.connections.shards[:1]
    mixed.proceed()
    mixed.take(1)
    assert [one.shard.name for one in (*mixed.rule._masses, *mixed.rule._share_of)] == ["a", "a"]
    stats = mixed.stats()
    assert (stats.received_samples, stats.dropped_samples, stats.forgiven_samples) == (8, 2, 3)
