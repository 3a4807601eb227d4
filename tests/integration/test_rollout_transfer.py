"""Between disk and server: what an actor sent can be sent again, and what a server has can be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree
from episodes import SMALL_EPISODES, SMALL_GRID, expected, feed, observed
from reading import Place, fifo, read
from rollout_steps import tf_agents_steps
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer import tf_agents
from reverb_writer.files.importing import Journal
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.rollouts import (
    RolloutTee,
    RolloutWriter,
    StoredTrajectory,
    export_items,
    import_trajectories,
    list_trajectories,
    send_trajectory,
)

StartServer = Callable[..., HostedServer]


def resend(data_dir: Path, observer: Any) -> None:
    with observer:
        for path in list_trajectories(data_dir):
            send_trajectory(StoredTrajectory(path), observer)


def test_windows_from_disk_are_those_of_live_writing(place: Place, tmp_path: Path) -> None:
    for number, spec in enumerate(SMALL_GRID):
        folder = tmp_path / str(number)
        with RolloutTee(observed(place, spec, "a"), RolloutWriter(folder, part_length=4)) as tee:
            feed(tee, SMALL_EPISODES)
        resend(folder, observed(place, spec, "b"))
        assert place.column("a") == place.column("b") == expected(spec, SMALL_EPISODES)


@pytest.mark.parametrize("mode", ["drop", "pad", "tile", "cover", "truncate", "align_end"])
@pytest.mark.parametrize("discard", [False, True])
def test_episodes_that_were_reset_or_closed_come_again_as_they_were(
    place: Place, tmp_path: Path, mode: str, discard: bool
) -> None:
    def observer(table: str) -> rw.TrajectoryObserver:
        return rw.TrajectoryObserver(place.client, table, 3, 2, end_of_episode=mode)

    with RolloutTee(observer("a"), RolloutWriter(tmp_path)) as tee:
        for n in range(1, 7):
            tee({"n": np.int64(n)}, end_of_episode=False)
        tee.reset(discard=discard)
        for n in range(11, 15):
            tee({"n": np.int64(n)}, end_of_episode=False)
    resend(tmp_path, observer("b"))
    live = place.column("a")
    assert live == place.column("b")
    assert live[0] == [1, 2, 3]


def test_trajectories_of_tf_agents_come_again_leaf_by_leaf(place: Place, tmp_path: Path) -> None:
    def observer(table: str) -> rw.TrajectoryObserver:
        return rw.TrajectoryObserver(place.client, table, 4, 1, end_of_episode="pad", mask=True)

    with RolloutTee(observer("a"), RolloutWriter(tmp_path)) as tee:
        for step in [*tf_agents_steps(0, 2), *tf_agents_steps(1, 6, terminal=False)]:
            tee(step)
    resend(tmp_path, observer("b"))
    live, again = read(place.client, "a"), read(place.client, "b")
    assert len(live) == len(again) == 5  # 0BPP... and four of seven rows
    for one, other in zip(live, again, strict=True):
        for ours, theirs in zip(one.data, other.data, strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist()


def test_environments_of_a_vector_observer_come_again(place: Place, tmp_path: Path) -> None:
    observer = rw.TrajectoryObserver(place.client, "a", 2, num_envs=2)
    with RolloutTee(observer, RolloutWriter(tmp_path, num_envs=2)) as tee:
        for t in range(4):
            tee({"n": np.array([t, 10 + t])}, end_of_episode=[t == 2, False])
        tee.reset(env_ids=[1])
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 2))
    assert sorted(place.column("a")) == sorted(place.column("b"))
    assert len(list_trajectories(tmp_path)) == 3


def test_environments_without_a_step_in_a_call_have_none_on_disk(place: Place, tmp_path: Path) -> None:
    observer = rw.TrajectoryObserver(place.client, "a", 2, num_envs=2)
    with RolloutTee(observer, RolloutWriter(tmp_path, num_envs=2, part_length=2)) as tee:
        tee({"n": np.array([1, 11])}, end_of_episode=[False, False])
        tee({"n": np.array([2, 0])}, env_mask=[True, False], end_of_episode=[False, True])
        tee({"n": np.array([0, 12])}, env_mask=[False, True], truncated=[False, True])
        tee({"n": np.array([3, 21])}, end_of_episode=[True, True])
        with pytest.raises(rw.StructureError, match="`env_mask` has shape"):
            tee({"n": np.array([4, 22])}, end_of_episode=[True, True], env_mask=[True])
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 2))
    assert sorted(place.column("a")) == sorted(place.column("b")) == [[1, 2], [2, 3], [11, 12]]
    stored = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(tmp_path)]
    assert sorted(stored) == [[1, 2, 3], [11, 12], [21]]


def test_episodes_of_a_recorded_vector_environment_come_again(place: Place, tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium", minversion="1.1")
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=same_step)
    observer = rw.TrajectoryObserver(place.client, "a", 3, num_envs=2)
    with RolloutTee(observer, RolloutWriter(tmp_path, num_envs=2)) as tee:
        recorded = rw.environments.record(envs, tee)
        recorded.reset(seed=1)
        recorded.action_space.seed(1)
        for _ in range(60):
            recorded.step(recorded.action_space.sample())
        recorded.close()
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 3))
    live, again = read(place.client, "a"), read(place.client, "b")
    assert len(live) > 60
    windows = [sorted(str([leaf.tolist() for leaf in item.data]) for item in items) for items in (live, again)]
    assert windows[0] == windows[1]


def test_episodes_come_again_as_single_items(place: Place, tmp_path: Path) -> None:
    with RolloutTee(rw.EpisodeObserver(place.client, "a", 10), RolloutWriter(tmp_path)) as tee:
        feed(tee, (3, 1, 4))
    resend(tmp_path, rw.EpisodeObserver(place.client, "b", 10))
    assert place.column("a") == place.column("b") == [[1, 2, 3], [4], [5, 6, 7, 8]]


def test_step_that_one_side_refuses_is_taken_by_neither(place: Place, tmp_path: Path) -> None:
    tee = RolloutTee(rw.TrajectoryObserver(place.client, "a", 2), RolloutWriter(tmp_path))
    with tee:
        tee({"n": np.int64(1)}, end_of_episode=False)
        with pytest.raises(rw.StructureError, match="leaf `n`"):
            tee({"n": np.float32(2)}, end_of_episode=False)
        tee.observer.close()
        with pytest.raises(rw.ClosedError):
            tee({"n": np.int64(2)}, end_of_episode=False)
        tee.open()
        assert tee.stats().steps == 1  # what the observer has besides
    (path,) = list_trajectories(tmp_path)
    assert StoredTrajectory(path).load()["n"].tolist() == [1]


def ended(data_dir: Path) -> list[tuple[Any, ...]]:
    """Return how many steps each trajectory has, whether the last is a boundary step, and how it ended."""
    ends = [StoredTrajectory(path).manifest for path in list_trajectories(data_dir)]
    return [(end.num_steps, end.boundary_step, end.terminated, end.truncated, end.end.value) for end in ends]


def numbered_episode(first: int, num_steps: int, **options: Any) -> rw.Episode:
    """Return an episode whose observations, boundary step included, are numbered from `first` on."""
    numbers = np.arange(first, first + num_steps + 1)
    options = {"rewards": np.zeros(num_steps), "len_lookback_buffer": 0, **options}
    return rw.Episode(observations=numbers, actions=numbers[1:], **options)


def observations(data_dir: Path) -> list[list[int]]:
    return [StoredTrajectory(path).load()["observation"].tolist() for path in list_trajectories(data_dir)]


def test_steps_that_are_written_at_once_are_on_disk_too(place: Place, tmp_path: Path) -> None:
    with RolloutTee(rw.TrajectoryObserver(place.client, "a", 3), RolloutWriter(tmp_path, part_length=4)) as tee:
        tee.extend({"n": np.arange(1, 6)})
        tee({"n": np.int64(6)}, end_of_episode=True)
        with pytest.raises(rw.StructureError, match="leaf `n`"):
            tee.extend({"n": np.zeros(3, np.float32)})
        with pytest.raises(rw.StructureError, match="one T for all"):
            tee.extend({"n": np.arange(3), "m": np.arange(2)})
        tee.extend({"n": np.arange(7, 11)})
        tee.extend({"n": np.arange(0)})
        assert tee.stats().steps == 10
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 3))
    assert place.column("a") == place.column("b") == [[n, n + 1, n + 2] for n in (1, 2, 3, 4, 7, 8)]
    assert ended(tmp_path) == [(6, False, None, None, "step"), (4, False, False, True, "cut")]


def test_episodes_that_are_written_at_once_are_on_disk_too(place: Place, tmp_path: Path) -> None:
    with RolloutTee(rw.TrajectoryObserver(place.client, "a", 3), RolloutWriter(tmp_path, part_length=4)) as tee:
        tee.write_episode(numbered_episode(1, 4, terminated=True))
        tee.write_episode(numbered_episode(11, 1, truncated=True))
        tee.write_episode(numbered_episode(21, 3))  # a chunk that was cut
    resend(tmp_path, rw.TrajectoryObserver(place.client, "b", 3))
    live, again = read(place.client, "a"), read(place.client, "b")
    assert len(live) == len(again) == 5
    for one, other in zip(live, again, strict=True):
        assert [leaf.tolist() for leaf in one.data] == [leaf.tolist() for leaf in other.data]
    assert observations(tmp_path) == [[1, 2, 3, 4, 5], [11, 12], [21, 22, 23, 24]]
    assert ended(tmp_path) == [
        (5, True, True, False, "step"),
        (2, True, False, True, "step"),
        (4, True, False, True, "step"),
    ]
    dataset = rw.rollouts.RolloutDataset(tmp_path, num_envs=1, dataset_loops=1, random_shuffle_traj_order=False)
    assert [batch.observation.item() for batch in dataset] == [1, 2, 3, 4, 11, 21, 22, 23]


def test_episode_that_is_refused_is_written_by_neither(place: Place, tmp_path: Path) -> None:
    with RolloutTee(rw.EpisodeObserver(place.client, "a", 5), RolloutWriter(tmp_path)) as tee:
        tee.write_episode(numbered_episode(1, 2, terminated=True))
        with pytest.raises(rw.SpecError, match="the episode has 6 steps, boundary"):
            tee.write_episode(numbered_episode(1, 5))
        with pytest.raises(rw.IncompleteError, match="an episode without a step"):
            tee.write_episode(rw.Episode())
        with pytest.raises(rw.StructureError, match="observation"):
            tee.write_episode(rw.Episode(observations=[0.5, 1], actions=[1], rewards=[1.0], len_lookback_buffer=0))
        (first, *_) = [tree.map_structure(lambda leaf, t=t: leaf[t], numbered_episode(11, 2).steps()) for t in range(2)]
        tee(first)
        with pytest.raises(rw.SpecError, match=r"in the middle of an episode, at step 1. Call `reset` first"):
            tee.write_episode(numbered_episode(1, 2))
        tee.reset()
        assert tee.stats().steps == 4
    assert place.column("a", 4) == observations(tmp_path) == [[1, 2, 3], [11]]


def test_episode_that_the_server_stops_is_cut_on_disk_after_the_steps_that_the_observer_took(
    replay_server: StartServer, tmp_path: Path
) -> None:
    server = replay_server(rw.TableConfig("q", 3, "fifo", "fifo", max_times_sampled=1, rate_limiter=rw.Queue(3)))
    with rw.Client(server.address, timeout_s=60) as client:
        observer = rw.TrajectoryObserver(client, "q", 2, max_in_flight_items=4, timeout_s=3.0)
        tee = RolloutTee(observer, RolloutWriter(tmp_path))
        with pytest.raises(rw.ReplayTimeoutError):
            tee.write_episode(numbered_episode(1, 4000, terminated=True))
        taken = tee.stats().steps
        assert 1 < taken < 4000
        with pytest.raises(rw.ReplayTimeoutError):
            tee.close(0.5)
    assert observations(tmp_path) == [[*range(1, taken + 1)]]
    assert ended(tmp_path) == [(taken, False, False, True, "cut")]


def test_episode_that_the_disk_refuses_is_lost_there_alone(place: Place, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with RolloutTee(rw.EpisodeObserver(place.client, "a", 10), RolloutWriter(data_dir, part_length=2)) as tee:
        data_dir.rmdir()
        data_dir.touch()
        with pytest.raises(OSError, match="data"):
            tee.write_episode(numbered_episode(1, 4, terminated=True))
        data_dir.unlink()
        data_dir.mkdir()
        tee.write_episode(numbered_episode(11, 2, terminated=True))
    assert place.column("a", 4) == [[1, 2, 3, 4, 5], [11, 12, 13]]
    assert observations(data_dir) == [[11, 12, 13]]


def test_calls_for_another_number_of_environments_change_nothing(place: Place, tmp_path: Path) -> None:
    observer = rw.TrajectoryObserver(place.client, "a", 2, num_envs=2)
    with RolloutTee(observer, RolloutWriter(tmp_path, num_envs=2)) as tee:
        with pytest.raises(rw.SpecError, match="`extend` is for one environment"):
            tee.extend({"n": np.zeros((3, 2))})
        with pytest.raises(rw.SpecError, match="`write_episode` is for one environment"):
            tee.write_episode(numbered_episode(1, 2))
        assert tee.stats().steps == 0
    with RolloutTee(rw.TrajectoryObserver(place.client, "a", 2), RolloutWriter(tmp_path)) as tee:
        with pytest.raises(rw.SpecError, match="`env_mask` is for steps of several environments"):
            tee({"n": 1}, env_mask=[True])
        assert tee.stats().steps == 0
    assert list_trajectories(tmp_path) == []


def test_reset_with_another_argument_changes_neither(place: Place, tmp_path: Path) -> None:
    observer = tf_agents.ReverbAddTrajectoryObserver(place.client, "a", 2, 1)
    steps = tf_agents_steps(0, 2)
    with RolloutTee(observer, RolloutWriter(tmp_path)) as tee:
        for step in steps[:2]:
            tee(step)
        with pytest.raises(TypeError, match="write_cached_steps"):
            tee.reset(write_cached_steps=False)  # type: ignore[call-arg]
        tee(steps[2])
    assert len(read(place.client, "a")) == 2
    assert ended(tmp_path) == [(3, True, True, False, "step")]


def test_episode_that_is_too_long_for_the_observer_is_whole_on_disk(place: Place, tmp_path: Path) -> None:
    with RolloutTee(rw.EpisodeObserver(place.client, "a", 3), RolloutWriter(tmp_path)) as tee:
        for n in (1, 2, 3):
            tee({"n": np.int64(n)}, end_of_episode=False)
        with pytest.raises(rw.SpecError, match="longer than max_sequence_length=3"):
            tee({"n": np.int64(4)}, end_of_episode=False)
        tee({"n": np.int64(5)}, end_of_episode=True)
        tee.extend({"n": np.array([6, 7])})
        tee({"n": np.int64(8)}, end_of_episode=True)
    assert place.column("a") == [[6, 7, 8]]
    stored = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(tmp_path)]
    assert stored == [[1, 2, 3, 4, 5], [6, 7, 8]]


def test_first_step_that_the_observer_refuses_does_not_tell_the_writer_what_steps_are(
    replay_server: StartServer, tmp_path: Path
) -> None:
    server = replay_server(fifo("a", signature={"n": ArraySpec((None,), np.dtype(np.int64))}))
    with RolloutTee(rw.EpisodeObserver(server.address, "a", 3), RolloutWriter(tmp_path)) as tee:
        with pytest.raises(rw.StructureError, match="leaf `n`"):
            tee({"n": np.float32(1)}, end_of_episode=False)
        tee({"n": np.int64(1)}, end_of_episode=True)
    (path,) = list_trajectories(tmp_path)
    assert StoredTrajectory(path).load()["n"].tolist() == [1]


def test_observer_and_writer_of_different_environments_are_refused(place: Place, tmp_path: Path) -> None:
    with (
        rw.TrajectoryObserver(place.client, "a", 2) as single,
        pytest.raises(rw.SpecError, match="`num_envs` None, but the writer has 2"),
    ):
        RolloutTee(single, RolloutWriter(tmp_path, num_envs=2))
    with (
        rw.TrajectoryObserver(place.client, "a", 2, num_envs=2) as observer,
        pytest.raises(rw.SpecError, match="`num_envs` 2, but the writer has None"),
    ):
        RolloutTee(observer, RolloutWriter(tmp_path))


def test_import_goes_on_where_it_was_stopped(place: Place, tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "data") as writer:
        feed(writer, (3, 3, 3, 3))
    paths = list_trajectories(tmp_path / "data")
    (paths[1] / "manifest.json").write_text("{")
    for delivered in ([0], [0, 2], [0, 2, 3]):  # the second is damaged
        journal = Journal(tmp_path / "journal", {"table": "a"}, tmp_path / "data")
        with rw.TrajectoryObserver(place.client, "a", 3) as observer:
            for done in import_trajectories(paths, observer, journal=journal):
                if not done.error:
                    break  # closes the iterator: what was sent is confirmed
        assert Journal(tmp_path / "journal", {"table": "a"}, tmp_path / "data").done == {
            paths[index].name for index in delivered
        }
    assert place.column("a") == [[1, 2, 3], [7, 8, 9], [10, 11, 12]]
    with pytest.raises(rw.SpecError, match="belongs to another import"):
        Journal(tmp_path / "journal", {"table": "b"}, tmp_path / "data")


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_export_writes_each_item_once_and_the_table_keeps_it(
    replay_server: StartServer, tmp_path: Path, sampler: str
) -> None:
    chosen: Any = rw.Prioritized(1.0) if sampler == "prioritized" else sampler
    server = replay_server(rw.TableConfig("t", 1000, chosen, "fifo"))
    with rw.Client(server.address) as client:
        with rw.TrajectoryObserver(client, "t", 3) as observer:
            feed(observer, (12,))
        done = list(export_items(client, "t", RolloutWriter(tmp_path)))
        assert client.server_info()["t"].current_size == 10
    assert [each.num_steps for each in done] == [3] * 10
    found = [tree.flatten(StoredTrajectory(path).load())[0].tolist() for path in list_trajectories(tmp_path)]
    assert sorted(found) == [[n, n + 1, n + 2] for n in range(1, 11)]


@pytest.mark.parametrize(("sampler", "times"), [("fifo", 1), ("fifo", 0), ("lifo", 0), ("uniform", 1), ("uniform", 3)])
def test_export_of_a_table_that_would_lose_items_is_refused_and_takes_none(
    replay_server: StartServer, tmp_path: Path, sampler: Any, times: int
) -> None:
    server = replay_server(rw.TableConfig("t", 1000, sampler, "fifo", max_times_sampled=times))
    with rw.Client(server.address) as client:
        with rw.TrajectoryObserver(client, "t", 1) as observer:
            feed(observer, (600,))
        client.insert({"a": np.arange(3), "b": np.arange(2)}, {"t": 1.0})  # an export could not write it
        with pytest.raises(rw.SpecError, match="can only be read by removing its items"):
            next(export_items(client, "t", RolloutWriter(tmp_path)))
        assert client.server_info()["t"].current_size == 601
    assert list_trajectories(tmp_path) == []


def test_exported_items_go_back_with_their_priorities_and_are_not_written_twice(
    replay_server: StartServer, tmp_path: Path
) -> None:
    server = replay_server(rw.TableConfig("t", 100), fifo("back"))
    with rw.Client(server.address) as client:
        for n in range(1, 6):
            client.insert({"n": np.arange(n)}, {"t": float(n)})
        assert len(list(export_items(client, "t", RolloutWriter(tmp_path)))) == 5
        assert list(export_items(client, "t", RolloutWriter(tmp_path))) == []  # as after an interruption
        with rw.EpisodeObserver(client, "back", 100) as observer:
            for path in list_trajectories(tmp_path):
                stored = StoredTrajectory(path)
                observer.update_priority(stored.manifest.metadata["priority"])
                send_trajectory(stored, observer)
        items = read(client, "back")
    assert sorted((item.info.priority, item.data[0].tolist()) for item in items) == [
        (float(n), list(range(n))) for n in range(1, 6)
    ]


def test_item_of_columns_of_different_lengths_is_left_out_by_key(replay_server: StartServer, tmp_path: Path) -> None:
    server = replay_server(rw.TableConfig("t"))
    with rw.Client(server.address) as client:
        client.insert({"a": np.arange(3), "b": np.arange(2)}, {"t": 1.0})
        client.insert({"a": np.arange(3), "b": np.arange(3)}, {"t": 1.0})
        odd, good = sorted(export_items(client, "t", RolloutWriter(tmp_path)), key=lambda done: not done.error)
        assert client.server_info()["t"].current_size == 2
    assert str(odd.key) in odd.error
    assert good.num_steps == 3


def test_outcome_of_an_episode_ends_it_on_both_sides(place: Place, tmp_path: Path) -> None:
    observer = rw.TrajectoryObserver(place.client, "a", 2, num_envs=2)
    with RolloutTee(observer, RolloutWriter(tmp_path, num_envs=2)) as tee:
        for t in range(3):
            tee({"n": np.array([t, 10 + t])}, terminated=[t == 1, False], truncated=[False, t == 2])
    assert sorted(place.column("a")) == [[0, 1], [10, 11], [11, 12]]
    ends = [StoredTrajectory(path).manifest for path in list_trajectories(tmp_path)]
    assert [(end.num_steps, end.terminated, end.end.value) for end in ends] == [
        (2, True, "step"),
        (3, False, "step"),
        (1, False, "cut"),
    ]


def test_trajectory_of_other_steps_stops_an_import_by_name(place: Place, tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "data") as writer:
        feed(writer, (3,))
    with RolloutWriter(tmp_path / "data") as writer:
        writer({"m": np.int64(1)}, end_of_episode=True)
    first, second = list_trajectories(tmp_path / "data")
    journal = Journal(tmp_path / "journal", {}, tmp_path / "data")
    with (
        rw.TrajectoryObserver(place.client, "a", 3) as observer,
        pytest.raises(rw.StructureError, match=f"trajectory `{second.name}`: step 3"),
    ):
        list(import_trajectories([first, second], observer, journal=journal))
    assert journal.done == {first.name}
    assert place.column("a") == [[1, 2, 3]]
