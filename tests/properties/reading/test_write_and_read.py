"""Whatever is written to servers of this process, in whichever way, and read from them in whichever way: all of it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from episodes import expected, feed, observed, specs
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import Place, fifo

import reverb_writer as rw

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

LENGTHS = st.lists(st.integers(1, 12), max_size=6)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "chunk_length": st.sampled_from([1, 2, 5, 1000]),
        "max_delay_s": st.just(0.002),
        "max_in_flight_items": st.integers(1, 3),
        "max_in_flight_bytes": st.just(1),
    },
)
SERVERS = st.integers(1, 3)
SHORT = specs(range(1, 5), range(1, 6))


@contextlib.contextmanager
def places(count: int, table: rw.TableConfig) -> Iterator[tuple[Place, list[Place]]]:
    """Serve a table on some servers; give a client of all of them, and one of each."""
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(rw.LocalServer([table])).address for _ in range(count)]
        together, *alone = (
            Place(",".join(some), stack.enter_context(rw.Client(some)))
            for some in (addresses, *([one] for one in addresses))
        )
        yield together, alone


@settings(max_examples=60)
@given(st.sampled_from(SHORT), LENGTHS, OPTIONS, st.sampled_from([None, 1, 3]), SERVERS)
def test_windows_that_are_written_are_the_windows_of_the_episodes(
    spec: rw.WindowSpec, lengths: list[int], options: dict[str, Any], flush_every: int | None, count: int
) -> None:
    with places(count, fifo("a")) as (place, alone):
        with observed(place, spec, **options) as observer:
            feed(observer, lengths, flush_every=flush_every)
        stats, windows = observer.stats(), expected(spec, lengths)
        found = [one.column() for one in alone]
    assert sorted(itertools.chain(*found)) == sorted(windows)
    for of_one in found:  # in the order in which they were written
        assert of_one == [window for window in windows if window in of_one]
    assert (stats.steps, stats.episodes) == (sum(lengths), len(lengths))
    assert (stats.items, stats.acknowledged_items, stats.pending_items) == (len(windows), len(windows), 0)
    assert (stats.dropped_items, stats.pending_bytes, stats.resent_items, stats.reconnects) == (0, 0, 0, 0)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 4))
def test_queues_are_read_once_each_in_its_order(counts: list[int], batch_size: int, ahead: int) -> None:
    first = itertools.count()
    numbers = [[next(first) for _ in range(count)] for count in counts]
    total = sum(counts)
    with places(len(counts), fifo("a")) as (place, alone):
        for one, own in zip(alone, numbers, strict=True):
            for number in own:
                one.client.insert([np.full(1 + number % 3, number)], {"a": 1.0})
        with rw.ReplayDataset(
            place.client, "a", batch_size, collate="pad", max_in_flight_batches=ahead, timeout_s=20, single_pass=True
        ) as dataset:
            batches = list(dataset)
            stats = dataset.stats()
    of_servers: dict[Any, list[list[int]]] = collections.defaultdict(list)
    for batch in batches:
        assert 1 <= len(batch.info) <= batch_size
        found = batch.data[0][:, 0]
        of_servers[batch.info.server].append(found.tolist())
        assert (batch.info.lengths == 1 + found % 3).all()
    for one, own in zip(alone, numbers, strict=True):
        assert list(itertools.chain(*of_servers[one.address])) == own
    assert (stats.received_samples, stats.lost_samples, stats.unasked_samples) == (total, 0, 0)
    assert (stats.in_flight_samples, stats.ready_samples, stats.dropped_samples) == (0, 0, 0)


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=5), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_tables_are_read_as_one(
    priorities: list[list[int]], is_prioritized: bool, batch_size: int, num_batches: int
) -> None:
    numbers, weights = itertools.count(), np.array([*itertools.chain(*priorities)]) ** is_prioritized
    sampler: Any = rw.Prioritized(1.0) if is_prioritized else "uniform"
    with places(len(priorities), rw.TableConfig("a", sampler=sampler)) as (place, alone):
        for one, own in zip(alone, priorities, strict=True):
            for priority in own:
                one.client.insert([np.array([next(numbers)])], {"a": priority})
        with rw.ReplayDataset(place.client, "a", batch_size, timeout_s=20) as dataset:
            batches = [next(dataset) for _ in range(num_batches)]
            stats = dataset.stats()
    assert [len(batch.info.keys) for batch in batches] == [batch_size] * num_batches
    for batch in batches:
        np.testing.assert_allclose(batch.info.probabilities, weights[batch.data[0][:, 0]] / weights.sum())
        assert (batch.info.table_sizes == len(weights)).all()
    assert stats.received_samples - stats.dropped_samples >= batch_size * num_batches
    assert (stats.batches, stats.lost_samples, stats.left_out_servers) == (num_batches, 0, 0)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_priorities_are_set_on_the_server_that_has_the_item(counts: list[int], data: st.DataObject) -> None:
    with places(len(counts), rw.TableConfig("a", sampler=rw.Prioritized(1.0))) as (place, alone):
        for one, count in zip(alone, counts, strict=True):
            for _ in range(count):
                one.client.insert([np.array([0])], {"a": 1.0})
        with rw.ReplayDataset(place.client, "a", 4, timeout_s=20) as dataset:
            mixed = rw.MixedDataset([dataset]) if data.draw(st.booleans()) else dataset
            batch = next(mixed)
            priorities = data.draw(st.lists(st.integers(2, 9), min_size=4, max_size=4))
            mixed.update_priorities(batch, np.array(priorities))
        expected = dict(zip(batch.info.keys.tolist(), priorities, strict=True))
        for one in alone:
            for sample in one.client.sample("a", 20):
                assert sample.info.priority == expected.get(sample.info.key, 1)
        with pytest.raises(rw.errors.SpecError, match="priorities"):
            rw.ReplayDataset(place.client, "a", 4).update_priorities(batch, [1.0])
