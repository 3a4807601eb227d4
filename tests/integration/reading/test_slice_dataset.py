"""Flat batches of slices from real servers: no slice crosses an episode, whoever wrote it, and every row is marked."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import contents
from reading import Serve
from server_process import StartServer
from shard_files import ShardFile, shard_lines
from threads import at_once
from waiting import eventually

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL

pytestmark = contents


EPISODES = rw.TableConfig("episodes", 1000)
QUEUE = rw.TableConfig("queue", 1000, sampler="fifo", max_times_sampled=1)


def write_episodes(address: str, table: str, lengths: list[int], actor: int = 0) -> None:
    """Write episodes of rows 100 * episode + t. The last one is a boundary row, terminal if the number is even."""
    with rw.EpisodeObserver(address, table, 1000) as observer:
        for episode, length in enumerate(lengths):
            for t in range(length):
                kind = FIRST * (t == 0) | (LAST | TERMINAL * (episode % 2 == 0) if t == length - 1 else ACTION)
                observer.write_row({"row": np.int64(10_000 * actor + 100 * episode + t), "kind": np.uint8(kind)}, kind)


def slices_of(batch: rw.Batch) -> list[list[int]]:
    return [part.tolist() for part in np.split(batch.data["row"], batch.slices.first_rows[1:])]


def assert_is_well_marked(batch: rw.Batch) -> None:
    """Check kinds and slices against the rows' numbers: consecutive within a slice, an episode a hundred."""
    slices = batch.slices
    lengths = [len(rows) for rows in slices_of(batch)]
    assert slices.lengths.tolist() == lengths
    assert np.flatnonzero(slices.starts).tolist() == slices.first_rows.tolist() == [*np.cumsum([0, *lengths[:-1]])]
    assert slices.last_rows.tolist() == (np.cumsum(lengths) - 1).tolist()
    np.testing.assert_array_equal(batch.kinds, batch.data["kind"])
    np.testing.assert_array_equal(batch.is_first, batch.data["row"] % 100 == 0)
    np.testing.assert_array_equal(batch.is_terminal, (batch.data["row"] // 100 % 2 == 0) & batch.is_last)
    np.testing.assert_array_equal(batch.is_last[slices.last_rows], ~slices.cut_by_sampler)
    assert batch.mask.all()
    for rows in slices_of(batch):
        assert rows == list(range(rows[0], rows[0] + len(rows)))
        assert len({row // 100 for row in rows}) == 1


def test_slices_of_whole_episodes_that_many_actors_write_at_once(serve: Serve) -> None:
    client = serve(EPISODES)
    write = functools.partial(write_episodes, client.address, "episodes", [3, 12, 1, 30])
    at_once(*(functools.partial(write, actor) for actor in range(3)))
    seen = set()
    with rw.SliceDataset(client, "episodes", 8, 5, seed=0) as dataset:
        for _ in range(30):
            batch = next(dataset)
            assert_is_well_marked(batch)
            assert len(batch.slices) == 8
            assert all(len(rows) == min(5, [3, 12, 1, 30][rows[0] // 100 % 100]) for rows in slices_of(batch))
            assert (batch.info.table_sizes == 12).all()
            assert batch.info.server == client.address
            assert batch.slices.members is batch.next is batch.next_kinds is None
            seen |= set(batch.data["row"].tolist())
    assert len(seen) > 3 * 30


def test_each_episode_of_a_queue_comes_once_and_an_error_costs_one_batch(serve: Serve) -> None:
    def picky(batch: rw.Batch) -> rw.Batch:
        if batch.data["row"][0] // 100 == 2:
            raise ZeroDivisionError("two")
        return batch

    client = serve(QUEUE)
    write_episodes(client.address, "queue", [2, 3, 4])
    with rw.SliceDataset(client, "queue", 2, 10, single_pass=True) as dataset:
        batches = [slices_of(batch) for batch in dataset]
    assert batches == [[[0, 1], [100, 101, 102]], [[200, 201, 202, 203]]]
    write_episodes(client.address, "queue", [1, 1, 1, 1])
    with rw.SliceDataset(client, "queue", 1, 1, transform=picky, pool_size=4, single_pass=True) as dataset:
        found: list[int] = []
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                for batch in dataset:
                    found += batch.data["row"].tolist()
    assert found == [0, 100, 300]


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_a_boundary_step_that_starts_an_item_is_marked_alike_whatever_precedes_it(
    serve: Serve, discount: float
) -> None:
    def item(types: list[int], discounts: list[float]) -> rw.Trajectory:
        nothing = np.zeros(len(types), np.float32)
        kinds, after = np.array(types, np.int32), np.array([*types[1:], 0], np.int32)
        return rw.Trajectory(kinds, nothing, nothing, (), after, nothing, np.array(discounts, np.float32))

    client = serve(QUEUE)
    for each in (item([0, 1], [1, discount]), item([2], [1]), item([1, 2], [discount, 1])):
        client.insert(each, {"queue": 1.0})
    with rw.SliceDataset(client, "queue", 3, 2, seed=0) as dataset:
        batch = next(dataset)
    assert batch.row_kinds is None  # `Client.insert` stores none
    assert batch.is_terminal.tolist() == [False, False, False, False, discount == 0]


def test_ensemble_of_tables_has_its_shares_and_what_follows_laid_end_to_end(serve: Serve) -> None:
    client = serve(rw.TableConfig("a", 100, rw.Prioritized(1.0)), rw.TableConfig("b", 100))
    for actor, table in enumerate("ab"):
        write_episodes(client.address, table, [4, 6], actor=actor)
    members = [rw.SliceDataset(client, table, size, 3, with_next=True) for table, size in (("a", 2), ("b", 6))]
    with rw.MixedDataset(members) as dataset:
        for _ in range(3):
            batch = next(dataset)
            assert_is_well_marked(batch)
            assert_next_follows(batch)
            assert (batch.next["row"] // 10_000).tolist() == [0] * 2 + [1] * 6
            of_slices = batch.slices.members.tolist()
            assert of_slices == np.asarray(batch.info.members).tolist() == [0] * 2 + [1] * 6
            assert of_slices == (batch.data["row"][batch.slices.first_rows] // 10_000).tolist()
            assert len(set(zip(of_slices, batch.slices.trajectories.tolist(), strict=True))) == 8
        dataset.update_priorities(batch, np.arange(8))
        dataset.flush_priorities()
        priorities = {sample.info.key: sample.info.priority for sample in client.sample("a", 50)}
        assert priorities[int(batch.info.keys[1])] == 1.0


def test_slices_of_servers_are_those_of_one_and_follow_the_target(replay_server: StartServer, tmp_path: Path) -> None:
    servers = [replay_server(rw.TableConfig("replay", 100, rw.Prioritized(1.0))) for _ in range(3)]
    for actor, server in enumerate(servers):
        write_episodes(server.address, "replay", [4] * (actor + 1), actor=actor)
    lines = shard_lines(servers)
    file = ShardFile(tmp_path, *lines[:2])

    def seen(batch: rw.Batch) -> set[int]:
        assert_is_well_marked(batch)
        return set((batch.data["row"] // 10_000).tolist())

    with rw.Client(file.target) as client, rw.SliceDataset(client, "replay", 8, 3, timeout_s=60) as dataset:
        found: set[int] = set()
        for _ in range(20):
            batch = next(dataset)
            found |= seen(batch)
            np.testing.assert_allclose(batch.info.probabilities, 1 / 3)
        assert found == {0, 1}
        dataset.update_priorities(batch, np.ones(8))
        dataset.flush_priorities()
        assert dataset.stats().priority_updates == len(set(batch.info.keys.tolist()))
        file.tell(client, *lines[1:])
        eventually(lambda: 2 in seen(next(dataset)))
        eventually(lambda: seen(next(dataset)) <= {1, 2})


def test_episodes_that_are_all_too_short_are_left_out_and_an_error_in_the_end(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(EPISODES)
    write_episodes(client.address, "episodes", [2, 3])
    with rw.SliceDataset(client, "episodes", 2, 9, short="skip", timeout_s=3.0) as dataset:
        assert dataset.poll(0.1) is None  # although such episodes arrive without an end
        with pytest.raises(rw.errors.IncompleteError, match="no trajectory is long enough"):
            next(dataset)
        before = client.server_info()["episodes"].rate_limiter.num_samples
        time.sleep(0.3)
        drawn = client.server_info()["episodes"].rate_limiter.num_samples - before
        assert drawn <= 2 * 2 * 2, "without a waiting reader, more was drawn than two pools ahead"
    assert sum("Such samples are left out" in message for message in caplog.messages) == 1


def test_slices_start_with_an_episode_if_so_asked(serve: Serve) -> None:
    """Windows that span episodes: rows 1 to 5, 4 to 8 and so on of episodes of four rows."""
    client = serve(EPISODES)
    with rw.SequenceObserver(client, "episodes", 5, 3) as observer:
        for row in range(20):
            kind = ACTION if row % 4 < 3 else LAST
            observer.write_row({"row": np.int64(row)}, kind | FIRST * (row % 4 == 0))
    for by in ("trajectory", "row"):
        with rw.SliceDataset(client, "episodes", 6, 3, by=by, start="episode", slices_per_item=4) as dataset:
            for _ in range(4):
                batch = next(dataset)
                assert {rows[0] % 4 for rows in slices_of(batch)} == {0}
                np.testing.assert_array_equal(batch.is_first, batch.slices.starts)
                assert all(row // 4 == rows[0] // 4 for rows in slices_of(batch) for row in rows)


def test_padding_of_windows_is_in_no_slice_and_padding_of_slices_has_its_kind(serve: Serve) -> None:
    """Neither the windows' leaves nor a mask show the padding; the stored kinds do."""
    client = serve(EPISODES)
    with rw.TrajectoryObserver(client, "episodes", 8, 8, end_of_episode="tile") as observer:
        for row in range(1, 11):
            step = {"row": np.int64(row), "is_last": np.bool_(row == 10), "is_terminal": np.bool_(row == 10)}
            observer(step)
    with rw.SliceDataset(client, "episodes", 16, 4, short="pad") as dataset:
        for _ in range(4):
            batch = next(dataset)
            assert len(batch.data["row"]) == 16 * 4
            for rows, kinds in zip(slices_of(batch), np.split(batch.kinds, 16), strict=True):
                assert min(rows) > 0
                real = [row for row, kind in zip(rows, kinds, strict=True) if kind != PADDING]
                assert real == list(range(rows[0], rows[0] + len(real)))
                assert len(real) == (2 if rows[0] == 9 else 4)
            np.testing.assert_array_equal(batch.mask, batch.kinds != PADDING)
            np.testing.assert_array_equal(batch.is_terminal, (batch.data["row"] == 10) & batch.mask)


def test_mixed_slices_have_kinds_also_of_the_table_that_stores_none(serve: Serve) -> None:
    client = serve(EPISODES, QUEUE)
    flags = {"is_first": np.arange(3) == 0, "is_last": np.arange(3) == 2, "is_terminal": np.arange(3) == 2}
    with rw.EpisodeObserver(client, "episodes", 10) as observer:
        for t in range(3):
            observer({"row": np.int64(t), **{name: flag[t] for name, flag in flags.items()}})
    client.insert({"row": np.arange(3), **flags}, {"queue": 1.0})
    members = [rw.SliceDataset(client, table, 1, 3) for table in ("episodes", "queue")]
    with rw.MixedDataset(members) as dataset:
        batch = next(dataset)
    assert batch.row_kinds.tolist() == [FIRST | ACTION, ACTION, LAST | TERMINAL] * 2
    assert batch.slices.members.tolist() == [0, 1]


@pytest.mark.parametrize("cache_bytes", [1, 2_000, 1 << 28])
def test_slices_do_not_depend_on_the_size_of_the_cache(serve: Serve, cache_bytes: int) -> None:
    client = serve(EPISODES)
    write_episodes(client.address, "episodes", [30, 20, 40, 10])
    options: dict[str, Any] = {"slices_per_item": 3, "with_next": True, "max_cache_bytes": cache_bytes}
    for by in ("trajectory", "row"):
        with rw.SliceDataset(client, "episodes", 6, 4, by=by, **options) as dataset:
            for _ in range(12):
                batch = next(dataset)
                assert_is_well_marked(batch)
                assert_next_follows(batch)


def assert_next_follows(batch: rw.Batch) -> None:
    """Check that `next` has the row after each slice that was cut, and else the slice's last row."""
    slices = batch.slices
    last = np.array([rows[length - 1] for rows, length in zip(slices_of(batch), slices.lengths, strict=True)])
    assert batch.next["row"].tolist() == (last + slices.cut_by_sampler).tolist()
    assert batch.next_kinds.tolist() == batch.next["kind"].tolist()
    assert len(batch.next_kinds) == len(batch.info)


def test_each_item_gives_one_slice_in_each_round_also_if_they_are_copied_in_parts(serve: Serve) -> None:
    client = serve(QUEUE)
    with rw.EpisodeObserver(client, "queue", 100) as observer:
        for row in range(90):
            observer({"row": np.int64(row), "frame": np.full((300, 300), row, np.uint8)}, end_of_episode=row % 30 == 29)
    with rw.SliceDataset(client, "queue", 3, 20, slices_per_item=12, with_next=True, single_pass=True) as dataset:
        batches = [next(dataset) for _ in range(3)]
        dataset.close()
        batches += list(dataset)
    assert len(batches) == 12  # of 5 MB each: in parts, the last of which are copied after `close`
    assert len({rows[0] for batch in batches for rows in slices_of(batch)}) > 12  # not the same slices in each round
    for batch in batches:
        assert [rows[0] // 30 for rows in slices_of(batch)] == [0, 1, 2]
        assert (batch.data["frame"][:, 299, 299] == batch.data["row"]).all()
        assert (batch.next["frame"][:, 0, 0] == batch.next["row"]).all()
    assert dataset.stats().ready_samples == 0


def test_items_of_a_queue_that_arrive_while_slices_are_copied_in_parts_outlast_close(serve: Serve) -> None:
    client = serve(QUEUE)
    with rw.EpisodeObserver(client, "queue", 10) as observer:
        noise = np.random.default_rng(0).integers(256, size=(300, 300), dtype=np.uint8)  # more than one message of it
        for row in range(240):
            observer({"row": np.int64(row), "frame": noise}, end_of_episode=row % 10 == 9)
    dataset = rw.SliceDataset(client, "queue", 4, 10, slices_per_item=20)
    next(dataset)
    eventually(lambda: client.server_info()["queue"].current_size <= 16)  # two pools are taken out of it
    time.sleep(2.5)  # longer than `close` waits for a server that sends nothing
    dataset.close()
    stats = dataset.stats()
    items = {rows[0] // 10 for batch in dataset for rows in slices_of(batch)}
    assert stats.lost_samples == 0
    assert len(items) + client.server_info()["queue"].current_size == 24


def test_leaves_of_an_item_that_differ_in_length_cannot_be_sliced(serve: Serve) -> None:
    client = serve(QUEUE)
    client.insert({"a": np.zeros(3), "b": np.zeros(4)}, {"queue": 1.0})
    client.insert({"a": np.zeros(3), "b": np.zeros(3)}, {"queue": 1.0})
    with rw.SliceDataset(client, "queue", 1, 2, timeout_s=10.0) as dataset:
        with pytest.raises(rw.errors.StructureError, match="number of rows"):
            next(dataset)
        assert len(next(dataset).data["a"]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slices_per_item": 0}, "`slices_per_item` must be >= 1, got 0"),
        ({"table": 3}, "`table` must be the name of one table, got 3"),
        ({"table": ["a", "b"]}, "`table` must be the name of one table, got ['a', 'b']"),
        ({"seed": "x"}, "`seed` must be an integer, got 'x'"),
        ({"start": "first"}, "`start` must be one of 'any', 'episode', got 'first'"),
        ({"last_row": "last"}, "`last_row` must be 'boundary', 'action' or None, got 'last'"),
    ],
)
def test_argument_that_can_never_work_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=re.escape(message)):
        rw.SliceDataset("localhost:1", **{"table": "a", "num_slices": 2, "slice_len": 3, **given})
