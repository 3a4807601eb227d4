"""Checkpoints on other servers, local or real, one or several: every item, chunk, counter and rule is as it was."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reading import fifo, read

import reverb_writer as rw
from reverb_writer.files.saved_replay import SavedReplay, open_saved
from reverb_writer.files.tfrecord import CHUNKS, ITEMS, TABLES, read_records, write_records
from reverb_writer.protocol import messages
from reverb_writer.protocol.signatures import ArraySpec

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server import ReplayServer
from reverb_writer_server.checkpoints.contents import Checkpoint, inspect
from reverb_writer_server.checkpoints.convert import Target, convert
from reverb_writer_server.checkpoints.folder import CheckpointFolder, checkpoints_in
from reverb_writer_server.cli import commands

RATIO = rw.SampleToInsertRatio(2.0, 2, (-100.0, 500.0))
SIGNATURE = {"n": ArraySpec((None,), np.dtype(np.int64)), "frame": ArraySpec((None, 5), np.dtype(np.uint8), "frame")}
RULES = [
    rw.TableConfig("replay", 30, rw.Prioritized(0.5), rate_limiter=RATIO),
    rw.TableConfig("heap", 100, "max_heap", "min_heap", rw.MinSize(3), 7, SIGNATURE),
    rw.TableConfig.queue("queue", 50),
    rw.TableConfig.stack("stack", 60),
    rw.TableConfig.variables("empty"),
]


def first_number(window: Any) -> float:
    return float(window["n"][0]) + 0.5


def write(address: str) -> None:
    """Write windows that share chunks to all tables but one, more to `replay` than it holds; sample and change some."""
    tables = ["replay", "heap", "queue", "stack"]
    with rw.TrajectoryObserver(address, tables, 3, priority=first_number, chunk_length=4) as observer:
        for number in range(40):
            step = {"n": np.int64(number), "frame": np.full(5, number, np.uint8)}
            observer(step, end_of_episode=number % 20 == 19)
    with rw.Client(address) as client:
        keys = {sample.info.key for sample in client.sample("replay", 30)}
        first, *_, last = sorted(keys)
        client.mutate_priorities("replay", updates={first: 77.0}, deletes=[last])
        assert len(list(client.sample("queue", 2))) == 2


def figures(address: str) -> Mapping[str, Any]:
    with rw.Client(address) as client:
        return {name: {**vars(table), "worker_time_ms": 0} for name, table in client.server_info().items()}


def list_items(saved: SavedReplay) -> list[Any]:
    return list(saved.parsed_items(messages.PrioritizedItem))


def items_of(saved: SavedReplay) -> list[Any]:
    return sorted(list_items(saved), key=lambda item: (item.table, item.key))


def rules_of(saved: SavedReplay) -> dict[str, Any]:
    tables = {table.table_name: table for table in saved.tables()}
    for table in tables.values():
        table.ClearField("signature")  # a map, whose order is by chance
    return tables


def assert_same(one: SavedReplay, other: SavedReplay) -> None:
    assert items_of(one) == items_of(other)
    chunks, copies = (  # parsed, because our writer sends zeros that Reverb leaves out
        {chunk.chunk_key: chunk for chunk, _ in saved.chunks()} for saved in (one, other)
    )
    assert chunks == copies
    assert one.signatures() == other.signatures()
    assert rules_of(one) == rules_of(other)


def checkpoint(address: str) -> SavedReplay:
    with rw.Client(address) as client:
        return open_saved(Path(client.checkpoint()))


def test_from_a_local_server_to_a_real_one_and_back(tmp_path: Path) -> None:
    with rw.LocalServer(RULES) as local:
        write(local.address)
        before = figures(local.address)
        saved = open_saved(local.save(tmp_path / "saved"))
    items = items_of(saved)
    assert {item.times_sampled for item in items} > {0, 1}
    assert len(list(saved.chunks())) < len(items)  # they share chunks
    with ReplayServer(RULES, restore=saved.path) as real:
        assert figures(real.address) == before
        of_real = checkpoint(real.address)
        assert_same(saved, of_real)
        with rw.LocalServer.restore(of_real.path) as again:
            assert figures(again.address) == before
            assert_same(saved, open_saved(again.save(tmp_path / "again")))
            for address in (real.address, again.address):
                with rw.Client(address) as client:
                    queued = [sample.data["n"].tolist() for sample in client.sample("queue", 34)]
                    top = next(client.sample("heap"))
                starts = [*range(2, 18), *range(20, 38)]
                assert queued == [[n, n + 1, n + 2] for n in starts]  # in their order
                assert (top.info.priority, top.data["frame"].tolist()) == (37.5, [[n] * 5 for n in (37, 38, 39)])


def test_items_of_reverbs_own_writer_on_a_local_server() -> None:
    reverb = pytest.importorskip("reverb")
    with ReplayServer([fifo("t", 100)]) as real:
        with reverb.Client(real.address).trajectory_writer(num_keep_alive_refs=3) as writer:
            for number in range(30):
                writer.append({"frame": np.full(5, number), "n": np.int64(number)})
                if number >= 2:
                    trajectory = {name: writer.history[name][-3:] for name in ("frame", "n")}
                    writer.create_item("t", number - 1.5, trajectory)
            writer.end_episode()
        saved = checkpoint(real.address)
        with rw.LocalServer.restore(saved.path) as local, rw.Client(local.address) as client:
            samples = read(client, "t")
    frames, numbers = ([sample.data[column] for sample in samples] for column in (0, 1))
    assert [one.tolist() for one in numbers] == [[n, n + 1, n + 2] for n in range(28)]
    for frame, number in zip(frames, numbers, strict=True):
        np.testing.assert_array_equal(frame, np.repeat(number[:, None], 5, axis=1))
    assert [sample.info.priority for sample in samples] == [n + 0.5 for n in range(28)]


def test_the_service_takes_the_folder_as_it_is(tmp_path: Path) -> None:
    with rw.LocalServer(RULES) as local:
        write(local.address)
        first = local.save(tmp_path)
        assert inspect(Checkpoint(first)).items == {"replay": 29, "heap": 36, "queue": 34, "stack": 36, "empty": 0}
        with CheckpointFolder(tmp_path, keep=3) as folder:
            latest = folder.latest()
            assert latest is not None
            assert latest.path == first
        second = local.save(tmp_path)
    assert [one.path for one in checkpoints_in(tmp_path)] == [second, first]  # a server's older ones are kept
    with rw.LocalServer.restore(tmp_path) as again:
        assert figures(again.address)["replay"]["current_size"] == 29


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (TABLES, "Priority table t was not found"),
        (ITEMS, "record 0 is not a "),
        (CHUNKS, "item [0-9]+ of table `t` needs tensor 0 of chunk [0-9]+, which was not saved"),
        ("rules that no table here has", "cannot be restored: table `t`: `error_buffer` must span"),
    ],
)
def test_checkpoint_of_several_others_or_of_unknown_rules_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as local, rw.Client(local.address) as client:
        client.insert({"n": np.arange(2)}, {"t": 1.0})
        folder = local.save(tmp_path)
    if name in (TABLES, ITEMS, CHUNKS):
        write_records(folder / name, [b"\xff"] if name == ITEMS else [])
    else:
        record, _ = read_records(folder / TABLES)  # and the reserved one
        table = messages.PriorityTableCheckpoint.FromString(record)
        table.rate_limiter.min_diff, table.rate_limiter.max_diff = 0.0, 1.0
        write_records(folder / TABLES, [table.SerializeToString()])
    with pytest.raises(rw.errors.FormatError, match=reason):
        rw.LocalServer.restore(tmp_path)


# Checkpoints of M servers become those of N: every item is there once, with its data, its priority and its key.

SOURCE = (
    rw.TableConfig("replay", 1000, rw.Prioritized(0.6)),
    rw.TableConfig("episodes", 1000),
    rw.TableConfig("weights", 1),
)
FIFO = 'sampler = "fifo"\nmax_times_sampled = 1\n'


def configuration(tmp_path: Path, num_shards: int, max_size: int = 1000, more: str = "") -> Path:
    path = tmp_path / "server.toml"
    path.write_text(
        f"""
        [cluster]
        shards = {num_shards}
        [checkpoints]
        directory = "{tmp_path / "new"}"
        [tables.replay]
        max_size = {max_size}
        {more or FIFO}
        [tables.episodes]
        {FIFO}
        [tables.weights]
        max_size = 1
        """
    )
    return path


def folders(tmp_path: Path, num_shards: int) -> list[Path]:
    new = tmp_path / "new"
    return [new] if num_shards == 1 else [new / f"shard-{shard}" for shard in range(num_shards)]


def write_episode(address: str, first: int, num_steps: int) -> None:
    """Write an episode of numbers: windows of three, each with the priority first + 0.5, and the whole of it."""
    with (
        rw.TrajectoryObserver(address, "replay", 3, priority=first_number, chunk_length=4) as windows,
        rw.EpisodeObserver(address, "episodes", num_steps, 2.0, chunk_length=4) as episodes,
    ):
        for number in range(first, first + num_steps):
            for observer in (windows, episodes):
                observer(
                    {"n": np.int64(number), "frame": np.full(5, number)}, end_of_episode=number == first + num_steps - 1
                )


def windows(first: int, num_steps: int) -> list[tuple[list[int], float]]:
    return [([n, n + 1, n + 2], n + 0.5) for n in range(first, first + num_steps - 2)]


def saved_episode(folder: Path, num_steps: int = 20) -> Path:
    with rw.LocalServer(SOURCE) as server:
        write_episode(server.address, 0, num_steps)
        return server.save(folder)


def found(address: str, table: str) -> list[tuple[list[int], float]]:
    """Take out all items of a server: a column and the priority; the other column must belong to it."""
    with rw.Client(address) as client:
        samples = read(client, table)
    for sample in samples:
        np.testing.assert_array_equal(sample.data[0], np.repeat(sample.data[1][:, None], 5, axis=1))
    return [(sample.data[1].tolist(), sample.info.priority) for sample in samples]


def restored(folder: Path) -> list[tuple[list[int], float]]:
    """Return the items of `replay` of a checkpoint."""
    with rw.LocalServer.restore(folder) as server:
        return found(server.address, "replay")


def run(saved: Sequence[Path], config: Path, *more: str) -> Result:
    return CliRunner().invoke(commands, ["checkpoints", "reshard", *map(str, saved), "--config", str(config), *more])


@pytest.mark.parametrize(("num_before", "num_after"), [(2, 3), (3, 1)])
def test_every_item_is_there_once_with_its_data_and_priority(tmp_path: Path, num_before: int, num_after: int) -> None:
    lengths = {0: 12, 100: 40, 200: 3, 300: 25, 400: 8}  # of episodes, by their first number
    before = [rw.LocalServer(SOURCE) for _ in range(num_before)]
    for turn, (first, num_steps) in enumerate(lengths.items()):
        write_episode(before[turn % num_before].address, first, num_steps)
    for version, server in enumerate(before, 1):
        with rw.Variables(server, "weights") as learner:
            learner.publish([np.array(version)])
    with rw.Client(before[0]) as client:
        key = next(client.sample("replay")).info.key
    saved = [server.save(tmp_path / f"old-{number}") for number, server in enumerate(before)]
    for server in before:
        server.close()
    times = {item.key: item.inserted_at.ToNanoseconds() for one in saved for item in list_items(open_saved(one))}
    result = run(saved, configuration(tmp_path, num_after))
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == num_after
    items, episodes = [], []
    for folder in folders(tmp_path, num_after):
        kept = open_saved(folder)
        Checkpoint(kept.path).check()  # by its checksums
        order = [times[item.key] for item in list_items(kept) if item.table == "replay"]
        assert order == sorted(order)
        with rw.LocalServer.restore(folder) as after:
            with rw.Client(after) as client:
                client.mutate_priorities("replay", updates={key: 1e6})
            with rw.Variables(after, "weights") as actor:
                assert actor.latest() == [num_before]
            items.append(found(after.address, "replay"))
            episodes += found(after.address, "episodes")
    assert max(map(len, items)) - min(map(len, items)) <= 1  # equal shares
    changed = [item for item in itertools.chain(*items) if item[1] == 1e6]
    assert len(changed) == 1  # by its key; it was sampled before, and comes out once more
    unchanged = [item if item[1] != 1e6 else (item[0], item[0][0] + 0.5) for item in itertools.chain(*items)]
    assert sorted(unchanged) == sorted(
        item for first, num_steps in lengths.items() for item in windows(first, num_steps)
    )
    assert sorted(episodes) == [(list(range(first, first + n)), 2.0) for first, n in lengths.items()]


def test_items_keep_the_nest_of_their_steps_and_how_often_they_were_sampled(tmp_path: Path) -> None:
    with rw.LocalServer(SOURCE) as server, rw.Client(server) as client:
        write_episode(server.address, 0, 5)
        list(client.sample("replay", 30))
        saved = server.save(tmp_path / "old")
    result = run([saved], configuration(tmp_path, 2, more='sampler = "uniform"'))
    assert result.exit_code == 0, result.output
    after = [one for folder in folders(tmp_path, 2) for one in list_items(open_saved(folder))]
    before = {item.key: item for item in list_items(open_saved(saved))}
    assert {item.key: item for item in after if item.table == "replay"}.items() <= before.items()
    with rw.LocalServer.restore(tmp_path / "new" / "shard-0") as server, rw.Client(server) as client:
        data = next(client.sample("replay")).data
    assert {name: leaf.shape for name, leaf in data.items()} == {"frame": (3, 5), "n": (3,)}


def test_item_that_two_servers_have_is_taken_once(tmp_path: Path) -> None:
    """As when unconfirmed items were sent again: here one checkpoint is given twice."""
    saved = saved_episode(tmp_path / "old")
    assert run([saved, saved.parents[1]], configuration(tmp_path, 2)).exit_code == 0
    assert sorted(itertools.chain(*map(restored, folders(tmp_path, 2)))) == windows(0, 20)


def test_oldest_items_without_room_and_tables_that_are_not_configured_are_left_out(tmp_path: Path) -> None:
    saved = saved_episode(tmp_path / "old")
    config = configuration(tmp_path, 1, 16)
    config.write_text(config.read_text().replace("[tables.episodes]", "[tables.others]"))
    result = run([saved], config, "--shards", "2")
    assert result.exit_code == 0, result.output
    assert "table `replay`: 2 items left out" in result.output
    assert "table `episodes`: 1 items left out" in result.output
    assert all("episodes" not in rules_of(open_saved(folder)) for folder in folders(tmp_path, 2))
    items = [*map(restored, folders(tmp_path, 2))]
    assert [len(one) for one in items] == [8, 8]
    assert sorted(itertools.chain(*items)) == windows(0, 20)[2:]


def test_little_room_on_one_server_is_made_up_for_by_the_others(tmp_path: Path) -> None:
    saved = open_saved(saved_episode(tmp_path / "old"))
    targets = [Target(tmp_path / str(size), {"replay": rw.TableConfig("replay", size)}) for size in (1000, 2, 999)]
    assert convert([saved], targets) == {"episodes": 1}
    assert [len(target.items["replay"]) for target in targets] == [8, 2, 8]
    assert sorted(key.key for target in targets for key in target.items["replay"]) == sorted(
        item.key for item in list_items(saved) if item.table == "replay"
    )


def test_rate_limiters_begin_in_balance_on_a_real_server(tmp_path: Path) -> None:
    saved = saved_episode(tmp_path / "old")
    ratio = 'rate_limiter = "ratio"\nsamples_per_insert = 2.0\nmin_size = 4\nerror_buffer = [-20.0, 20.0]\n'
    assert run([saved], configuration(tmp_path, 2, more=ratio)).exit_code == 0
    limiter = rw.SampleToInsertRatio(2.0, 2, (-10.0, 10.0))
    tables = [rw.TableConfig("replay", 500, rate_limiter=limiter), *SOURCE[1:]]
    path = open_saved(folders(tmp_path, 2)[0]).path
    with ReplayServer(tables, restore=path) as server, rw.Client(server) as client:
        info = client.server_info()["replay"]
        assert (info.current_size, info.max_size, info.rate_limiter.num_inserts) == (9, 500, 9)
        assert (info.rate_limiter.min_diff, info.rate_limiter.max_diff, info.rate_limiter.diff) == (-10, 10, 4)
        client.insert({"n": np.arange(3), "frame": np.zeros((3, 5))}, {"replay": 1.0})
        assert len(list(client.sample("replay", 10))) == 10


def test_all_items_of_queues_come_out_of_the_new_one(tmp_path: Path) -> None:
    """A queue's rate limiter lets out as many as it has counted in: a balance at its centre would keep items back."""
    saved = []
    for shard, count in enumerate((3, 4)):
        with rw.LocalServer([rw.TableConfig.queue("q", 5)]) as server, rw.Client(server) as client:
            for number in range(count):
                client.insert([np.array([shard, number])], {"q": 1.0})
            next(client.sample("q"))
            saved.append(open_saved(server.save(tmp_path / str(shard))))
    target = Target(tmp_path / "new", {"q": rw.TableConfig.queue("q", 10)})
    assert convert(saved, [target]) == {}
    with rw.LocalServer.restore(target.path) as server, rw.Client(server) as client:
        samples = [sample.data[0].tolist() for sample in client.sample("q", 5)]
        assert samples == [[0, 1], [0, 2], [1, 1], [1, 2], [1, 3]]
        limiter = client.server_info()["q"].rate_limiter
        assert (limiter.diff, limiter.num_inserts) == (0, 7)


def test_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    config = configuration(tmp_path, 1)
    result = run([tmp_path], config)
    assert "is no checkpoint, and has none in it" in str(result.exception)
    saved = saved_episode(tmp_path / "old")
    with CheckpointFolder(tmp_path / "new", keep=1):
        assert "another server uses it" in str(run([saved], config).exception)
    config.write_text("[tables.replay]\n")
    assert "`checkpoints.directory`: got nothing" in str(run([saved], config).exception)


def test_checkpoint_that_its_server_could_not_keep_any_more_is_not_passed_over(tmp_path: Path) -> None:
    """A folder that gets items, too, is looked after as by its server; of another one it is an error."""
    new = tmp_path / "new"
    saved = saved_episode(new)
    shutil.copytree(saved_episode(tmp_path / "newer", 30), new / "incoming" / "2026-01-01T00:00:00+00:00")
    old = shutil.copytree(new, tmp_path / "old")
    config = configuration(tmp_path, 1)
    assert run([new], config).exit_code == 0
    assert restored(new) == windows(0, 30)
    refused = run([old], config)
    assert "2026-01-01T00:00:00+00:00 is finished, but its server ended" in str(refused.exception)
    assert run([old / saved.relative_to(new)], config).exit_code == 0


@pytest.mark.parametrize(
    ("name", "records", "reason"),
    [
        (ITEMS, [b"\xff"], "items.tfrecord: record 19 is not a PrioritizedItem"),
        (CHUNKS, [b"\xff"], "chunks.tfrecord: record [0-9]+ is not a ChunkData"),
        (CHUNKS, [], "1 chunks that items refer to are in none of 1 checkpoints"),
    ],
)
def test_damage_is_named_and_leaves_no_checkpoint(tmp_path: Path, name: str, records: list[bytes], reason: str) -> None:
    path = saved_episode(tmp_path / "old") / name
    before = list(read_records(path))
    write_records(path, [*before, *records] if records else before[1:])
    with pytest.raises(rw.errors.FormatError, match=reason):
        raise run([path.parent], configuration(tmp_path, 2)).exception or AssertionError("it was accepted")
    assert not list((tmp_path / "new").glob("shard-*/kept/*"))
    with CheckpointFolder(tmp_path / "new" / "shard-0", keep=1) as folder:
        assert folder.latest() is None
