"""Datasets on servers of this process: how much is fetched ahead, priorities on their way, and each server's share."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
from numbered import QUEUE, first_numbers, insert_numbers
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.reading import priority_updates
from reverb_writer.reading.priority_updates import checked_updates
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.table_source import ServerTable

PRIORITIZED = rw.TableConfig("replay", 100, rw.Prioritized(1.0))


def test_no_more_samples_are_held_than_there_is_room_for() -> None:
    with rw.LocalServer([QUEUE]) as server:
        insert_numbers(server.address, "queue", range(50))
        with rw.ReplayDataset(server, "queue", 4, max_in_flight_batches=2, timeout_s=60) as dataset:
            iter(dataset)  # begins to fetch
            eventually(lambda: dataset.stats().ready_samples >= 8)
            with rw.Client(server) as client:
                assert (dataset.stats().ready_samples, client.server_info()["queue"].current_size) == (8, 42)
            assert [first_numbers(next(dataset)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            eventually(lambda: dataset.stats().received_samples == 16)
            assert dataset.stats().batches == 2


def test_part_of_a_batch_is_taken_without_a_wait() -> None:
    with rw.LocalServer([QUEUE]) as server:
        insert_numbers(server.address, "queue", [0, 1])
        with rw.ReplayDataset(server, "queue", 4, timeout_s=60) as dataset:
            iter(dataset)
            eventually(lambda: dataset.stats().ready_samples == 2)
            taken = dataset.poll()
        assert taken is not None
        assert first_numbers(taken) == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"max_in_flight_batches": 0}, "max_in_flight_batches"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"collate": "stack"}, "collate"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_age": -1}, "max_age"),
        ({"version": 3}, "version"),
        ({"max_cache_bytes": 0}, "max_cache_bytes"),
        ({"table": ["queue", "other"]}, r"`table` must be the name of one table, got \['queue', 'other'\]"),
        ({"table": None}, "`table` must be the name of one table, got None"),
        ({"table": "nothing"}, r"table `nothing` is not on the server .*`queue`"),
    ],
)
def test_arguments_that_can_never_work_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    kind = rw.errors.StructureError if options.get("table") == "nothing" else rw.errors.SpecError
    with rw.LocalServer([QUEUE]) as server, pytest.raises(kind, match=message):
        rw.ReplayDataset(server, **{"table": "queue", "batch_size": 1, **options})


def test_no_more_batches_of_a_pool_are_made_than_may_be_ahead() -> None:
    made: list[rw.Batch] = []

    def transform(batch: rw.Batch) -> rw.Batch:
        made.append(batch)
        return batch

    with rw.LocalServer([rw.TableConfig("episodes")]) as server:
        with rw.EpisodeObserver(server, "episodes", 50) as observer:
            for row in range(50):
                observer({"row": np.int64(row)}, end_of_episode=row == 49)
        options: Any = {"pool_size": 1, "slices_per_item": 20, "max_in_flight_batches": 1, "transform": transform}
        with rw.SliceDataset(server, "episodes", 2, 5, **options) as dataset:  # a pool makes ten batches
            next(dataset)
            eventually(lambda: len(made) == 2)
            time.sleep(0.2)
            assert len(made) == 2


def test_mixed_batch_is_waited_for_and_names_the_member_of_each_sample() -> None:
    with rw.LocalServer([QUEUE]) as one, rw.LocalServer([QUEUE]) as other:
        datasets = [rw.ReplayDataset(server, "queue", 2, timeout_s=60) for server in (one, other)]
        with rw.MixedDataset(datasets) as mixed:
            assert mixed.poll() is None
            insert_numbers(one.address, "queue", [1, 2])
            with soon(lambda: insert_numbers(other.address, "queue", [3, 4])):
                batch = mixed.poll(60)
    assert batch is not None
    assert (first_numbers(batch), batch.info.members.tolist()) == ([1, 2, 3, 4], [0, 0, 1, 1])


@pytest.mark.parametrize("error", [rw.errors.ReplayTimeoutError, rw.errors.IncompleteError])
def test_poll_raises_the_error_of_a_transform(error: type[Exception]) -> None:
    def transform(_batch: rw.Batch) -> rw.Batch:
        raise error("of the transform")

    with rw.LocalServer([QUEUE]) as server:
        insert_numbers(server.address, "queue", [1, 2])
        with (
            rw.ReplayDataset(server, "queue", 2, transform=transform) as dataset,
            pytest.raises(error, match="of the transform"),
        ):
            dataset.poll(60)


def test_error_of_a_transform_is_raised_in_the_place_of_its_batch() -> None:
    def refuse_two(batch: rw.Batch) -> Any:
        if first_numbers(batch) == [2, 3]:
            raise ZeroDivisionError
        if first_numbers(batch) == [6, 7]:
            raise StopIteration  # as `next` of an iterator that has ended
        return None if first_numbers(batch) == [4, 5] else batch

    with rw.LocalServer([QUEUE]) as server:
        with pytest.raises(rw.errors.SpecError, match="`transform` must be a function of a batch, got int"):
            rw.ReplayDataset(server, "queue", 2, transform=3)  # type: ignore[arg-type]
        insert_numbers(server.address, "queue", range(10))
        with rw.ReplayDataset(server, "queue", 2, transform=refuse_two, timeout_s=60) as dataset:
            assert first_numbers(next(dataset)) == [0, 1]
            with pytest.raises(ZeroDivisionError):
                next(dataset)
            with pytest.raises(rw.errors.SpecError, match="`transform` returned None"):
                next(dataset)
            with pytest.raises(RuntimeError, match="`transform` raised StopIteration"):
                next(dataset)
            assert first_numbers(next(dataset)) == [8, 9]


@pytest.mark.parametrize(
    ("config", "num_items", "num_told"),
    [
        (rw.TableConfig("replay", sampler="fifo"), 2, 1),
        (rw.TableConfig("replay", sampler="fifo"), 1, 0),  # a table of one item, as that of weights
        (rw.TableConfig("replay", sampler="fifo", max_times_sampled=2000), 2, 0),
        (rw.TableConfig("replay", sampler="lifo"), 2, 0),
    ],
)
def test_first_item_that_is_given_for_ever_is_told_of_once(
    caplog: pytest.LogCaptureFixture, config: rw.TableConfig, num_items: int, num_told: int
) -> None:
    with rw.LocalServer([config]) as server:
        insert_numbers(server.address, "replay", range(num_items))
        with rw.ReplayDataset(server, "replay", 100, timeout_s=60) as dataset:
            for _ in range(9):
                next(dataset)
            for _ in range(11):
                last = next(dataset)
    assert len(set(last.info.keys.tolist())) == 1
    text = f"samples are all one item of {num_items}, because a table with the sampler 'fifo'"
    assert len([message for message in caplog.messages if text in message]) == num_told


@pytest.mark.parametrize(
    ("keys", "priorities", "message"),
    [
        ([-1, 2], [1.0, 1.0], r"`keys` must be \[n\] integers as in `info.keys`, got int64 \(2,\)"),
        ([[1]], [[1.0]], r"`keys` must be \[n\] integers as in `info.keys`, got int64 \(1, 1\)"),
        ([0.5], [1.0], r"`keys` must be \[n\] integers as in `info.keys`, got float64 \(1,\)"),
        ([1, 2], [1.0], r"`priorities` has shape \(1,\), expected \(2,\)"),
        ([1], [-1.0], "must be finite and >= 0, got -1.0.$"),
        ([1, 2, 3], [np.inf, np.nan, 0.0], "must be finite and >= 0, got inf and 1 more such"),
    ],
)
def test_priorities_that_cannot_be_set_are_refused(keys: Any, priorities: Any, message: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=message):
        checked_updates(np.array(keys), np.array(priorities))


def test_key_and_priority_of_zero_can_be_set() -> None:
    keys, priorities = checked_updates(np.array([0, 2**63 - 1]), [0.0, 1])
    assert (keys.tolist(), priorities.tolist()) == ([0, 2**63 - 1], [0.0, 1.0])


def test_oldest_priorities_are_dropped_and_counted_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_updates, "_MAX_KEYS", 2)
    with rw.LocalServer([PRIORITIZED]) as server, rw.Client(server) as client:
        source = ServerTable(client.shards[0].server, "replay", 1, ReadOptions(), 60)
        updates = priority_updates.PriorityUpdates(client.server_info()["replay"], source.set_priorities)
        insert_numbers(server.address, "replay", range(3))
        keys = sorted({sample.info.key for sample in client.sample("replay", 60)})
        updates.put(np.array(keys, np.uint64), [5.0, 6.0, 7.0])
        assert updates.num_failed == 1
        updates.flush(60)
        assert updates.num_sent == 2
        updates.close(60)
        with pytest.raises(rw.errors.ClosedError):
            updates.put([1], [1.0])
        expected = set(zip(keys, [1.0, 6.0, 7.0], strict=True))
        assert {(sample.info.key, sample.info.priority) for sample in client.sample("replay", 99)} <= expected


@pytest.mark.parametrize(
    ("sampler", "remover", "warns"),
    [("uniform", "fifo", True), (rw.Prioritized(1.0), "fifo", False), ("fifo", "min_heap", False)],
)
def test_priorities_that_nothing_goes_by_are_warned_of_once(
    sampler: Any, remover: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with rw.LocalServer([rw.TableConfig("replay", 100, sampler, remover)]) as server:
        insert_numbers(server.address, "replay", [1])
        with rw.ReplayDataset(server, "replay", 1, timeout_s=60) as dataset:
            for _ in range(2):
                dataset.update_priorities(next(dataset), [2.0])
            dataset.flush_priorities()
    said = "table `replay`: neither its sampler (uniform) nor its remover (fifo) uses priorities"
    assert len([text for text in caplog.messages if said in text]) == warns
