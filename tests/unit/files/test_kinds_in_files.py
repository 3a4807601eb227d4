"""Files store the kinds of rows: what is written, in each way, comes back as the transitions of a list by hand."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from rollout_steps import tf_agents_steps

import reverb_writer as rw
from reverb_writer.errors import FormatError, SpecError, StructureError
from reverb_writer.files import RolloutDataset, RolloutWriter, StoredTrajectory, list_trajectories
from reverb_writer.files.manifest import MAX_BYTES, End
from reverb_writer.protocol import signatures
from reverb_writer.protocol.signatures import ArraySpec

Found: TypeAlias = list[tuple[float, float, bool, bool]]
"""Observation, next observation, done, truncated."""


def found_in(data_dir: Path, **options: Any) -> Found:
    return [
        tuple(column.item() for column in (batch.observation, batch.next_observation, batch.done, batch.truncated))
        for batch in RolloutDataset(data_dir, 1, wait_timeout_s=0, **options)
    ]


def kinds_in(data_dir: Path) -> list[list[int]]:
    return [StoredTrajectory(path).load_rows()[1].tolist() for path in list_trajectories(data_dir)]


def step(t: float, **more: Any) -> dict[str, Any]:
    return {"observation": np.float32(t), "action": np.int64(t), "reward": np.float32(1), **more}


def columns(numbers: Sequence[float], **more: Any) -> dict[str, Any]:
    array = np.array(numbers, np.float32)
    return {"observation": array, "action": array, "reward": array * 0, **{k: np.array(v) for k, v in more.items()}}


# Two episodes of two actions: 0 1 and 10 11. The first terminates at 2, the second is truncated at 12.
EXPECTED: Found = [(0, 1, False, False), (1, 2, True, False), (10, 11, False, False), (11, 12, True, True)]


def by_arguments(writer: Any) -> None:
    for start, end in ((0, "terminated"), (10, "truncated")):
        for t in range(2):
            writer(step(start + t), final_observation=np.float32(start + 2), **{end: t == 1})


def by_rlds(writer: RolloutWriter) -> None:
    for start in (0, 10):
        for t in range(3):
            writer(step(start + t, is_first=t == 0, is_last=t == 2, is_terminal=t == 2 and start == 0))


def by_discount(writer: RolloutWriter) -> None:
    for start in (0, 10):
        for t in range(3):
            writer(step(start + t, is_last=t == 2, discount=np.float32(t != 1 or start == 10)))


def by_gymnasium_on_the_boundary_row(writer: RolloutWriter) -> None:
    for start in (0, 10):
        for t in range(3):
            writer(step(start + t, terminated=t == 2 and start == 0, truncated=t == 2 and start == 10))


def by_kinds(writer: RolloutWriter) -> None:
    writer.save(columns([0, 1, 2]), kinds=[3, 2, 12])
    for number, kind in ((10, 3), (11, 2), (12, 4)):
        writer.write_row({name: leaf[0] for name, leaf in columns([number]).items()}, kind)


def by_whole_trajectories(writer: RolloutWriter) -> None:
    writer.save(columns([0, 1, 2]), terminated=True, last_row="boundary")
    writer.save(columns([10, 11, 12]), terminated=False, truncated=True, last_row="boundary")


def by_one_array_of_episodes(writer: RolloutWriter) -> None:
    ends = {"is_first": [1, 0, 0, 1, 0, 0], "is_last": [0, 0, 1, 0, 0, 1], "is_terminal": [0, 0, 1, 0, 0, 0]}
    writer.save(columns([0, 1, 2, 10, 11, 12], **ends))


def by_windows_with_padding(writer: RolloutWriter) -> None:
    writer.save(columns([0, 1, 2, 0, 0]), kinds=[3, 2, 12, 16, 16])
    writer.save(columns([10, 11]), kinds=[3, 2])
    writer.save(columns([11, 12, 0]), kinds=[2, 4, 16])


@pytest.mark.parametrize(
    ("write", "last_row"),
    [
        (by_arguments, None),
        (by_rlds, None),
        (by_discount, None),
        (by_gymnasium_on_the_boundary_row, "boundary"),
        (by_kinds, None),
        (by_whole_trajectories, None),
        (by_one_array_of_episodes, None),
    ],
)
def test_each_way_to_write_gives_the_same_transitions(
    tmp_path: Path, write: Callable[..., None], last_row: Any
) -> None:
    with RolloutWriter(tmp_path, last_row=last_row) as writer:
        write(writer)
    assert found_in(tmp_path) == EXPECTED
    assert [stored.manifest.end for stored in map(StoredTrajectory, list_trajectories(tmp_path))][-1] is End.TRUNCATED


def test_cut_windows_are_truncated_and_padding_is_no_transition(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        by_windows_with_padding(writer)
    cut = (10, 11, True, True)
    assert found_in(tmp_path) == [*EXPECTED[:2], cut, EXPECTED[3]]


def test_trajectory_of_tf_agents_has_the_kinds_that_its_discount_shows(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for terminal in (True, False):
            for of_episode in tf_agents_steps(0, 2, terminal=terminal):
                writer(of_episode)
    assert kinds_in(tmp_path) == [[3, 2, 12], [3, 2, 4]]


@pytest.mark.parametrize("names", [("terminated", "truncated"), ("terminated",), ("truncated",)])
def test_flags_of_gymnasium_as_leaves_are_refused_at_the_first_step(tmp_path: Path, names: tuple[str, ...]) -> None:
    flags = dict.fromkeys(names, np.bool_(False))
    with RolloutWriter(tmp_path) as writer:
        with pytest.raises(StructureError, match="Pass `last_row='action'` if they stand beside the last action"):
            writer(step(0, **flags))
        with pytest.raises(StructureError, match="last_row"):
            writer.save({name: np.array([leaf]) for name, leaf in step(0, **flags).items()})
        writer(step(0))  # nothing has changed
    assert kinds_in(tmp_path) == [[3]]


def test_flags_beside_the_last_action_end_episodes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, last_row="action") as writer:
        for start in (0, 10):
            for t in range(3):
                writer(step(start + t, terminated=t == 2 and start == 0, truncated=t == 2 and start == 10))
    assert kinds_in(tmp_path) == [[3, 2, 14], [3, 2, 6]]
    # Nobody knows the observation after 12. The observation after 2 has no value.
    expected = [(0, 1, False, False), (1, 2, False, False), (2, 2, True, False)]
    assert found_in(tmp_path) == [*expected, (10, 11, False, False), (11, 12, True, True)]


def test_a_terminated_episode_repeats_its_last_observation_and_a_truncated_one_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutWriter(tmp_path) as writer:
        for start, end in ((0, "terminated"), (10, "truncated")):
            for t in range(2):
                writer(step(start + t), **{end: t == 1})
    assert kinds_in(tmp_path) == [[3, 2, 12], [3, 6]]
    dataset = RolloutDataset(tmp_path, 1)
    assert [batch.next_observation.item() for batch in dataset] == [1, 1, 11]
    assert dataset.num_left_out == 1
    assert "the last action of an episode is no transition" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({}, [3, 2]),
        ({"terminated": False, "truncated": False}, [3, 2]),
        ({"terminated": False}, [3, 2]),
        ({"terminated": True}, [3, 14]),
        ({"truncated": True}, [3, 6]),
        ({"terminated": True, "truncated": True}, [3, 14]),
        ({"terminated": True, "last_row": "boundary"}, [3, 12]),
        ({"truncated": True, "last_row": "boundary"}, [3, 4]),
        ({"kinds": np.array([2, 16], np.uint8)}, [2, 16]),
    ],
)
def test_kinds_of_a_whole_trajectory(tmp_path: Path, arguments: dict[str, Any], kinds: list[int]) -> None:
    RolloutWriter(tmp_path).save(columns([0, 1]), **arguments)
    assert kinds_in(tmp_path) == [kinds]


@pytest.mark.parametrize(
    ("arguments", "flags", "text"),
    [
        ({"kinds": [3]}, {}, r"`kinds` must be integers, shape \(2,\), got int64 \(1,\)"),
        ({"kinds": [3.0, 2.0]}, {}, "got float64"),
        ({"kinds": [3, 17]}, {}, "row 1 has kind 17, expected"),
        ({"kinds": [3, 8]}, {}, "row 1 has kind 8, expected .* TERMINAL 8, which needs LAST"),
        (
            {"terminated": True},
            {"is_last": [0, 1], "is_terminal": [0, 0]},
            "is terminated, .* shows that it is truncated",
        ),
        ({"truncated": False}, {"is_last": [0, 1], "is_terminal": [0, 1]}, "is cut, .* shows that it is terminated"),
    ],
)
def test_kinds_that_cannot_be_are_refused(
    tmp_path: Path, arguments: dict[str, Any], flags: dict[str, Any], text: str
) -> None:
    with pytest.raises(StructureError, match=text):
        RolloutWriter(tmp_path).save(columns([0, 1], **flags), **arguments)
    assert list_trajectories(tmp_path) == []


def test_an_end_without_an_outcome_gets_it_from_the_caller(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    arguments: Any
    for arguments in ({}, {"terminated": True}, {"truncated": True}):
        writer.save(columns([0, 1], is_last=[False, True]), **arguments)
    assert kinds_in(tmp_path) == [[3, 4], [3, 12], [3, 4]]


def test_discount_beside_the_last_action_shows_its_end(tmp_path: Path) -> None:
    RolloutWriter(tmp_path, last_row="action").save(columns([0, 1, 2], discount=[1.0, 1.0, 0.0]))
    RolloutWriter(tmp_path).save(columns([0, 1, 2], discount=[1.0, 0.0, 0.0]))  # 2 is the final observation
    assert kinds_in(tmp_path) == [[3, 2, 14], [3, 2, 12]]


def test_ends_that_contradict_the_step_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "discount") as writer:
        with pytest.raises(StructureError, match="`end_of_episode=True` beside `discount` 0"):
            writer(step(0, discount=np.float32(0)), end_of_episode=True)
        writer(step(0, discount=np.float32(0)), terminated=True, final_observation=np.float32(1))
    with RolloutWriter(tmp_path / "flags") as writer:
        with pytest.raises(StructureError, match="the steps mark their ends themselves, by `is_last`"):
            writer(step(0, is_last=False, is_terminal=False), terminated=True)
        writer(step(1, is_last=True, is_terminal=True))
    assert (kinds_in(tmp_path / "discount"), kinds_in(tmp_path / "flags")) == ([[3, 12]], [[13]])


def test_d4rl_ends_in_its_three_ways(tmp_path: Path) -> None:
    ends = {"terminals": [0, 1, 0, 0, 0, 0], "timeouts": [0, 0, 0, 1, 0, 0]}
    numbers = columns([0, 1, 10, 11, 20, 21], **ends)
    RolloutWriter(tmp_path).save({**numbers, "reward": np.ones(6)})
    # 1 is terminal. Nobody knows the observations after 11, which a limit ended, and after 21, the end of the data.
    assert found_in(tmp_path) == [(0, 1, False, False), (1, 1, True, False), (10, 11, True, True), (20, 21, True, True)]


def test_a_reward_of_each_agent_is_a_nest(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for t in range(2):
            reward = {"blue": np.float32(t), "red": np.full(1, -t, np.float32)}
            writer({"observation": np.float32(t), "action": {"blue": 1, "red": 2}, "reward": reward}, terminated=t == 1)
    batch = RolloutDataset(tmp_path, 1).get_batch(2)
    assert {name: leaf.tolist() for name, leaf in batch.reward.items()} == {"blue": [[0], [1]], "red": [[0], [-1]]}
    assert batch.is_terminal.tolist() == [[False], [True]]


def test_texts_are_a_list_or_an_array(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for texts in (["pick", "put"], np.array(["pick", "put"])):
        writer.save({**columns([0, 1]), "instruction": {"text": texts}}, truncated=True)
    stored = [StoredTrajectory(path).load()["instruction"]["text"].tolist() for path in list_trajectories(tmp_path)]
    assert stored == [[b"pick", b"put"]] * 2


# The file.


def test_kinds_clash_with_no_leaf_and_numpy_reads_them(tmp_path: Path) -> None:
    RolloutWriter(tmp_path).save({"kinds": np.array([7.5, 8.5]), "x": np.arange(2)}, terminated=True)
    (path,) = list_trajectories(tmp_path)
    steps, kinds = StoredTrajectory(path).load_rows()
    assert (steps["kinds"].tolist(), kinds.tolist()) == ([7.5, 8.5], [3, 14])
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["kinds"].tolist() == [3, 14]
        assert arrays["kinds.npy"].tolist() == [7.5, 8.5]


def test_a_manifest_that_inflates_is_refused_before_it_does(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "trajectory_0.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b" " * (8 * MAX_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(
            FormatError, match=r"trajectory `trajectory_0.npz`: its manifest has more than 16,777,216 bytes"
        ):
            StoredTrajectory(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BYTES
    finally:
        tracemalloc.stop()
    with pytest.raises(SpecError, match=r"structure and metadata of the trajectory have .* bytes, expected at most"):
        RolloutWriter(tmp_path / "data", metadata={"x": "x" * MAX_BYTES}).save(columns([0]))


def write_version_1(path: Path, steps: dict[str, Any], **manifest: Any) -> None:
    """Write a file as version 1 did, without kinds."""
    nest = {name: ArraySpec(leaf.shape[1:], leaf.dtype) for name, leaf in steps.items()}
    encoded = base64.b64encode(signatures.encode(nest).SerializeToString()).decode()
    of_file = {"format": "reverb-writer trajectory", "version": 1, "num_steps": len(steps["reward"]), "metadata": {}}
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps({**of_file, "structure": encoded, **manifest}))
        for name, leaf in steps.items():
            out = io.BytesIO()
            np.save(out, leaf)
            archive.writestr(f"{name}.npy", out.getvalue())


def former(
    end: str = "step", *, boundary: bool = False, terminated: Any = None, truncated: Any = None
) -> dict[str, Any]:
    return {"end": end, "boundary_step": boundary, "terminated": terminated, "truncated": truncated}


GYMNASIUM = {"terminated": [False, False, False], "truncated": [False, False, True]}


@pytest.mark.parametrize(
    ("flags", "manifest", "kinds"),
    [
        # The leaves show nothing: what version 1 recorded.
        ({}, former(terminated=True, truncated=False), [2, 2, 14]),
        ({}, former(terminated=False, truncated=True), [2, 2, 6]),
        ({}, former(boundary=True, terminated=True, truncated=False), [2, 2, 12]),
        ({}, former(), [2, 2, 2]),
        ({}, former("cut", terminated=False, truncated=True), [2, 2, 2]),
        ({}, former("reset", terminated=False, truncated=True), [2, 2, 2]),
        ({"discount": [1, 1, 0]}, former(terminated=True, truncated=False), [2, 2, 14]),
        # The leaves show it: a window that was cut is not terminal, whatever version 1 made of its flags.
        ({"is_last": [0, 0, 0], "is_terminal": [0, 0, 0]}, former(terminated=False, truncated=True), [2, 2, 2]),
        ({"is_last": [0, 0, 1], "is_terminal": [0, 0, 1]}, former(terminated=True, truncated=False), [2, 2, 12]),
        ({"is_last": [0, 1, 0], "is_first": [1, 0, 0], "is_terminal": [0, 1, 0]}, former(), [3, 12, 16]),
        ({"is_last": [0, 0, 1]}, former(boundary=True, terminated=True, truncated=False), [2, 2, 12]),
        (GYMNASIUM, former(boundary=True, terminated=False, truncated=True), [2, 2, 4]),
    ],
)
def test_files_of_version_1_are_read(
    tmp_path: Path, flags: dict[str, Any], manifest: dict[str, Any], kinds: list[int]
) -> None:
    path = tmp_path / "trajectory_0.npz"
    write_version_1(path, columns([0, 1, 2], **flags), **manifest)
    stored = StoredTrajectory(path)
    assert (stored.load_rows()[1].tolist(), stored.manifest.end) == (kinds, None)
    assert stored.load()["observation"].tolist() == [0, 1, 2]


def test_version_1_with_flags_of_gymnasium_needs_the_argument(tmp_path: Path) -> None:
    write_version_1(tmp_path / "trajectory_0.npz", columns([0, 1, 2], **GYMNASIUM), **former())
    with pytest.raises(StructureError, match=r"trajectory `trajectory_0.npz`: `terminated`, `truncated` without"):
        found_in(tmp_path)
    assert found_in(tmp_path, last_row="action") == [(0, 1, False, False), (1, 2, True, True)]
    with (
        rw.LocalServer([rw.TableConfig("t")]) as server,
        rw.TrajectoryObserver(server, "t", 3, last_row="action") as observer,
    ):
        with pytest.raises(StructureError, match="last_row"):
            rw.files.send_trajectory(StoredTrajectory(tmp_path / "trajectory_0.npz"), observer)
        rw.files.send_trajectory(StoredTrajectory(tmp_path / "trajectory_0.npz"), observer, "action")
        observer.flush()
        (sample,) = rw.Client(server).sample("t", 1)
    assert sample.kinds is not None
    assert sample.kinds.tolist() == [2, 2, 6]


# Between files and servers.


def exported(server: Any, table: str, folder: Path) -> list[list[int]]:
    with rw.Client(server) as client, RolloutWriter(folder) as writer:
        assert not [done.error for done in rw.files.export_items(client, table, writer) if done.error]
    return sorted(kinds_in(folder))


def test_items_keep_their_kinds_from_server_to_disk_to_server(tmp_path: Path) -> None:
    tables = [rw.TableConfig(name) for name in ("tile", "across", "again")]
    with rw.LocalServer(tables) as server:
        with (
            rw.TrajectoryObserver(server, "tile", 3, end_of_episode="tile") as tile,
            rw.SequenceObserver(server, "across", 4, 2) as across,
        ):
            for observer in (tile, across):
                by_arguments(observer)
        ends = [[3, 2, 12], [2, 12, 16], [12, 16, 16]], [[3, 2, 4], [2, 4, 16], [4, 16, 16]]
        assert exported(server, "tile", tmp_path / "tile") == sorted(ends[0] + ends[1])
        assert exported(server, "across", tmp_path / "across") == [[3, 2, 12, 3], [12, 3, 2, 4]]
        with rw.EpisodeObserver(server, "again", 9) as episodes:
            list(rw.files.import_trajectories(list_trajectories(tmp_path / "across"), episodes))
        assert exported(server, "again", tmp_path / "again") == [[3], [3, 2, 4], [3, 2, 12], [12]]
    windows = {*found_in(tmp_path / "tile")}
    assert windows == {*EXPECTED}
    # A transition of a window of four is cut where the window ends, and none goes from an episode to the next.
    assert sorted(found_in(tmp_path / "across")) == EXPECTED


@pytest.mark.parametrize(
    ("kinds", "items"),
    [
        ([3, 2, 12, 16], [[3, 2, 12]]),  # padding is not sent
        ([2, 4, 3, 2], [[2, 4], [3, 2]]),  # two episodes
        ([2, 2, 2, 2], [[2, 2, 2, 2]]),
        ([2, 2, 3, 14], [[2, 2], [3, 14]]),  # the first one is cut, because another one begins
    ],
)
def test_windows_that_span_episodes_are_imported_as_parts_of_episodes(
    tmp_path: Path, kinds: list[int], items: list[list[int]]
) -> None:
    RolloutWriter(tmp_path).save(columns([0, 1, 2, 3]), kinds=kinds)
    with rw.LocalServer([rw.TableConfig("t", sampler="fifo", max_times_sampled=1)]) as server:
        with rw.EpisodeObserver(server, "t", 9) as observer:
            (done,) = rw.files.import_trajectories(list_trajectories(tmp_path), observer)
        assert (done.num_steps, done.error) == (4, "")
        found = [sample.kinds for sample in rw.Client(server).sample("t", len(items))]
    assert [each.tolist() for each in found if each is not None] == items


def test_items_of_other_writers_are_exported_as_they_are(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as server, rw.Client(server) as client:
        flags = {name: np.array(flag) for name, flag in GYMNASIUM.items()}
        client.insert({**columns([0, 1, 2]), **flags}, {"t": 1.0})
        with RolloutWriter(tmp_path) as writer:
            (done,) = rw.files.export_items(client, "t", writer)
    assert done.error == ""
    with pytest.raises(StructureError, match="last_row"):
        found_in(tmp_path)
    assert found_in(tmp_path, last_row="boundary") == [(0, 1, False, False), (1, 2, True, True)]


def test_windows_from_disk_tell_the_learner_how_the_episode_ended(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        by_arguments(writer)
    with rw.LocalServer([rw.TableConfig("t", sampler="fifo", max_times_sampled=1)]) as server:
        with rw.TrajectoryObserver(server, "t", 3) as observer:
            list(rw.files.import_trajectories(list_trajectories(tmp_path), observer))
        with rw.ReplayDataset(server, "t", 2, single_pass=True) as dataset:
            batch = next(dataset)
    assert batch.is_terminal.tolist() == [[False, False, True], [False, False, False]]
    assert rw.to_transitions(batch).discount.tolist() == [[1, 0], [1, 1]]


def test_what_record_writes_is_observation_action_reward(tmp_path: Path) -> None:
    gym = pytest.importorskip("gymnasium")
    with RolloutWriter(tmp_path) as writer:
        env = rw.environments.record(gym.make("CartPole-v1", max_episode_steps=5), writer)
        env.reset(seed=0)
        for t in range(5):
            env.step(t % 2)
    (path,) = list_trajectories(tmp_path)
    steps, kinds = StoredTrajectory(path).load_rows()
    assert {*steps} == {"action", "observation", "reward"}
    assert kinds.tolist() == [3, 2, 2, 2, 2, 4]
