"""Data sets of Minari as trajectories on disk, and the journal of an import."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import SpecError
from reverb_writer.files import RolloutDataset, RolloutWriter, StoredTrajectory, from_minari, list_trajectories
from reverb_writer.files.importing import Journal, import_trajectories


@pytest.mark.filterwarnings("ignore")  # Minari's, of an author that is not named
def test_frames_and_nests_of_a_data_set_are_read_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    spaces = pytest.importorskip("gymnasium").spaces
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rng = np.random.default_rng(0)
    observations: Any = {"rgb": rng.integers(256, size=(5, 64, 64, 3), dtype=np.uint8), "speed": rng.random((5, 2))}
    episode = minari.data_collector.EpisodeBuffer(
        observations=observations,
        actions=np.arange(4.0)[:, None],
        rewards=np.arange(4.0),
        terminations=np.zeros(4, bool),
        truncations=np.arange(4) == 3,
    )
    limits = {"rgb": spaces.Box(0, 255, (64, 64, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float64)}
    minari.create_dataset_from_buffers(
        "test/frames-v0",
        [episode],
        observation_space=spaces.Dict(limits),
        action_space=spaces.Box(-9, 9, (1,), np.float64),
        jpeg_encoding=False,
    )
    assert from_minari(minari.load_dataset("test/frames-v0"), RolloutWriter(tmp_path / "back")) == [("0", 5, "")]
    (path,) = list_trajectories(tmp_path / "back")
    stored = StoredTrajectory(path)
    found = stored.load()
    assert stored.load_rows()[1].tolist() == [3, 2, 2, 2, 4]
    assert np.array_equal(found["observation"]["rgb"], observations["rgb"])
    assert np.array_equal(found["observation"]["speed"], observations["speed"])
    assert found["action"][:, 0].tolist() == [0, 1, 2, 3, 0]
    batch = RolloutDataset(tmp_path / "back", 1).get_batch(4)
    assert batch.reward[:, 0].tolist() == [0, 1, 2, 3]
    assert batch.truncated[:, 0].tolist() == [False, False, False, True]


class Episode(SimpleNamespace):
    """Columns as Minari has them: an observation more than actions."""

    def __len__(self) -> int:
        return len(self.rewards)


def episode(number: int, num_steps: int, *, terminated: bool = False, truncated: bool = False) -> Any:
    ends = np.zeros((2, num_steps), bool)
    ends[:, -1:] = [[terminated], [truncated]]
    numbers = np.arange(num_steps + 1)
    observations = {"n": numbers.astype(np.float64), "mission": [f"go {n}" for n in numbers]}
    return Episode(id=number, observations=observations, actions=numbers[1:], rewards=numbers[1:].astype(float),
                   terminations=ends[0], truncations=ends[1])  # fmt: skip


class Dataset:
    """A data set in memory, with the part of Minari's interface that is used."""

    def __init__(self, *episodes: Any) -> None:
        spaces = pytest.importorskip("gymnasium").spaces
        self.spec = SimpleNamespace(dataset_id="test/x-v0")
        self.episode_indices = np.arange(len(episodes))
        parts = {"n": spaces.Box(-np.inf, np.inf, (), np.float32), "mission": spaces.Text(9)}
        self.observation_space, self.action_space = spaces.Dict(parts), spaces.Discrete(9)
        self._episodes = episodes
        self.num_read = 0

    def iterate_episodes(self, indices: Any) -> Any:
        for index in indices:
            self.num_read += 1
            yield self._episodes[index]


def test_episodes_that_end_in_each_way_are_rows_with_a_boundary_row(tmp_path: Path) -> None:
    ends = [(True, False), (False, True), (True, True), (False, False)]  # the last one is cut off
    dataset = Dataset(*(episode(n, n + 1, terminated=end[0], truncated=end[1]) for n, end in enumerate(ends)))
    assert from_minari(dataset, RolloutWriter(tmp_path)) == [(str(n), n + 2, "") for n in range(4)]
    stored = [StoredTrajectory(path) for path in list_trajectories(tmp_path)]
    assert [one.load_rows()[1].tolist() for one in stored] == [[3, 12], [3, 2, 4], [3, 2, 2, 12], [3, 2, 2, 2, 4]]
    steps = stored[1].load()
    assert {*steps} == {"observation", "action", "reward"}
    assert steps["observation"]["n"].tolist() == [0, 1, 2]
    assert steps["observation"]["mission"].tolist() == [b"go 0", b"go 1", b"go 2"]
    assert (steps["action"].tolist(), steps["reward"].tolist()) == ([1, 2, 0], [1, 2, 0])
    assert (steps["observation"]["n"].dtype, steps["reward"].dtype) == (np.float32, np.float32)
    assert stored[3].manifest.metadata == {"minari": {"dataset_id": "test/x-v0", "episode": 3}}


def test_bad_and_empty_episodes_are_named_and_a_second_run_reads_only_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = episode(1, 2, terminated=True)
    bad.observations["n"] = np.zeros((3, 7))
    dataset = Dataset(episode(0, 2, terminated=True), bad, episode(2, 0), None, episode(4, 1, truncated=True))
    outcomes = from_minari(dataset, RolloutWriter(tmp_path))
    assert [(one.name, one.num_steps) for one in outcomes] == [("0", 3), ("1", 0), ("2", 0), ("3", 0), ("4", 2)]
    messages = [one.error for one in outcomes if one.error]
    assert [text.partition(":")[0] for text in messages] == ["episode 1", "episode 2", "episode 3"]
    assert "observation/n" in messages[0]
    assert "no step" in messages[1]
    assert [record.getMessage() for record in caplog.records] == [f"Skipped: {text}" for text in messages]
    dataset.num_read = 0
    assert [one.name for one in from_minari(dataset, RolloutWriter(tmp_path))] == ["1", "2", "3"]
    assert (dataset.num_read, len(list_trajectories(tmp_path))) == (3, 2)


def test_rows_of_minari_mix_with_recorded_rows(tmp_path: Path) -> None:
    gym = pytest.importorskip("gymnasium")

    class Env(gym.Env):  # type: ignore[misc, name-defined]  # not installed where mypy runs
        observation_space, action_space = Dataset().observation_space, Dataset().action_space

        def reset(self, **_: Any) -> Any:
            return {"n": np.float32(7), "mission": "go"}, {}

        def step(self, _: Any) -> Any:
            return {"n": np.float32(8), "mission": "on"}, 1.0, True, False, {}

    with RolloutWriter(tmp_path) as writer:
        from_minari(Dataset(*(episode(n, 1, terminated=True) for n in range(4))), writer)
    with rw.LocalServer([rw.TableConfig("offline"), rw.TableConfig("online")]) as server:
        with rw.TrajectoryObserver(server, "offline", 2) as observer:
            list(import_trajectories(list_trajectories(tmp_path), observer))
        with rw.TrajectoryObserver(server, "online", 2) as observer:
            env = rw.environments.record(Env(), observer)
            for _ in range(4):
                env.reset()
                env.step(3)
        members = [rw.ReplayDataset(server, table, 2) for table in ("offline", "online")]
        with rw.MixedDataset(members) as mixed:
            batch = next(mixed)
    assert batch.data["action"].tolist() == [[1, 0], [1, 0], [3, 0], [3, 0]]
    assert batch.kinds.tolist() == [[3, 12]] * 4


# The journal of an import: what was confirmed is known again, wherever a write was cut short.


PURPOSE = {"tables": ["replay"], "length": 3}
FIRST_LINE = json.dumps(PURPOSE)
NAMES = ["t1", "t2"]
WHOLE = f'{FIRST_LINE}\n"t1"\n"t2"\n'


def complete_names(text: str) -> set[str]:
    return {name for name in NAMES if f'"{name}"' in text}


@pytest.mark.parametrize("size", [0, *range(len(FIRST_LINE), len(WHOLE) + 1)])
def test_names_that_are_added_after_a_torn_write_are_known_by_the_next_import(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal"
    path.write_text(WHOLE[:size])
    journal = Journal(path, PURPOSE, tmp_path)
    assert journal.done == complete_names(WHOLE[:size])
    journal.add(["t2"])
    journal.add(["t3", "t4"])
    assert Journal(path, PURPOSE, tmp_path).done == complete_names(WHOLE[:size]) | {"t2", "t3", "t4"}


@pytest.mark.parametrize("content", [FIRST_LINE[:9].encode(), FIRST_LINE[:-1].encode(), b"notes\n", b"\xff\xfe\n"])
def test_file_that_does_not_begin_as_a_journal_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"first line cannot be read.* remove the file.* name another file"):
        Journal(path, PURPOSE, tmp_path)
    assert path.read_bytes() == content


def test_no_window_joins_two_trajectories_that_were_cut_off(tmp_path: Path) -> None:
    for _ in range(2):
        with RolloutWriter(tmp_path) as writer:
            writer({"x": np.float32(1)})
    with rw.LocalServer([rw.TableConfig("replay")]) as server, rw.TrajectoryObserver(server, "replay", 2) as observer:
        assert len(list(import_trajectories(list_trajectories(tmp_path), observer))) == 2
        assert (observer.stats().steps, observer.stats().items) == (2, 0)
