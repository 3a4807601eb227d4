"""Trajectories on disk: what is written comes back, is seen whole or not at all, and is NumPy's own format."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import interrupted
from rollout_steps import tf_agents_steps, transition, write_transitions

import reverb_writer as rw
from reverb_writer.files.manifest import End
from reverb_writer.rollouts import RolloutWriter, StoredTrajectory, list_trajectories


def only(data_dir: Path) -> StoredTrajectory:
    (path,) = list_trajectories(data_dir)
    return StoredTrajectory(path)


def test_steps_come_back_as_the_nest_that_they_were(tmp_path: Path) -> None:
    steps = tf_agents_steps(3, 5)
    with RolloutWriter(tmp_path) as writer:
        for step in steps:
            writer(step)
    loaded = only(tmp_path).load()
    assert type(loaded) is rw.Trajectory
    assert loaded.policy_info == ()
    assert loaded.step_type.tolist() == [0, 1, 1, 1, 1, 2]
    assert loaded.observation.tolist() == [[3, t] for t in range(6)]
    assert loaded.reward.dtype == np.float32
    assert [step.action for step in only(tmp_path).steps()] == [0, 1, 2, 3, 4, 5]


def test_every_dtype_and_strings_come_back(tmp_path: Path) -> None:
    step = {
        "names": np.array([b"a\0", b""], object),
        "text": "\N{SNOWMAN}",
        "flag": True,
        **{dtype: np.array([[1, 0]], dtype) for dtype in ("int8", "uint64", "float16", "float64", "complex64")},
    }
    with RolloutWriter(tmp_path) as writer:
        for _ in range(3):
            writer(step)
    loaded = only(tmp_path).load()
    assert loaded["names"].tolist() == [[b"a\0", b""]] * 3
    assert loaded["text"].tolist() == ["\N{SNOWMAN}".encode()] * 3
    assert loaded["flag"].tolist() == [True] * 3
    for dtype in ("int8", "uint64", "float16", "float64", "complex64"):
        assert loaded[dtype].dtype == dtype
        assert loaded[dtype].tolist() == [[[1, 0]]] * 3


def test_bfloat16_comes_back(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with RolloutWriter(tmp_path) as writer:
        writer({"x": np.array([1.5, -2], ml_dtypes.bfloat16)})
    loaded = only(tmp_path).load()["x"]
    assert loaded.dtype == ml_dtypes.bfloat16
    assert loaded.astype(np.float32).tolist() == [[1.5, -2]]


def test_numpy_reads_the_files_and_unzip_finds_them_sound(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, part_length=3) as writer:
        for t in range(5):
            writer({"camera": {"rgb": np.full((8, 8), t, np.uint8)}, "reward": np.float32(t)})
    first, second = sorted(only(tmp_path).path.glob("*.npz"))
    assert [first.name, second.name] == ["steps_000000_000003.npz", "steps_000003_000005.npz"]
    with np.load(first, allow_pickle=False) as arrays:
        assert arrays["reward"].tolist() == [0, 1, 2]
        assert arrays["camera/rgb"][:, 0, 0].tolist() == [0, 1, 2]
    with zipfile.ZipFile(second) as archive:
        assert archive.testzip() is None
        kinds = {member.filename: member.compress_type for member in archive.infolist()}
    assert kinds == {"camera/rgb.npy": zipfile.ZIP_DEFLATED, "reward.npy": zipfile.ZIP_STORED}
    manifest = json.loads((only(tmp_path).path / "manifest.json").read_text())
    assert manifest["num_steps"] == 5


def test_normalized_images_come_back_within_one_part_in_255(tmp_path: Path) -> None:
    values = np.array([[-0.2, 0, 0.5, 0.999, 1.0, 1.7]], np.float32)
    with RolloutWriter(tmp_path, encodings={"depth": "normalized_image"}) as writer:
        writer({"depth": values, "other": values})
    with np.load(next(only(tmp_path).path.glob("*.npz"))) as arrays:
        assert arrays["depth"].tolist() == [[[0, 0, 127, 254, 255, 255]]]
    loaded = only(tmp_path).load()
    np.testing.assert_allclose(loaded["depth"], [[[0, 0, 0.49804, 0.99608, 1, 1]]], atol=5e-6)
    assert loaded["depth"].dtype == np.float32
    assert loaded["other"].tolist() == values[None].tolist()


@pytest.mark.parametrize(
    ("encodings", "text"),
    [
        ({"depht": "deflate"}, "`encodings` names depht; the leaves are depth, name"),
        ({"depth": "jpeg"}, r"`encodings\['depth'\]` must be one of"),
        ({"count": "normalized_image"}, "int64 cannot be a normalized image"),
        ({"name": "raw"}, "'raw' cannot hold object"),
    ],
)
def test_encoding_that_cannot_be_is_refused(tmp_path: Path, encodings: dict[str, str], text: str) -> None:
    writer = RolloutWriter(tmp_path, encodings=encodings)
    step: dict[str, Any] = {"depth": np.zeros((2, 2), np.float32), "name": b"x", "count": np.int64(1)}
    if "depht" in encodings:
        del step["count"]
    with pytest.raises(rw.SpecError, match=text):
        writer(step)


def test_end_flags_are_read_from_the_steps(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for terminal in (True, False):
            for step in tf_agents_steps(0, 2, terminal=terminal):
                writer(step)
    first, second = (StoredTrajectory(path).manifest for path in list_trajectories(tmp_path))
    assert (first.terminated, first.truncated, first.end, first.boundary_step) == (True, False, End.STEP, True)
    assert (second.terminated, second.truncated) == (False, True)
    assert (first.num_steps, first.num_transitions) == (3, 2)


def test_end_flags_of_rlds_steps_are_read_though_each_step_is_a_file(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, part_length=1) as writer:
        for t in range(3):
            writer({"observation": np.float32(t), "is_last": t == 2, "is_terminal": t == 2})
    manifest = only(tmp_path).manifest
    assert (manifest.terminated, manifest.truncated, manifest.boundary_step) == (True, False, True)


def test_episode_that_close_cuts_off_is_marked(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, metadata={"env": "ant"}) as writer:
        writer({"x": 1.0})
    manifest = only(tmp_path).manifest
    assert (manifest.end, manifest.terminated, manifest.truncated) == (End.CUT, False, True)
    assert manifest.metadata == {"env": "ant"}
    with pytest.raises(rw.ClosedError, match="Call `open"):
        writer({"x": 1.0})
    writer.open()
    writer({"x": 2.0}, end_of_episode=True)
    assert writer.num_trajectories == 2


def test_final_observation_is_stored_as_a_boundary_step(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer(transition(0, 0))
        writer(transition(0, 1), truncated=True, final_observation=np.array([7, 7], np.float32))
    loaded = only(tmp_path).load()
    assert loaded["observation"].tolist() == [[0, 0], [0, 1], [7, 7]]
    assert loaded["reward"].tolist() == pytest.approx([0, 0.1, 0])
    assert only(tmp_path).manifest.boundary_step
    assert only(tmp_path).manifest.truncated


def test_environments_are_episodes_of_their_own(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, num_envs=2, part_length=2) as writer:
        for t in range(3):
            writer({"x": np.array([t, 10 + t])}, terminated=[t == 1, False], truncated=[False, t == 2])
    stored = [StoredTrajectory(path) for path in list_trajectories(tmp_path)]
    assert [each.load()["x"].tolist() for each in stored] == [[0, 1], [10, 11, 12], [2]]
    assert [(each.manifest.terminated, each.manifest.truncated) for each in stored] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    with pytest.raises(rw.ClosedError):
        writer({"x": np.array([0, 0])})


def test_step_unlike_the_first_is_refused_by_leaf_and_nothing_changes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer({"x": np.float32(1)})
        with pytest.raises(rw.StructureError, match="step 1, leaf `x`: float64"):
            writer({"x": np.float64(2)})
        writer({"x": np.float32(3)}, end_of_episode=True)
    assert only(tmp_path).load()["x"].tolist() == [1, 3]


def test_whole_trajectories_can_be_saved_at_once(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, part_length=2)
    steps = {"x": np.arange(5), "y": np.zeros((5, 2), np.float32)}
    path = writer.save(steps, terminated=True, metadata={"return": 3.5})
    stored = StoredTrajectory(path)
    assert stored.load()["x"].tolist() == [0, 1, 2, 3, 4]
    assert len(stored.manifest.parts) == 3
    assert stored.manifest.metadata == {"return": 3.5}
    with pytest.raises(rw.StructureError, match="one T for all"):
        writer.save({"x": np.arange(5), "y": np.zeros((4, 2), np.float32)})
    with pytest.raises(rw.StructureError, match="this writer's are"):
        writer.save({"x": np.arange(5), "y": np.zeros((5, 3), np.float32)})


def test_nothing_is_seen_of_a_trajectory_before_it_is_complete(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, part_length=1)
    for t in range(4):
        writer({"x": t})
        assert list_trajectories(tmp_path) == []
    writer({"x": 4}, end_of_episode=True)
    assert only(tmp_path).manifest.num_steps == 5


def test_what_a_killed_writer_leaves_is_never_seen(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        from reverb_writer.rollouts import RolloutWriter
        writer = RolloutWriter(sys.argv[1], part_length=2)
        for t in range(5):
            writer({"x": t})
        os._exit(9)"""
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=60).returncode == 9
    assert [path.name.startswith(".partial_trajectory_") for path in tmp_path.iterdir()] == [True]
    assert list_trajectories(tmp_path) == []


def test_writers_in_several_processes_share_a_directory(tmp_path: Path) -> None:
    script = """if True:
        import sys
        from reverb_writer.rollouts import RolloutWriter
        with RolloutWriter(sys.argv[1]) as writer:
            for episode in range(20):
                for t in range(5):
                    writer({"who": int(sys.argv[2]), "t": t}, end_of_episode=t == 4)"""
    started = [subprocess.Popen([sys.executable, "-c", script, tmp_path, str(who)]) for who in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    loaded = [StoredTrajectory(path).load() for path in list_trajectories(tmp_path)]
    assert sorted(int(steps["who"][0]) for steps in loaded) == [0] * 20 + [1] * 20 + [2] * 20
    assert all(steps["t"].tolist() == [0, 1, 2, 3, 4] for steps in loaded)


def test_order_survives_copying_and_folders_within_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_transitions(tmp_path / "from" / name, [1])
    names = [path.name for path in list_trajectories(tmp_path / "from")]
    for name in reversed(names):
        (found,) = (tmp_path / "from").rglob(name)
        shutil.copytree(found, tmp_path / "to" / name)
    assert [path.name for path in list_trajectories(tmp_path / "to")] == names


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest", "torn manifest", "no manifest", "version"])
def test_damaged_trajectory_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write_transitions(tmp_path, [4], part_length=2)
    path = list_trajectories(tmp_path)[0]
    part, manifest = path / "steps_000002_000004.npz", path / "manifest.json"
    data, text = bytearray(part.read_bytes()), manifest.read_text()
    if damage == "flip":
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
    elif damage == "cut":
        part.write_bytes(data[:-1])
    elif damage == "missing":
        part.unlink()
    elif damage == "manifest":
        manifest.write_text(text.replace('"terminated": true', '"terminated": false'))
    elif damage == "torn manifest":
        manifest.write_text(text[: len(text) // 2])
    elif damage == "version":
        manifest.write_text(text.replace('"version": 1', '"version": 2'))
    else:
        manifest.unlink()
    with pytest.raises(rw.FormatError, match=f"trajectory `{path.name}`"):
        StoredTrajectory(path).load()


def test_full_disk_gives_up_the_episode_and_goes_on_with_the_next(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "data", part_length=2)
    writer({"x": 0})
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(OSError, match="data"):
        writer({"x": 1})
    writer({"x": 2}, end_of_episode=True)  # of the episode that is lost
    (tmp_path / "data").unlink()
    (tmp_path / "data").mkdir()
    writer({"x": 3}, end_of_episode=True)
    assert only(tmp_path / "data").load()["x"].tolist() == [3]


def test_disk_that_is_full_at_the_last_step_of_an_episode_costs_the_next_nothing(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    writer = RolloutWriter(data_dir, part_length=1)
    data_dir.rmdir()
    data_dir.touch()
    with pytest.raises(OSError, match="data"):
        writer({"x": 1}, end_of_episode=True)
    data_dir.unlink()
    data_dir.mkdir()
    writer({"x": 2}, end_of_episode=True)
    assert only(data_dir).load()["x"].tolist() == [2]


def test_full_disk_takes_no_step_from_environments_whose_steps_are_in_memory(tmp_path: Path) -> None:
    data_dir, moved = tmp_path / "data", tmp_path / "moved"

    def block(other: Path) -> None:
        data_dir.rename(other)
        data_dir.touch()

    def make_way() -> None:
        data_dir.unlink()
        data_dir.mkdir()

    with RolloutWriter(data_dir, num_envs=2, part_length=2) as writer:
        writer({"x": np.array([1, 10])}, end_of_episode=[False, True])
        block(tmp_path / "first")
        with pytest.raises(OSError, match="data"):  # two steps of the first environment are a part
            writer({"x": np.array([2, 11])}, end_of_episode=[False, False])
        make_way()
        writer({"x": np.array([3, 12])}, end_of_episode=[True, True])
        block(moved)
        with pytest.raises(OSError, match="data"):
            writer({"x": np.array([4, 13])}, end_of_episode=[True, True])
        make_way()
        writer({"x": np.array([5, 14])}, end_of_episode=[False, False])
        block(tmp_path / "third")
        with pytest.raises(OSError, match="data"):
            writer.end_episode()
        make_way()
        writer({"x": np.array([6, 15])}, end_of_episode=[False, False])
    assert sorted(StoredTrajectory(path).load()["x"].tolist() for path in list_trajectories(moved)) == [[11, 12]]
    assert sorted(StoredTrajectory(path).load()["x"].tolist() for path in list_trajectories(data_dir)) == [[6], [15]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer is printed
def test_interrupt_while_a_part_is_written_leaves_no_hole(tmp_path: Path) -> None:
    def write_one() -> None:
        with contextlib.suppress(ValueError):  # zipfile's, if an interrupt comes while a member of an archive is open
            writer({"n": np.int64(7)}, end_of_episode=False)

    moment, was_interrupted = 1, True
    while was_interrupted:
        folder = tmp_path / str(moment)
        with RolloutWriter(folder, part_length=4) as writer:
            for t in range(10):
                if t == 7:
                    was_interrupted = not interrupted(write_one, moment)
                else:
                    writer({"n": np.int64(t)}, end_of_episode=t == 9)
            for t in range(5):
                writer({"n": np.int64(t)}, end_of_episode=t == 4)
        *first, second = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(folder)]
        without_the_call = [t for t in range(10) if t != 7]
        assert first in ([], [without_the_call], [list(range(10))]), moment
        assert second == list(range(5))
        moment += 1 + moment // 40
    gc.collect()  # here, where the warning is expected
    assert first == [list(range(10))]
    assert moment > 20


def test_leaves_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(rw.StructureError, match="leaves need different names"):
        RolloutWriter(tmp_path)({"a/b": 1, "a": {"b": 2}})


def test_leaf_that_a_zip_file_would_cut_short_is_refused(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer, pytest.raises(rw.StructureError, match=r"leaf 'a\\x00b': .* has a NUL"):
        writer({"a\0b": 1.0}, end_of_episode=True)
    assert list_trajectories(tmp_path) == []


def test_rollouts_load_neither_grpc_nor_torch() -> None:
    script = (
        "import sys, reverb_writer as rw\n"
        "rw.rollouts.RolloutWriter, rw.rollouts.RolloutDataset\n"
        "sys.exit(bool({'grpc', 'torch', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_loading_twice_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_transitions(tmp_path, [2])
    with caplog.at_level(logging.DEBUG):
        only(tmp_path).load()
    assert not caplog.records
