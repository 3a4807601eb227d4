"""Between disk and server: what an actor sent can be sent again, and what a server has can be kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree
from episodes import SMALL_EPISODES, SMALL_GRID, expected, feed, observed
from kinds import contents
from reading import Place, Serve, read
from server_process import Kind, StartServer

import reverb_writer as rw
from reverb_writer.files import (
    RolloutWriter,
    StoredTrajectory,
    export_items,
    export_saved,
    import_trajectories,
    list_trajectories,
    send_trajectory,
)
from reverb_writer.files.importing import Journal
from reverb_writer.files.tfrecord import CHUNKS, read_records, write_records
from reverb_writer.protocol.signatures import ArraySpec

pytestmark = contents


@contextlib.contextmanager
def both(observer: Any, writer: RolloutWriter) -> Iterator[Callable[..., None]]:
    """Yield a function that writes a step with both, as a program does that keeps on disk what it sends."""

    def write(step: Any, **flags: Any) -> None:
        observer(step, **flags)
        writer(step, **flags)

    with observer, writer:
        yield write


def resend(data_dir: Path, observer: Any) -> None:
    with observer:
        for path in list_trajectories(data_dir):
            send_trajectory(StoredTrajectory(path), observer)


def test_windows_from_disk_are_those_of_live_writing(place: Place, tmp_path: Path) -> None:
    for number, spec in enumerate(SMALL_GRID):
        folder = tmp_path / str(number)
        with both(observed(place, spec, "a"), RolloutWriter(folder)) as write:
            feed(write, SMALL_EPISODES)
        resend(folder, observed(place, spec, "b"))
        assert place.column("a") == place.column("b") == expected(spec, SMALL_EPISODES)


@pytest.mark.parametrize("mode", ["drop", "pad", "tile", "cover", "truncate", "align_end"])
@pytest.mark.parametrize("discard", [False, True])
def test_episodes_that_were_reset_or_closed_come_again_as_they_were(
    place: Place, tmp_path: Path, mode: str, discard: bool
) -> None:
    def observer(table: str) -> rw.TrajectoryObserver:
        return rw.TrajectoryObserver(place.client, table, 3, 2, end_of_episode=mode)

    live, writer = observer("a"), RolloutWriter(tmp_path)
    with both(live, writer) as write:
        for n in range(1, 7):
            write({"n": np.int64(n)}, end_of_episode=False)
        live.reset(discard=discard)
        writer.end_episode(end="cut" if discard else "reset")
        for n in range(11, 15):
            write({"n": np.int64(n)}, end_of_episode=False)
    resend(tmp_path, observer("b"))
    written = place.column("a")
    assert written == place.column("b")
    assert written[0] == [1, 2, 3]


def test_environments_come_again_without_the_steps_that_they_had_not(place: Place, tmp_path: Path) -> None:
    observer, writer = rw.TrajectoryObserver(place.client, "a", 2, num_envs=2), RolloutWriter(tmp_path, num_envs=2)
    with both(observer, writer) as write:
        write({"n": np.array([1, 11])}, end_of_episode=[False, False])
        write({"n": np.array([2, 0])}, env_mask=[True, False], end_of_episode=[False, True])
        write({"n": np.array([0, 12])}, env_mask=[False, True], end_of_episode=[False, True])
        write({"n": np.array([3, 21])}, end_of_episode=[True, False])
        observer.reset(discard=True, env_ids=[1])
        writer.end_episode(end="cut", env_ids=[1])
        with pytest.raises(rw.errors.StructureError, match="`env_mask` has shape"):
            writer({"n": np.array([4, 22])}, end_of_episode=[True, True], env_mask=[True])
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 2))
    assert sorted(place.column("a")) == sorted(place.column("b")) == [[1, 2], [2, 3], [11, 12]]
    stored = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(tmp_path)]
    assert sorted(stored) == [[1, 2, 3], [11, 12], [21]]


def ended(data_dir: Path) -> list[tuple[Any, ...]]:
    """Return the kinds of each trajectory's rows, and how it ended."""
    stored = [StoredTrajectory(path) for path in list_trajectories(data_dir)]
    return [(one.load_rows()[1].tolist(), one.manifest.end.value) for one in stored if one.manifest.end]


def numbered_episode(first: int, num_steps: int, **options: Any) -> rw.Episode:
    """Return an episode whose observations, boundary step included, are numbered from `first` on."""
    numbers = np.arange(first, first + num_steps + 1)
    options = {"rewards": np.zeros(num_steps), "len_lookback_buffer": 0, **options}
    return rw.Episode(observations=numbers, actions=numbers[1:], **options)


def test_episodes_that_are_written_at_once_come_again(place: Place, tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for episode in (
            numbered_episode(1, 4, terminated=True),
            numbered_episode(11, 1, truncated=True),
            numbered_episode(21, 3),  # a chunk that was cut
        ):
            writer.write_episode(episode)
        with pytest.raises(rw.errors.IncompleteError, match="an episode without a step"):
            writer.write_episode(rw.Episode())
        with pytest.raises(rw.errors.StructureError, match="observation"):
            writer.write_episode(rw.Episode(observations=[0.5, 1], actions=[1], rewards=[1.0], len_lookback_buffer=0))
    resend(tmp_path, rw.EpisodeObserver(place.client, "a", 9))
    items = list(read(place.client, "a"))
    sent = [item.data[1].tolist() for item in items]
    assert sent == [[1, 2, 3, 4, 5], [11, 12], [21, 22, 23, 24]]
    assert [StoredTrajectory(path).load()["observation"].tolist() for path in list_trajectories(tmp_path)] == sent
    kinds = [[3, 2, 2, 2, 12], [3, 4], [3, 2, 2, 0]]
    assert ended(tmp_path) == [*zip(kinds, ["terminated", "truncated", "cut"], strict=True)]
    assert [item.kinds.tolist() for item in items if item.kinds is not None] == kinds
    dataset = rw.files.RolloutDataset(tmp_path, num_envs=1, dataset_loops=1, shuffle=False)
    assert [batch.observation.item() for batch in dataset] == [1, 2, 3, 4, 11, 21, 22, 23]


def test_import_goes_on_where_it_was_stopped_and_other_steps_stop_it_by_name(place: Place, tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "data") as writer:
        feed(writer, (3, 3, 3, 3))
    with RolloutWriter(tmp_path / "data") as writer:
        writer({"m": np.int64(1)}, end_of_episode=True)
    *paths, other = list_trajectories(tmp_path / "data")
    paths[1].write_text("{")
    for delivered in ([0], [0, 2], [0, 2, 3]):  # the second is damaged
        journal = Journal(tmp_path / "journal", {"table": "a"}, tmp_path / "data")
        with rw.TrajectoryObserver(place.client, "a", 3) as observer:
            for done in import_trajectories(paths, observer, journal=journal):
                if not done.error:
                    break  # closes the iterator: what was sent is confirmed
        journal = Journal(tmp_path / "journal", {"table": "a"}, tmp_path / "data")
        assert journal.done == {paths[index].name for index in delivered}
    journal = Journal(tmp_path / "new", {}, tmp_path / "data")
    with (
        rw.TrajectoryObserver(place.client, "a", 3) as observer,
        pytest.raises(rw.errors.StructureError, match=f"trajectory `{other.name}`: step 3"),
    ):
        list(import_trajectories([paths[0], other], observer, journal=journal))
    assert journal.done == {paths[0].name}
    assert place.column("a") == [[1, 2, 3], [7, 8, 9], [10, 11, 12], [1, 2, 3]]
    with pytest.raises(rw.errors.SpecError, match="belongs to another import"):
        Journal(tmp_path / "journal", {"table": "b"}, tmp_path / "data")


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_export_writes_each_item_once_but_for_odd_ones_and_the_table_keeps_it(
    serve: Serve, tmp_path: Path, sampler: str
) -> None:
    client = serve(rw.TableConfig("t", 1000, rw.Prioritized(1.0) if sampler == "prioritized" else "uniform", "fifo"))
    with rw.TrajectoryObserver(client, "t", 3) as observer:
        feed(observer, (12,))
    client.insert({"a": np.arange(3), "b": np.arange(2)}, {"t": 1.0})  # columns of different lengths
    *good, odd = sorted(export_items(client, "t", RolloutWriter(tmp_path)), key=lambda done: bool(done.error))
    assert client.server_info()["t"].current_size == 11
    assert [each.num_steps for each in good] == [3] * 10
    assert odd.name in odd.error
    found = [tree.flatten(StoredTrajectory(path).load())[0].tolist() for path in list_trajectories(tmp_path)]
    assert sorted(found) == [[n, n + 1, n + 2] for n in range(1, 11)]


@pytest.mark.parametrize(("sampler", "times"), [("fifo", 1), ("fifo", 0), ("lifo", 0), ("uniform", 1), ("uniform", 3)])
def test_export_of_a_table_that_would_lose_items_is_refused(
    serve: Serve, tmp_path: Path, sampler: Any, times: int
) -> None:
    client = serve(rw.TableConfig("t", 1000, sampler, "fifo", max_times_sampled=times))
    with rw.TrajectoryObserver(client, "t", 1) as observer:
        feed(observer, (600,))
    client.insert({"a": np.arange(3), "b": np.arange(2)}, {"t": 1.0})  # an export could not write it
    with pytest.raises(rw.errors.SpecError, match="can only be read by removing its items"):
        next(export_items(client, "t", RolloutWriter(tmp_path)))
    assert client.server_info()["t"].current_size == 601
    assert list_trajectories(tmp_path) == []


def test_export_of_a_saved_replay_writes_each_item_once(
    server_kind: Kind, replay_server: StartServer, tmp_path: Path
) -> None:
    once: Any = rw.TableConfig("once", 1000, "fifo", "fifo", max_times_sampled=1)
    signature = {"n": ArraySpec((None,), np.dtype(np.int64)), "pair": [ArraySpec((None,), np.dtype(np.float32))]}
    tables = [once, rw.TableConfig("t", 1000, signature=signature), rw.TableConfig("other", 1000)]
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(rw.LocalServer(tables)) if server_kind != "reverb" else None
        client = stack.enter_context(rw.Client(local.address if local else replay_server(*tables).address))
        with rw.TrajectoryObserver(client, "once", 3) as observer:
            feed(observer, (300, 200))
        for n in range(1, 6):
            client.insert({"n": np.arange(n), "pair": [np.zeros(n, np.float32)]}, {"t": n / 2})
        client.insert({"a": np.arange(3), "b": np.arange(2)}, {"other": 1.0})
        client.insert({"a": np.arange(3), "b": np.arange(3)}, {"other": 1.0})
        client.insert({"c": np.arange(3)}, {"other": 1.0})
        sizes = {name: info.current_size for name, info in client.server_info().items()}
        folder = tmp_path / "saved" if local else Path(client.checkpoint())
        if local:
            local.save(folder)
        done = list(export_saved(folder, "once", RolloutWriter(tmp_path / "once")))
        assert {name: info.current_size for name, info in client.server_info().items()} == sizes
    assert [(each.num_steps, each.error) for each in done] == [(3, "")] * (298 + 198)
    found = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(tmp_path / "once")]
    assert found == expected(rw.WindowSpec(3), (300, 200))
    assert list(export_saved(folder, "once", RolloutWriter(tmp_path / "once"))) == []  # as after an interruption

    for each in export_saved(folder, "t", RolloutWriter(tmp_path / "t")):
        assert not each.error
    stored = [StoredTrajectory(path) for path in list_trajectories(tmp_path / "t")]
    assert [(one.load()["n"].tolist(), one.manifest.metadata["priority"]) for one in stored] == [
        (list(range(n)), n / 2) for n in range(1, 6)
    ]
    assert [one.load()["pair"][0].dtype for one in stored] == [np.float32] * 5
    assert [one.manifest.metadata["reverb"]["table"] for one in stored] == ["t"] * 5

    lengths, good, structure = export_saved(folder, "other", RolloutWriter(tmp_path / "other"))
    assert lengths.error.startswith(f"item {lengths.name}: ")
    assert (good.num_steps, good.error) == (3, "")
    assert structure.error.startswith(f"item {structure.name}: ")
    assert len(list_trajectories(tmp_path / "other")) == 1
    with pytest.raises(rw.errors.StructureError, match="has no table `nowhere`; it has once, other, t"):
        list(export_saved(folder, "nowhere", RolloutWriter(tmp_path / "none")))


def test_item_of_a_saved_replay_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as server, rw.Client(server.address) as client:
        for n in range(2):
            client.insert({"n": np.full(2, n)}, {"t": 1.0})
        path = server.save(tmp_path / "saved") / CHUNKS
    *others, _ = read_records(path)
    write_records(path, others)
    good, bad = export_saved(tmp_path / "saved", "t", RolloutWriter(tmp_path / "out"))
    assert (good.num_steps, good.error) == (2, "")
    assert re.fullmatch(f"item {bad.name}: it needs chunk [0-9]+, which was not saved.", bad.error)
