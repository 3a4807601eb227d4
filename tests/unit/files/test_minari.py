"""Data sets that Minari reads and writes are ours, too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollout_steps import tf_agents_steps, write_transitions

import reverb_writer as rw
from reverb_writer.files import (
    RolloutDataset,
    RolloutWriter,
    StoredTrajectory,
    from_minari,
    list_trajectories,
    to_minari,
)
from reverb_writer.files.minari import _space_of_columns

IS_HERE = all(importlib.util.find_spec(package) for package in ("minari", "h5py"))
needs_minari = pytest.mark.skipif(not IS_HERE, reason="Minari is not installed")


@needs_minari
def test_minari_reads_our_trajectories_without_loss(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "ours") as writer:
        for step in [*tf_agents_steps(0, 3), *tf_agents_steps(1, 2, terminal=False)]:
            writer(step)
    to_minari(list_trajectories(tmp_path / "ours"), tmp_path / "theirs", "test/ours-v0")
    import minari

    dataset = minari.MinariDataset(str(tmp_path / "theirs" / "data"))
    assert (dataset.total_episodes, dataset.total_steps, dataset.spec.dataset_id) == (2, 5, "test/ours-v0")
    first, second = dataset.iterate_episodes()
    assert first.observations.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert first.observations.dtype == np.float32
    assert first.actions.tolist() == [0, 1, 2]
    assert first.rewards.tolist() == [1, 2, 3]
    assert first.terminations.tolist() == [False, False, True]
    assert second.terminations.tolist() == [False, False]
    assert second.truncations.tolist() == [False, True]


@needs_minari
def test_a_relative_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with RolloutWriter("ours") as writer:
        for step in tf_agents_steps(0, 3):
            writer(step)
    assert to_minari(list_trajectories("ours"), "theirs", "test/ours-v0").total_steps == 3
    with RolloutWriter("back") as writer:
        assert from_minari("theirs", writer) == 1


@needs_minari
def test_frames_and_nests_go_there_and_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    steps: dict[str, Any] = {
        "observation": {"rgb": rng.integers(256, size=(4, 64, 64, 3), dtype=np.uint8), "speed": rng.random((4, 2))},
        "action": np.arange(4.0)[:, None],
        "reward": np.arange(4, dtype=np.float32),
    }
    RolloutWriter(tmp_path / "ours").save(steps, truncated=True, terminated=False)
    to_minari(list_trajectories(tmp_path / "ours"), tmp_path / "theirs", "test/frames-v0")
    assert from_minari(tmp_path / "theirs", RolloutWriter(tmp_path / "back")) == 1
    (path,) = list_trajectories(tmp_path / "back")
    stored = StoredTrajectory(path)
    found = stored.load()
    assert (stored.manifest.num_transitions, stored.manifest.terminated, stored.manifest.truncated) == (4, False, True)
    assert np.array_equal(found["observation"]["rgb"][:4], steps["observation"]["rgb"])  # not JPEG
    assert np.array_equal(found["observation"]["rgb"][4], steps["observation"]["rgb"][3])  # no final one was stored
    assert found["action"][:, 0].tolist() == [0, 1, 2, 3, 0]
    assert found["is_last"].tolist() == [False] * 4 + [True]
    batch = RolloutDataset(tmp_path / "back", 1).get_batch(4)
    assert batch.reward[:, 0].tolist() == [0, 1, 2, 3]
    assert batch.truncated[:, 0].tolist() == [False, False, False, True]


@needs_minari
def test_what_cannot_be_a_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rw.errors.SpecError, match="`paths` has no trajectories"):
        to_minari([], tmp_path, "test/x-v0")
    write_transitions(tmp_path / "ours", [2])
    paths = list_trajectories(tmp_path / "ours")
    to_minari(paths, tmp_path / "theirs", "test/x-v0")
    with pytest.raises(rw.errors.SpecError, match="has a data set already"):
        to_minari(paths, tmp_path / "theirs", "test/x-v0")


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


def test_columns_have_a_space_unless_they_are_no_numbers() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    columns = {"f": np.zeros((2, 3), np.float32), "pair": (np.zeros((2, 1), np.uint8), np.zeros(2, np.int64))}
    limits = np.iinfo(np.int64)
    assert _space_of_columns(columns) == spaces.Dict(
        f=spaces.Box(-np.inf, np.inf, (3,), np.float32),
        pair=spaces.Tuple([spaces.Box(0, 255, (1,), np.uint8), spaces.Box(limits.min, limits.max, (), np.int64)]),
    )
    with pytest.raises(rw.errors.StructureError, match="no default space exists for bool"):
        _space_of_columns(np.zeros(2, bool))
