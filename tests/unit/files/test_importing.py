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
    assert from_minari(minari.load_dataset("test/frames-v0"), RolloutWriter(tmp_path / "back")) == 1
    (path,) = list_trajectories(tmp_path / "back")
    stored = StoredTrajectory(path)
    found = stored.load()
    assert (stored.manifest.num_transitions, stored.manifest.terminated, stored.manifest.truncated) == (4, False, True)
    assert np.array_equal(found["observation"]["rgb"], observations["rgb"])
    assert np.array_equal(found["observation"]["speed"], observations["speed"])
    assert found["action"][:, 0].tolist() == [0, 1, 2, 3, 0]
    assert found["is_last"].tolist() == [False] * 4 + [True]
    batch = RolloutDataset(tmp_path / "back", 1).get_batch(4)
    assert batch.reward[:, 0].tolist() == [0, 1, 2, 3]
    assert batch.truncated[:, 0].tolist() == [False, False, False, True]


def test_episodes_that_end_in_each_way_are_steps_with_a_boundary_step(tmp_path: Path) -> None:
    def episode(number: int, num_steps: int, *, terminated: bool, truncated: bool) -> Any:
        class Episode(SimpleNamespace):
            """Columns as Minari has them: an observation more than actions."""

            def __len__(self) -> int:
                return num_steps

        ends = np.zeros((2, num_steps), bool)
        ends[:, -1] = terminated, truncated
        rows = np.arange(num_steps + 1.0)
        return Episode(id=number, observations=rows, actions={"a": rows[1:]}, rewards=rows[1:], terminations=ends[0],
                       truncations=ends[1])  # fmt: skip

    class Dataset(list[Any]):
        spec = SimpleNamespace(dataset_id="test/x-v0")

        def iterate_episodes(self) -> Any:
            return iter(self)

    ends = [(True, False), (False, True), (True, True), (False, False)]  # the last one is cut off
    dataset = Dataset(episode(n, n + 1, terminated=end[0], truncated=end[1]) for n, end in enumerate(ends))
    assert from_minari(dataset, RolloutWriter(tmp_path)) == 4
    stored = [StoredTrajectory(path) for path in list_trajectories(tmp_path)]
    assert [(one.manifest.terminated, one.manifest.truncated) for one in stored] == [*ends[:3], (False, True)]
    steps = stored[1].load()
    assert steps["observation"].tolist() == [0, 1, 2]
    assert steps["action"]["a"].tolist() == [1, 2, 0]
    assert (steps["is_first"].tolist(), steps["is_last"].tolist()) == ([True, False, False], [False, False, True])
    assert [one.load()["is_terminal"][-1] for one in stored] == [True, False, True, False]
    assert stored[3].manifest.metadata == {"minari": {"dataset_id": "test/x-v0", "episode": 3}}


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
