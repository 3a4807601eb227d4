"""A local server's checkpoint on a real server, and back: every item, chunk, counter and rule is as it was."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading import fifo, read

import reverb_writer as rw
from reverb_writer.files.saved_replay import SavedReplay, open_saved
from reverb_writer.files.tfrecord import CHUNKS, ITEMS, TABLES, read_records, write_records
from reverb_writer.protocol import messages
from reverb_writer.protocol.signatures import ArraySpec

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server import ReplayServer
from reverb_writer_server.checkpoints.contents import Checkpoint, inspect
from reverb_writer_server.checkpoints.folder import CheckpointFolder, checkpoints_in

RATIO = rw.SampleToInsertRatio(2.0, 2, (-100.0, 500.0))
SIGNATURE = {"n": ArraySpec((None,), np.dtype(np.int64)), "frame": ArraySpec((None, 5), np.dtype(np.uint8), "frame")}
RULES = [
    rw.TableConfig("replay", 30, rw.Prioritized(0.5), rate_limiter=RATIO),
    rw.TableConfig("heap", 100, "max_heap", "min_heap", rw.MinSize(3), 7, SIGNATURE),
    rw.TableConfig.queue("queue", 50),
    rw.TableConfig.stack("stack", 60),
    rw.TableConfig.variables("empty"),
]


def write(address: str) -> None:
    """Write windows that share chunks to all tables but one, more to `replay` than it holds; sample and change some."""
    windows = {
        name: rw.WindowTarget(rw.WindowSpec(3), (name,), lambda window: float(window["n"][0]) + 0.5)
        for name in ("replay", "heap", "queue", "stack")
    }
    with rw.TrajectoryObserver(address, windows=windows, chunk_length=4) as observer:
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


def items_of(saved: SavedReplay) -> list[Any]:
    return sorted(saved.parsed_items(messages.PrioritizedItem), key=lambda item: (item.table, item.key))


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
    ],
)
def test_checkpoint_of_several_others_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as local, rw.Client(local.address) as client:
        client.insert({"n": np.arange(2)}, {"t": 1.0})
        path = local.save(tmp_path) / name
    write_records(path, [b"\xff"] if name == ITEMS else [])
    with pytest.raises(rw.errors.FormatError, match=reason):
        rw.LocalServer.restore(tmp_path)


def test_rules_that_no_table_here_has_are_refused(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as local:
        path = local.save(tmp_path) / TABLES
    (record,) = read_records(path)
    table = messages.PriorityTableCheckpoint.FromString(record)
    table.rate_limiter.min_diff, table.rate_limiter.max_diff = 0.0, 1.0
    write_records(path, itertools.repeat(table.SerializeToString(), 1))
    with pytest.raises(rw.errors.FormatError, match="cannot be restored: table `t`: `error_buffer` must span"):
        rw.LocalServer.restore(tmp_path)
