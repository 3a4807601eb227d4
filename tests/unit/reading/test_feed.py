"""The samples of one server between its stream and the thread that fetches, without a server."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from shard_feeds import LIMITER, NOW, Stream, numbers_of, samples_of, table_info

from reverb_writer.errors import ClosedError, FormatError, ServerUnavailableError
from reverb_writer.reading.feed import ServerFeed
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.stats import DatasetStats
from reverb_writer.tables.table_info import ServerInfo

INFO = ServerInfo(1, {"replay": table_info(size=3)}, NOW)


@pytest.fixture
def feed() -> Any:
    server: Any = SimpleNamespace(address="a:1", channel=SimpleNamespace(is_silent=lambda _: False))
    feed: Any = ServerFeed(server, INFO, INFO.tables["replay"], 8, ReadOptions())
    feed.stream = Stream(INFO)
    return feed


def test_what_has_arrived_is_kept_until_it_is_taken(feed: Any) -> None:
    feed.stream.messages += [samples_of([1, 2, 3], 3), samples_of([4], 3)]
    assert feed.proceed(NOW, 2) == (math.inf, [])
    assert feed.stream.room == (4 + 2, 8)  # those that wait, and those that the caller holds
    assert (feed.num_waiting, feed.num_for_batch, feed.num_received, feed.heard_at) == (4, 4, 4, NOW)
    assert [numbers_of(feed.take(3, rest=False)) for _ in range(3)] == [[1, 2, 3], [4], []]
    assert feed.end_batch() == "a:1"


def test_damaged_message_is_returned_as_its_error_and_the_next_one_is_read(feed: Any) -> None:
    error, messages = FormatError("damaged"), [samples_of([1], 3)]

    def read() -> Any:
        if len(feed.stream.messages) == 2:
            feed.stream.messages.pop()
            raise error
        feed.stream.messages.pop()
        return messages.pop()

    feed.stream.messages += [None, None]
    feed.stream.read = read
    assert feed.proceed(NOW, 0) == (math.inf, [error])
    assert numbers_of(feed.take(1)) == [1]


def test_feed_of_a_closed_client_has_ended_and_gives_what_has_arrived(feed: Any) -> None:
    def proceed(*_: Any) -> float:
        raise ClosedError("closed")

    feed.stream.messages.append(samples_of([1], 3))
    feed.stream.proceed = proceed
    assert feed.proceed(NOW, 0) == (math.inf, [])
    assert (feed.stream.is_closed, feed.is_done, feed.is_starved) == (True, True, False)
    assert numbers_of(feed.take(4)) == [1]
    assert feed.is_starved


def test_counters_and_causes_of_a_wait(feed: Any) -> None:
    stats = DatasetStats()
    feed.stream.num_lost, feed.stream.reconnects = 3, 1
    feed.count(stats)
    assert (stats.lost_samples, stats.reconnects, stats.left_out_servers, feed.is_gone) == (3, 1, 0, False)
    feed.stream.loss = ServerUnavailableError("gone")
    feed.count(stats)
    assert (stats.lost_samples, stats.left_out_servers, feed.is_gone) == (6, 1, True)
    limiter = dataclasses.replace(LIMITER, min_size_to_sample=10, num_inserts=3)
    feed.stream.table = dataclasses.replace(feed.stream.table, rate_limiter=limiter)
    assert feed.inserts_missing() == {"a:1": 7}  # 3 of 10 items are there
    feed.stream.table = None
    assert feed.inserts_missing() == {}
