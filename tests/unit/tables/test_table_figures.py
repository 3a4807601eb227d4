"""What a server's figures say: how much is ready, who waits for whom, and what several servers hold together."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from reverb_writer.errors import StructureError
from reverb_writer.tables import Balance
from reverb_writer.tables.rate_limits import (
    StandstillDetector,
    explain_inserts,
    explain_samples,
    explain_side,
    figures,
    inserts_progress,
    json_figures,
    rates,
)
from reverb_writer.tables.table_info import RateLimiterInfo, ServerInfo, TableInfo, check_tables_exist, merge_tables

INF = math.inf


def limited(size: int, limiter: RateLimiterInfo) -> TableInfo:
    return TableInfo("t", "fifo", "fifo", 100, 1, size, 0, 0, 0, limiter, None, {})


@pytest.mark.parametrize(
    ("size", "limiter", "expected"),
    [
        (0, RateLimiterInfo(1.0, -INF, INF, 1, 0, 0), 0),
        (7, RateLimiterInfo(1.0, -INF, INF, 1, 9, 2), 7),
        (7, RateLimiterInfo(1.0, -INF, INF, 8, 9, 2), 0),  # min_size_to_sample
        (5, RateLimiterInfo(2.0, 3.0, INF, 1, 5, 4), 3),  # 2 x 5 - 4 = 6 may fall to 3
        (5, RateLimiterInfo(0.5, 0.0, INF, 1, 5, 2), 0),  # 0.5 x 5 - 2 = 0.5 may not fall by 1
        (2, RateLimiterInfo(8.0, 0.0, INF, 1, 2, 0), 2),  # 16 samples are allowed, of 2 items
    ],
)
def test_no_more_is_ready_than_items_and_rate_limiter_allow(size: int, limiter: RateLimiterInfo, expected: int) -> None:
    assert limited(size, limiter).num_ready() == expected


# Several servers.


def together(*tables: TableInfo) -> TableInfo:
    return merge_tables([{"t": table} for table in tables])["t"]


def test_bounds_of_several_servers_are_added_up() -> None:
    one, other = RateLimiterInfo(2.0, -5.0, 10.0, 3, 4, 6), RateLimiterInfo(2.0, -1.0, 20.0, 4, 10, 6)
    merged = together(limited(4, one), replace(limited(6, other), max_size=50))
    assert merged.rate_limiter == RateLimiterInfo(2.0, -6.0, 30.0, 7, 14, 12)
    assert merged.rate_limiter.diff == one.diff + other.diff
    assert (merged.current_size, merged.max_size) == (10, 150)
    assert [server.rate_limiter for server in merged.servers] == [one, other]
    unbounded = together(limited(0, replace(one, min_diff=-INF)), limited(0, replace(other, max_diff=INF))).rate_limiter
    assert (unbounded.min_diff, unbounded.max_diff) == (-INF, INF)
    assert together(limited(4, one)) == limited(4, one)


def test_several_servers_block_when_each_does() -> None:
    full, free = RateLimiterInfo(1.0, 0.0, 10.0, 1, 10, 0), RateLimiterInfo(1.0, 0.0, 10.0, 1, 0, 0)
    assert together(limited(10, full), limited(10, full)).blocks_inserts()
    assert not together(limited(10, full), limited(0, free)).blocks_inserts()
    assert not together(limited(10, full), limited(0, free)).blocks_samples()
    assert together(limited(0, free), limited(0, free)).blocks_samples()
    assert together(limited(10, full), limited(0, free)).num_ready() == 10


def test_servers_that_are_configured_differently_are_told_as_they_are() -> None:
    one, other = RateLimiterInfo(1.0, 0.0, 10.0, 1, 10, 0), RateLimiterInfo(4.0, 0.0, 10.0, 1, 30, 20)
    prioritized = replace(limited(1, one), sampler="prioritized", sampler_exponent=0.5)
    merged = together(prioritized, replace(limited(1, other), max_times_sampled=3))
    assert merged.rate_limiter.diff == one.diff + other.diff
    assert (merged.sampler, merged.sampler_exponent) == ("prioritized, fifo", None)
    assert merged.max_times_sampled == 3
    assert together(prioritized, replace(prioritized, max_times_sampled=0)).max_times_sampled == 0
    assert together(prioritized, prioritized).sampler_exponent == 0.5


def test_table_prints_as_a_small_table_without_zeros() -> None:
    title, *rows = str(limited(7, RateLimiterInfo(1.0, -INF, INF, 1, 9, 2))).splitlines()
    assert (title, len(rows)) == ("TableInfo, without zeros", 12)
    assert {"  sampler                          fifo", "  rate_limiter/max_diff            inf"} <= {*rows}


STATES = ("running", "sampling", "inserting", "sleeping", "waiting_for_sampling", "waiting_for_inserts")


def table(
    size: int = 100, inserts: int = 100, samples: int = 0, ratio: float = 8.0, low: float = 600, high: float = 1000
) -> TableInfo:
    """Return a table that keeps 8 samples an insert, samples from 100 items on."""
    limiter = RateLimiterInfo(ratio, low, high, 100, inserts, samples)
    return TableInfo("replay", "uniform", "fifo", 1000, 0, size, 3, 1, 40, limiter, None, dict.fromkeys(STATES, 0))


def unbounded(size: int) -> TableInfo:
    return table(size, size, 0, 1.0, -math.inf, math.inf)


def at(moment: float, one: TableInfo, state_id: int = 1, **waited_ms: int) -> ServerInfo:
    return ServerInfo(state_id, {one.name: replace(one, worker_time_ms={**one.worker_time_ms, **waited_ms})}, moment)


@pytest.mark.parametrize(
    ("one", "inserts", "samples"),
    [
        (table(size=0, inserts=0), 125, 0),  # (1000 - 0) / 8 inserts
        (table(), 25, 200),  # diff 800: (1000 - 800) / 8 inserts, 800 - 600 samples
        (table(inserts=125), 0, 400),  # diff 1000
        (table(samples=200), 50, 0),  # diff 600
        (table(size=99, inserts=200), 1, 0),  # diff 1600, but below min_size it lets in
        (unbounded(100), math.inf, math.inf),
        (unbounded(99), math.inf, 0),
        # As dm-reverb computes: 0.6 - 1 - 1 = -1.4, although -0.4 + 1.4 < 1; 6 x 0.1 > 0.6, although 0.5 + 0.1 = 0.6.
        (table(inserts=2, ratio=0.3, low=-1.4, high=2.6), 6, 2),
        (table(inserts=2, samples=1, ratio=0.3, low=-1.4, high=2.6), 10, 1),
        (table(inserts=5, ratio=0.1, low=-1.4, high=0.6), 0, 1),
    ],
)
def test_room_is_what_the_limiter_leaves(one: TableInfo, inserts: float, samples: float) -> None:
    found = figures(one)
    assert (found["insert_room"], found["sample_room"]) == (inserts, samples)
    assert one.blocks_inserts() == (inserts == 0)
    assert one.blocks_samples() == (samples == 0)


def test_rates_are_counts_over_seconds_and_not_negative_after_a_reset() -> None:
    assert figures(table(inserts=50, samples=20))["ratio_reached"] == 0.4
    assert figures(table(inserts=0))["ratio_reached"] is None
    assert rates(table(inserts=100, samples=10), table(inserts=150, samples=20), 5.0) == (10.0, 2.0)
    assert rates(table(inserts=100, samples=10), table(inserts=5, samples=20), 5.0) == (0.0, 2.0)
    assert rates(table(), table(inserts=200), 0.0) == (0.0, 0.0)


def test_figures_are_json() -> None:
    shown = json.loads(json.dumps(json_figures(unbounded(100)), allow_nan=False))
    assert (shown["fill"], shown["ratio_wanted"], shown["insert_room"], shown["max_diff"]) == (0.1, None, None, None)
    assert figures(table(low=-INF))["ratio_wanted"] == figures(table(high=INF))["ratio_wanted"] == 8


# Why, and what ends it.


@pytest.mark.parametrize(
    ("one", "side", "why", "remedy"),
    [
        (
            table(inserts=125),  # one more: 1008, 8 above 1000
            "inserts",
            "The rate limiter of table `replay` blocks inserts: inserts x 8 - samples = 1000, max_diff 1000.",
            "8 samples unblock the next insert; so does a larger `error_buffer`.",
        ),
        (
            table(samples=200),  # one more: 599, and an insert brings 8
            "samples",
            "The rate limiter of table `replay` waits for 1 more insert: inserts x 8 - samples = 600, min_diff 600.",
            "1 insert unblocks the next sample; so does a larger `error_buffer`.",
        ),
        (
            table(size=97),
            "samples",
            "Table `replay` has 97 items; its rate limiter waits for 3 more (min_size_to_sample 100).",
            "3 inserts unblock sampling; so does a lower `min_size`.",
        ),
        (
            limited(0, RateLimiterInfo(1.0, -INF, INF, 1, 0, 0)),
            "samples",
            "Table `t` is empty; its rate limiter waits for 1 more (min_size_to_sample 1).",
            "1 insert unblocks sampling.",
        ),
    ],
)
def test_side_that_is_blocked_needs_the_other(one: TableInfo, side: Any, why: str, remedy: str) -> None:
    assert explain_side(one, side) == (why, remedy)


@pytest.mark.parametrize("ratio", [0.1, 0.3, 1.1, 8.0])
def test_numbers_that_unblock_a_side_are_the_least_that_the_rule_allows(ratio: float) -> None:
    for inserts, samples, tenths in itertools.product(range(5), range(5), range(-10, 30)):
        balance = Balance(ratio, 1, tenths / 10, tenths / 10 + ratio)
        if balance.blocks_samples(9, inserts, samples):
            number = balance.num_inserts_needed(inserts, samples)
            assert not balance.blocks_samples(9, inserts + number, samples)
            assert number == 1 or balance.blocks_samples(9, inserts + number - 1, samples)
        if balance.blocks_inserts(9, inserts, samples):
            number = balance.num_samples_needed(inserts, samples)
            assert not balance.blocks_inserts(9, inserts, samples + number)
            assert number == 1 or balance.blocks_inserts(9, inserts, samples + number - 1)


EMPTY = "Table `replay` is empty; its rate limiter waits for 100 more (min_size_to_sample 100)."
START = "Start the actors or raise `timeout_s`."
WRITE = "If actors still write, raise `timeout_s`. A thread that writes and samples in turn must write more."


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (at(0, table()), at(9, table()), "Table `replay` has 100 items, and its rate limiter does not block samples: "),
        (at(0, table(0, 0)), at(1, table(0, 0)), f"{EMPTY} In the last 1 s no items were inserted. {START}"),
        (at(1, table(0, 0)), at(10, table(0, 7)), f"{EMPTY} In the last 9 s 7 items were inserted. {WRITE}"),
        (at(1, table(0, 0)), at(1.9, table(0, 7)), f"{EMPTY} {START}"),  # too soon to tell
        (at(0, limited(0, table().rate_limiter)), at(9, table(0, 7)), f"{EMPTY} {START}"),  # it was not there
        (at(0, table()), at(9, limited(0, table().rate_limiter)), "The server no longer has a table `replay`."),
    ],
)
def test_wait_for_samples_is_explained_by_what_was_inserted_meanwhile(
    before: ServerInfo, now: ServerInfo, why: str
) -> None:
    assert explain_samples(now, "replay", before).startswith(why)


def test_table_that_is_missing_is_named_beside_those_there_are_but_not_those_of_the_package() -> None:
    info = ServerInfo(1, {name: table() for name in ("b", "a", "__specs")}, 0)
    check_tables_exist(["a", "b"], info, "here:1")
    with pytest.raises(StructureError, match=r"^table `c`, `d` is not on the server at here:1; it has `a`, `b`\.$"):
        check_tables_exist(["d", "a", "c"], info, "here:1")


# Standing still.


def test_side_that_waits_and_does_not_move_stands_still_and_since_when_is_kept() -> None:
    watch, blocked = StandstillDetector(), table(inserts=125)
    assert watch.update(at(10, blocked)) == []
    (first,) = watch.update(at(12, blocked, waiting_for_sampling=2000))
    (second,) = watch.update(at(15, blocked, waiting_for_sampling=5000))
    assert (first.table, first.side, first.seconds, second.seconds) == ("replay", "inserts", 2, 5)
    assert str(second).startswith(
        "table `replay`: inserts have stood still for 5 s or more. "
        "An insert is in the server's queue; its actor may have ended. The rate limiter of table `replay` blocks"
    )


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (at(10, table(samples=100)), at(12, table(inserts=101, samples=108), waiting_for_inserts=1900)),  # it moves
        (at(10, table(inserts=124)), at(12, table(inserts=125), waiting_for_sampling=1900)),  # inserts move
        (at(10, table(inserts=125)), at(12, table(inserts=125))),  # nobody uses it
        (at(10, table(inserts=125)), at(12, table(inserts=125), state_id=2, waiting_for_sampling=2000)),  # a restart
    ],
)
def test_side_that_moves_or_is_not_used_does_not_stand_still(before: ServerInfo, now: ServerInfo) -> None:
    watch = StandstillDetector()
    assert watch.update(before) == []
    assert watch.update(now) == []


def test_both_sides_stand_still_although_the_worker_reports_one() -> None:
    watch, blocked = StandstillDetector(), table(inserts=75, high=604)  # diff 600 may neither fall nor rise by 8
    watch.update(at(10, blocked))
    found = watch.update(at(12, blocked, waiting_for_inserts=2000))
    assert [each.side for each in found] == ["inserts", "samples"]


def test_standstill_that_has_ended_begins_anew() -> None:
    watch, blocked = StandstillDetector(), table(inserts=125)
    watch.update(at(10, blocked))
    watch.update(at(12, blocked, waiting_for_sampling=2000))
    assert watch.update(at(14, table(inserts=126, samples=8), waiting_for_sampling=2100)) == []
    (again,) = watch.update(at(16, table(inserts=126, samples=8), waiting_for_sampling=4100))
    assert again.seconds == 2


# Progress of inserts that wait.


def look(at: float = 0.0, state_id: int = 1, **counts: tuple[int, int]) -> ServerInfo:
    """Return tables of so many inserts and samples, which let insert 10 more than were sampled."""
    limiters = {name: RateLimiterInfo(1.0, 0.0, 10.0, 1, *count) for name, count in counts.items()}
    tables = {name: replace(table(10), name=name, rate_limiter=limiter) for name, limiter in limiters.items()}
    return ServerInfo(state_id, tables, at)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (look(a=(10, 0)), look(a=(10, 0)), False),  # nobody samples
        (look(a=(10, 0)), look(a=(13, 3)), True),  # three were let in
        (look(a=(10, 0)), look(a=(12, 3)), True),  # the look came between a sample and the insert that it allows
        (look(a=(3, 0)), look(a=(5, 0)), False),  # not the limiter is what keeps inserts waiting
        (look(a=(10, 0), b=(10, 0)), look(a=(13, 3), b=(10, 0)), False),  # b stands still
        (look(a=(10, 0), b=(2, 0)), look(a=(13, 3), b=(2, 0)), True),  # b is open
        (look(a=(10, 0), b=(2, 0)), look(a=(10, 0), b=(4, 0)), False),  # only b, which is open, took some
        (look(a=(10, 0)), look(a=(13, 3), state_id=2), False),  # another server
        (look(a=(10, 0)), look(), False),  # the table is gone
    ],
)
def test_blocked_inserts_come_nearer_when_each_table_that_blocks_lets_some_in(
    before: ServerInfo, now: ServerInfo, expected: bool
) -> None:
    assert inserts_progress(before, now, {"a", "b"}) is expected


def test_limiter_that_lets_inserts_in_is_not_blamed_for_a_learner_that_does_not_run() -> None:
    why = explain_inserts(look(at=1.0, a=(10, 0)), look(at=5.0, a=(22, 12)), {"a"})
    assert why == (
        "The rate limiter of table `a` blocks inserts: inserts x 1 - samples = 10, max_diff 10; it let 12 in during "
        "the last 4.0 s, in the order of their arrival. The learner is slower than the actors: wait longer, make it "
        "faster, or lower `max_in_flight_items`."
    )


def test_limiter_that_lets_no_insert_in_waits_for_a_learner() -> None:
    why = explain_inserts(look(at=1.0, a=(10, 0)), look(at=5.0, a=(10, 0)), {"a"})
    assert why == (
        "The rate limiter of table `a` blocks inserts: inserts x 1 - samples = 10, max_diff 10, and nothing has "
        "sampled for 4 s. Start the learner or raise `timeout_s`."
    )
