"""Trajectories on disk: what is written comes back, is seen whole or not at all, and is NumPy's own format."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import EachMoment
from rollout_steps import tf_agents_steps, transition, write_transitions

import reverb_writer as rw
from reverb_writer.files import RolloutWriter, StoredTrajectory, list_trajectories, rollout_writer
from reverb_writer.files.manifest import End


def only(data_dir: Path) -> StoredTrajectory:
    (path,) = list_trajectories(data_dir)
    return StoredTrajectory(path)


def test_trajectory_comes_back_as_one(tmp_path: Path) -> None:
    steps = tf_agents_steps(3, 5)
    with RolloutWriter(tmp_path) as writer:
        for step in steps:
            writer(step)
    loaded = only(tmp_path).load()
    assert type(loaded) is rw.Trajectory
    assert loaded.policy_info == ()
    assert loaded.observation.tolist() == [[3, t] for t in range(6)]


def test_strings_come_back_as_bytes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for _ in range(3):
            writer({"names": np.array([b"a\0", b""], object), "text": "\N{SNOWMAN}"})
    loaded = only(tmp_path).load()
    assert loaded["names"].tolist() == [[b"a\0", b""]] * 3
    assert loaded["text"].tolist() == ["\N{SNOWMAN}".encode()] * 3


def test_bfloat16_comes_back(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with RolloutWriter(tmp_path) as writer:
        writer({"x": np.array([1.5, -2], ml_dtypes.bfloat16)})
    loaded = only(tmp_path).load()["x"]
    assert loaded.dtype == ml_dtypes.bfloat16
    assert loaded.astype(np.float32).tolist() == [[1.5, -2]]


def test_numpy_reads_the_file_and_unzip_finds_it_sound(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for t in range(3):
            writer({"camera": {"rgb": np.full((8, 8), t, np.uint8)}, "reward": np.float32(t)})
    path = only(tmp_path).path
    with np.load(path, allow_pickle=False) as arrays:
        assert arrays["reward"].tolist() == [0, 1, 2]
        assert arrays["camera/rgb"][:, 0, 0].tolist() == [0, 1, 2]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        kinds = {member.filename: member.compress_type for member in archive.infolist()}
        manifest = json.loads(archive.read("manifest.json"))
    stored, deflated = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
    assert kinds == {"manifest.json": stored, "kinds": stored, "camera/rgb.npy": deflated, "reward.npy": stored}
    assert manifest["num_steps"] == 3


def test_end_flags_are_read_from_the_steps(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "types") as writer:
        for terminal in (True, False):
            for step in tf_agents_steps(0, 2, terminal=terminal):
                writer(step)
    first, second = (StoredTrajectory(path) for path in list_trajectories(tmp_path / "types"))
    assert (first.manifest.end, first.load_rows()[1].tolist()) == (End.TERMINATED, [3, 2, 12])
    assert (second.manifest.end, second.load_rows()[1].tolist()) == (End.TRUNCATED, [3, 2, 4])
    assert first.manifest.num_steps == 3
    with RolloutWriter(tmp_path / "rlds") as writer:
        for t in range(3):
            writer({"observation": np.float32(t), "is_last": t == 2, "is_terminal": t == 2})
    assert only(tmp_path / "rlds").load_rows()[1].tolist() == [3, 2, 12]


def test_episode_that_close_cuts_off_is_marked(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, metadata={"env": "ant"}) as writer:
        writer({"x": 1.0})
    manifest = only(tmp_path).manifest
    assert (manifest.end, manifest.is_reset, manifest.metadata) == (End.CUT, False, {"env": "ant"})
    with pytest.raises(rw.errors.ClosedError, match="Make another one"):
        writer({"x": 1.0})


def test_final_observation_is_stored_as_a_boundary_step(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer(transition(0, 0))
        writer(transition(0, 1), truncated=True, final_observation=np.array([7, 7], np.float32))
    loaded = only(tmp_path).load()
    assert loaded["observation"].tolist() == [[0, 0], [0, 1], [7, 7]]
    assert loaded["reward"].tolist() == pytest.approx([0, 0.1, 0])
    assert only(tmp_path).load_rows()[1].tolist() == [3, 2, 4]
    assert only(tmp_path).manifest.end is End.TRUNCATED


def test_environments_are_episodes_of_their_own(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, num_envs=2) as writer:
        for t in range(3):
            step = {"observation": np.array([t, 10 + t])}
            writer(step, terminated=[t == 1, False], truncated=[False, t == 2])
    stored = [StoredTrajectory(path) for path in list_trajectories(tmp_path)]
    assert [each.load()["observation"].tolist() for each in stored] == [[0, 1, 1], [10, 11, 12], [2]]
    assert [each.load_rows()[1].tolist() for each in stored] == [[3, 2, 12], [3, 2, 6], [3]]
    assert [each.manifest.end.value for each in stored if each.manifest.end] == ["terminated", "truncated", "cut"]
    with pytest.raises(rw.errors.ClosedError):
        writer({"observation": np.array([0, 0])})


def test_final_observations_are_of_the_environments_that_end(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, num_envs=3) as writer:
        writer({"observation": np.array([0, 10, 20])}, env_mask=[True, True, False])
        step = {"observation": np.array([1, 11, 21])}
        final = np.array([2, 12, 22])
        writer(step, terminated=[True, False, False], truncated=[False, False, True], final_observation=final)
    found = [StoredTrajectory(path).load_rows() for path in list_trajectories(tmp_path)]
    assert [steps["observation"].tolist() for steps, _ in found] == [[0, 1, 2], [21, 22], [10, 11]]
    assert [kinds.tolist() for _, kinds in found] == [[3, 2, 12], [3, 4], [3, 2]]


def test_step_unlike_the_first_is_refused_by_leaf_and_nothing_changes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer({"x": np.float32(1)})
        with pytest.raises(rw.errors.StructureError, match="step 1, leaf `x`: float64"):
            writer({"x": np.float64(2)})
        writer({"x": np.float32(3)}, end_of_episode=True)
    assert only(tmp_path).load()["x"].tolist() == [1, 3]


def test_whole_trajectories_can_be_saved_at_once(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    steps = {"x": np.arange(5), "y": np.zeros((5, 2), np.float32)}
    path = writer.save(steps, terminated=True, metadata={"return": 3.5})
    stored = StoredTrajectory(path)
    assert stored.load()["x"].tolist() == [0, 1, 2, 3, 4]
    assert stored.manifest.metadata == {"return": 3.5}
    with pytest.raises(rw.errors.StructureError, match="one T for all"):
        writer.save({"x": np.arange(5), "y": np.zeros((4, 2), np.float32)})
    with pytest.raises(rw.errors.StructureError, match="this writer's are"):
        writer.save({"x": np.arange(5), "y": np.zeros((5, 3), np.float32)})


def test_writer_goes_on_after_its_directory_was_removed(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "demos")
    writer(transition(0, 0), terminated=True)
    shutil.rmtree(tmp_path / "demos")
    writer(transition(1, 0), terminated=True)
    assert only(tmp_path / "demos").manifest.num_steps == 2


def test_nothing_is_seen_of_a_trajectory_before_it_is_complete(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    for t in range(4):
        writer({"x": t})
        assert list_trajectories(tmp_path) == []
    writer({"x": 4}, end_of_episode=True)
    assert only(tmp_path).manifest.num_steps == 5
    assert [path.name for path in tmp_path.iterdir()] == [only(tmp_path).path.name]


def test_episode_of_any_length_comes_back(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path, num_envs=2) as writer:
        for t in range(300):
            writer({"x": np.array([t, 1000 + t])}, end_of_episode=[t == 299, t % 100 == 0])
    found = sorted(StoredTrajectory(path).load()["x"].tolist() for path in list_trajectories(tmp_path))
    assert found == [[*range(300)], [1000], [*range(1001, 1101)], [*range(1101, 1201)], [*range(1201, 1300)]]


def test_files_are_in_order_although_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", iter(range(10**18, 0, -(10**15))).__next__)
    with RolloutWriter(tmp_path) as writer:
        written = [writer.save({"n": np.arange(2)}, terminated=True, truncated=False) for _ in range(3)]
    assert list_trajectories(tmp_path) == written


def test_what_a_killed_writer_leaves_is_never_seen(tmp_path: Path) -> None:
    script = """if True:
        import os, sys
        from pathlib import Path
        from reverb_writer.files import RolloutWriter
        writer = RolloutWriter(sys.argv[1])
        Path.rename = lambda *_: os._exit(9)  # killed when all is written, and not visible yet
        writer({"x": 1}, end_of_episode=True)"""
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False, timeout=60).returncode == 9
    (partial,) = tmp_path.iterdir()
    assert partial.name.startswith(".partial_trajectory_")
    assert list_trajectories(tmp_path) == []
    RolloutWriter(tmp_path)
    assert partial.exists()  # it may be another writer's, which is at it
    an_hour_ago = partial.stat().st_mtime - 3601
    os.utime(partial, (an_hour_ago, an_hour_ago))
    RolloutWriter(tmp_path)
    assert not partial.exists()


def test_writers_in_several_processes_share_a_directory(tmp_path: Path) -> None:
    script = """if True:
        import sys
        from reverb_writer.files import RolloutWriter
        with RolloutWriter(sys.argv[1]) as writer:
            for episode in range(20):
                for t in range(5):
                    writer({"who": int(sys.argv[2]), "t": t}, end_of_episode=t == 4)"""
    started = [subprocess.Popen([sys.executable, "-c", script, tmp_path, str(who)]) for who in range(3)]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    loaded = [StoredTrajectory(path).load() for path in list_trajectories(tmp_path)]
    assert sorted(int(steps["who"][0]) for steps in loaded) == [0] * 20 + [1] * 20 + [2] * 20
    assert all(steps["t"].tolist() == [0, 1, 2, 3, 4] for steps in loaded)


def test_strings_of_negative_length_are_refused(tmp_path: Path) -> None:
    path = RolloutWriter(tmp_path).save({"name": np.array([b"ab", b"c"], object)})
    lengths = np.array([2, 1]).tobytes()
    negative = np.array([4, -1]).tobytes()
    path.write_bytes(with_member(path, "name.lengths.npy", lambda data: data.replace(lengths, negative)))
    with pytest.raises(rw.errors.FormatError, match="leaf `name`: a string cannot have a negative length"):
        StoredTrajectory(path).load()


def test_order_survives_copying_and_folders_within_folders(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_transitions(tmp_path / "from" / name, [1])
    names = [path.name for path in list_trajectories(tmp_path / "from")]
    for name in reversed(names):
        (found,) = (tmp_path / "from").rglob(name)
        (tmp_path / "to").mkdir(exist_ok=True)
        shutil.copy(found, tmp_path / "to" / name)
    assert [path.name for path in list_trajectories(tmp_path / "to")] == names


def with_member(path: Path, name: str, change: Any, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file of which a member was changed by somebody who knows how to write a zip file."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w", method) as changed:
        for member in archive.namelist():
            data = archive.read(member)
            changed.writestr(member, change(data) if member == name else data)
    return out.getvalue()


def replaced(path: Path, old: str, new: str) -> bytes:
    """Return a file in whose manifest a pattern was replaced."""
    return with_member(path, "manifest.json", lambda data: re.sub(old, new, data.decode(), flags=re.DOTALL))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.read_bytes().replace(b"NUMPY", b"NUMPX"), "torn or damaged"),
        (lambda path: path.read_bytes()[: path.stat().st_size // 2], "torn or damaged"),
        (lambda _: b"", "torn or damaged"),
        (lambda path: replaced(path, '"num_steps".*', ""), "its manifest cannot be read"),
        (lambda path: replaced(path, '"version": 2', '"version": 3'), "version 3; expected"),
        (lambda path: replaced(path, '"num_steps": 5', '"num_steps": 6'), "as the manifest says"),
        (lambda path: replaced(path, '"num_steps": 5', '"num_steps": 0'), "at least one"),
        (lambda path: replaced(path, '"structure": ".*?"', '"structure": ""'), "`structure`"),
        (lambda path: with_member(path, "reward.npy", lambda data: data.replace(b"<f4", b"<i4")), "is not float32"),
        (
            lambda path: with_member(path, "reward.npy", lambda data: data + bytes(1 << 20), zipfile.ZIP_DEFLATED),
            "`reward.npy` has .* bytes, not",  # of a member that was not decompressed
        ),
        (lambda path: with_member(path, "", None, zipfile.ZIP_LZMA), "compressed by method 14"),
    ],
)
def test_damaged_trajectory_is_refused_by_name(tmp_path: Path, damage: Any, text: str) -> None:
    write_transitions(tmp_path, [4])
    path = list_trajectories(tmp_path)[0]
    path.write_bytes(damage(path))
    with pytest.raises(rw.errors.FormatError, match=f"trajectory `{path.name}`: .*{text}"):
        StoredTrajectory(path).load()


def test_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(rw.errors.FormatError, match=r"trajectory `trajectory_1\.npz`: .*No such file"):
        StoredTrajectory(tmp_path / "trajectory_1.npz")


def test_disk_that_is_full_while_a_file_is_written_keeps_nothing_of_it(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    writer({"x": 0}, end_of_episode=True)
    taken = tmp_path / only(tmp_path).path.name.replace("_00000000", "_00000001")
    original = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device", str(path))

    Path.rename = refuse  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(OSError, match="No space left"):
            writer({"x": 1}, end_of_episode=True)
    finally:
        Path.rename = original  # type: ignore[method-assign]
    assert not taken.exists()
    assert [path.name for path in tmp_path.iterdir()] == [only(tmp_path).path.name]


def test_full_disk_takes_no_step_from_environments_whose_episodes_go_on(tmp_path: Path) -> None:
    data_dir, moved = tmp_path / "data", tmp_path / "moved"

    def block(other: Path) -> None:
        data_dir.rename(other)
        data_dir.touch()

    def make_way() -> None:
        data_dir.unlink()
        data_dir.mkdir()

    with RolloutWriter(data_dir, num_envs=2) as writer:
        writer({"x": np.array([1, 10])}, end_of_episode=[False, True])
        block(moved)
        with pytest.raises(OSError, match="data"):
            writer({"x": np.array([2, 11])}, end_of_episode=[True, False])
        make_way()
        writer({"x": np.array([3, 12])}, end_of_episode=[True, True])
        block(tmp_path / "second")
        with pytest.raises(OSError, match="data"):
            writer({"x": np.array([4, 13])}, end_of_episode=[True, True])
        make_way()
        writer({"x": np.array([5, 14])}, end_of_episode=[False, False])
        block(tmp_path / "third")
        with pytest.raises(OSError, match="data"):
            writer.end_episode()
        make_way()
        writer({"x": np.array([6, 15])}, end_of_episode=[False, False])
    for folder, expected in ((moved, [[10]]), (tmp_path / "second", [[3], [11, 12]]), (data_dir, [[6], [15]])):
        assert sorted(StoredTrajectory(path).load()["x"].tolist() for path in list_trajectories(folder)) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a finalizer is printed
@pytest.mark.parametrize("at", [7, 8, 9])
def test_interrupt_of_a_step_leaves_no_hole(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_writer, "_FIRST_LENGTH", 8)  # so that the blocks are doubled for step 8

    def write_one() -> None:
        with contextlib.suppress(ValueError):  # zipfile's, if an interrupt comes while a member of an archive is open
            writer({"n": np.int64(at)}, end_of_episode=at == 9)

    interrupt = EachMoment(growth=40)
    for moment in interrupt:
        folder = tmp_path / str(moment)
        with RolloutWriter(folder) as writer:
            for t in range(10):
                if t == at:
                    interrupt(write_one)
                else:
                    writer({"n": np.int64(t)}, end_of_episode=t == 9)
            writer.end_episode()  # the last step may not have been taken
            for t in range(5):
                writer({"n": np.int64(t)}, end_of_episode=t == 4)
        *first, second = [StoredTrajectory(path).load()["n"].tolist() for path in list_trajectories(folder)]
        without_the_call = [t for t in range(10) if t != at]
        assert first in ([], [without_the_call], [list(range(10))]), moment
        assert second == list(range(5))
        assert not [*folder.glob(".partial_*")]
    gc.collect()  # here, where the warning is expected
    assert first == [list(range(10))]
    assert moment > 20


@pytest.mark.parametrize("step", [{"a/b": 1, "a": {"b": 2}}, {"a": "text", "a.lengths": 2}], ids=str)
def test_leaves_of_one_name_are_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(rw.errors.StructureError, match="leaves need different names"):
        RolloutWriter(tmp_path)(step)


def test_leaf_that_a_zip_file_would_cut_short_is_refused(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    with writer, pytest.raises(rw.errors.StructureError, match=r"leaf 'a\\x00b': .* has a NUL"):
        writer({"a\0b": 1.0}, end_of_episode=True)
    assert list_trajectories(tmp_path) == []
