"""Pickle files of the original's layout: read when asked for, arrays only, whatever the pickle wants."""

from __future__ import annotations

import builtins
import collections
import json
import os
import pickle
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw
from reverb_writer import instinct_rl, rows
from reverb_writer.instinct_rl import RolloutDataset, convert_trajectories
from reverb_writer.instinct_rl.pickles import frame_range, load_trajectory
from reverb_writer.instinct_rl.restricted_pickle import load_arrays


def frames(start: int, stop: int, *, done: bool = False) -> dict[str, Any]:
    """Return a chunk as the original's savers write it."""
    size = stop - start
    dones = np.zeros((size, 1), np.uint8)
    dones[-1] = done
    return {
        "observations": np.arange(start, stop, dtype=np.float32)[:, None],
        "privileged_observations": np.zeros((size, 2), np.float32),
        "actions": np.zeros((size, 3), np.float32),
        "rewards": np.ones((size, 1), np.float32),
        "dones": dones,
        "values": np.zeros((size, 1), np.float32),
        "timeouts": np.zeros(size, bool),
    }


def write(folder: Path, *chunks: tuple[int, int, dict[str, Any]], ending: str = "pickle") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for start, stop, arrays in chunks:
        (folder / f"traj_{start:06d}_{stop:06d}.{ending}").write_bytes(pickle.dumps(arrays))


def test_legacy_trajectories_are_delivered_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "trajectory_10", (0, 2, frames(0, 2)), (2, 3, frames(2, 3, done=True)))
    write(tmp_path / "trajectory_9", (4, 6, frames(4, 6)), ending="pkl")
    os.utime(tmp_path / "trajectory_9", (0, 0))
    batch = RolloutDataset(tmp_path, 1).get_batch(5)
    assert batch.observation[:, 0, 0].tolist() == [4, 5, 0, 1, 2]  # 9 is older than 10
    assert batch.next_observation[:, 0, 0].tolist() == [5, 5, 1, 2, 2]
    assert batch.done[:, 0].tolist() == [False, True, False, False, True]
    assert batch.timeout[:, 0].tolist() == [False, True, False, False, False]
    assert batch.privileged_observation.shape == (5, 1, 2)


def test_legacy_trajectories_are_not_read_unless_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "trajectory_0", (0, 2, frames(0, 2)))
    with pytest.raises(rw.errors.ReplayTimeoutError, match="0 complete trajectories"):
        rw.files.RolloutDataset(tmp_path, 1, wait_timeout_s=0).get_batch()


def test_compressed_components_are_put_together_in_the_listed_order(tmp_path: Path) -> None:
    chunk = frames(0, 2)
    chunk |= {"obs_depth": np.array([[0, 127], [254, 255]], np.uint8), "obs_speed": np.array([[3.0], [4.0]])}
    del chunk["observations"]
    write(tmp_path / "trajectory_0", (0, 2, chunk))
    metadata: dict[str, Any] = {"obs_segments": {"speed": [1], "depth": [1, 2]}}
    metadata["obs_disassemble_mapping"] = {"depth": "normalized_image"}
    (tmp_path / "metadata.json").write_text(json.dumps(metadata))
    found = RolloutDataset(tmp_path, 1).get_batch(2).observation[:, 0]
    np.testing.assert_allclose(found, [[3, 0, 0.49804], [4, 0.99608, 1]], atol=5e-6)
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(rw.errors.FormatError, match="lists no `obs_segments`"):
        load_trajectory(tmp_path / "trajectory_0")


def test_observations_that_a_saver_left_in_a_tuple_are_read(tmp_path: Path) -> None:
    chunk = frames(0, 2)
    write(tmp_path / "trajectory_0", (0, 2, {**chunk, "observations": (chunk["observations"],)}))
    assert RolloutDataset(tmp_path, 1).get_batch(2).observation[:, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        (((0, 2, frames(0, 2)), (3, 4, frames(3, 4))), "does not follow frame 2"),
        (((0, 2, frames(0, 2)), (2, 3, {"observations": np.zeros((1, 1))})), "differ from those of the files before"),
        (((0, 3, frames(0, 2)),), "is no array of 3 frames"),
        (((0, 2, {"observations": [1, 2]}),), "is no array of 2 frames"),
        ((), "it has no files"),
    ],
)
def test_chunks_that_do_not_fit_are_refused_by_name(tmp_path: Path, chunks: Any, text: str) -> None:
    write(tmp_path / "trajectory_0", *chunks)
    with pytest.raises(rw.errors.FormatError, match=f"trajectory `trajectory_0`.*{text}"):
        load_trajectory(tmp_path / "trajectory_0")


def test_frame_range_is_in_the_name() -> None:
    assert frame_range("traj_000064_000128.pickle") == RolloutDataset.get_frame_range("traj_64_128") == (64, 128)
    with pytest.raises(rw.errors.FormatError, match="names no frames"):
        frame_range("metadata.json")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_of_every_protocol_are_read(protocol: int) -> None:
    arrays: dict[str, Any] = {
        "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big endian": np.arange(3, dtype=">i4"),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 4)),
        "number": np.float64(0.5),
        "nest": ([1, 2.5, None], "text", b"bytes"),
    }
    found = load_arrays(pickle.dumps(arrays, protocol))
    assert found.pop("nest") == arrays.pop("nest")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()


class Hostile:
    """Pickles as a call of whatever it is given."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call

    def __repr__(self) -> str:
        return f"Hostile({self._call[0].__qualname__})"


def memo_of(function: Any, state: Any) -> bytes:
    """Return a pickle that sets the state of one of NumPy's names."""
    module, name = function.__module__, function.__name__
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + pickle.dumps(state, 2)[2:-1] + b"b."


RECONSTRUCT = np.zeros(1).__reduce__()[0]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "hostile",
    [
        Hostile(os.system, "touch pwned"),
        Hostile(builtins.eval, "__import__('os').system('touch pwned')"),
        Hostile(builtins.exec, "open('pwned', 'w')"),
        Hostile(subprocess.Popen, ["touch", "pwned"]),
        Hostile(builtins.getattr, np, "load"),
        Hostile(np.load, "file", None, True),
        Hostile(np.ones, (2,)),
        collections.OrderedDict(a=1),
        {1, 2},
        complex(1, 2),
        pytest.param(np.array([object()], object), id="array([object()])"),
        np.array([{"a": 1}], object),
        np.zeros(2, [("a", "i4")]),
        np.array(["text"]),
        np.zeros(2, "M8[s]"),
        np.dtype("f4"),
        slice(1),
        range(3),
        ValueError,
    ],
    ids=repr,
)
def test_pickle_of_anything_else_is_refused_and_runs_nothing(
    hostile: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        data = pickle.dumps({"observations": hostile}, protocol)
    except (TypeError, pickle.PicklingError):
        pytest.skip("cannot be pickled at all")
    with pytest.raises(rw.errors.UnsafeDataError, match="a pickle"):
        load_arrays(data)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch pwned'\ntR.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00P0\n.",  # a persistent object
        b"\x80\x02\x82\x01.",  # an extension of copyreg's registry
        b"(i__main__\nHostile\n.",
        memo_of(RECONSTRUCT, (None, {"__code__": 1})),
        memo_of(np.ndarray, (None, {"fill": 1})),
        memo_of(np.dtype, {"x": 1}),
        b"\x80\x02]r\xff\xff\xff\x7f.",  # 2**31 entries of the memo, 32 GiB
        b"cnumpy.core.numeric\n_frombuffer\n(I4294967296\ncnumpy\ndtype\n(S'u1'\ntR(I4294967296\ntS'C'\ntR.",  # 4 GiB
        b"\x80\x04cnumpy\nndarray.tofile\n.",
        b"\x80\x04cnumpy.core.multiarray\n__builtins__\n.",
        b"\x80\x04c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
    ],
)
def test_pickle_by_hand_is_refused(data: bytes) -> None:
    with pytest.raises(rw.errors.UnsafeDataError, match="a pickle"):
        load_arrays(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no pickle",
        pickle.dumps({"a": np.zeros(100)})[:-20],
        b"\x80\x05\x96" + (1 << 62).to_bytes(8, "little") + b".",  # a bytearray of 4 EiB
        pickle.dumps({"a": np.zeros(4)}).replace(b"K\x04\x85", b"K\x7f\x85"),  # more elements than there are
        b"(" * 10 + b".",
    ],
)
def test_torn_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(rw.errors.FormatError, match="no pickle of arrays"):
        load_arrays(data)


def test_pickle_of_few_bytes_and_many_parts_is_read_once() -> None:
    nest: Any = np.arange(2)
    for _ in range(30):  # 2**30 paths to one array
        nest = [nest, nest]
    found = load_arrays(pickle.dumps(nest))
    assert found[0] is found[1]
    while isinstance(found, list):
        found = found[0]
    assert found.tolist() == [0, 1]


def test_one_pickle_does_not_change_the_next() -> None:
    good, nest = pickle.dumps({"a": np.arange(3)}), list[Any]()
    nest.append(nest)
    with pytest.raises(rw.errors.UnsafeDataError, match="nested without end"):
        load_arrays(pickle.dumps(nest))
    for state in ({"array": 1}, (None, {"array": 1, "__init__": 2})):
        for function in (RECONSTRUCT, np.ndarray, np.dtype):
            with pytest.raises(rw.errors.UnsafeDataError):
                load_arrays(memo_of(function, state))
    assert load_arrays(good)["a"].tolist() == [0, 1, 2]


def test_hostile_trajectory_is_skipped_by_name(tmp_path: Path) -> None:
    write(tmp_path / "trajectory_0", (0, 1, {"observations": Hostile(os.system, "true")}))
    write(tmp_path / "trajectory_1", (0, 1, frames(0, 1)))
    dataset = RolloutDataset(tmp_path, 1)
    assert len(list(dataset)) == 1
    assert "system" in dataset.skipped["trajectory_0"]


def test_newest_trajectories_of_all_directories_come_in_the_order_of_modification(tmp_path: Path) -> None:
    dataset = RolloutDataset([tmp_path / "a", tmp_path / "b"], 1, keep_latest_n_trajs=2, wait_timeout_s=0)
    for number, (name, start) in enumerate((("a", 30), ("a", 10), ("b", 20))):
        assert dataset.read_dataset_directory() is (number == 2)  # whether there are enough
        path = tmp_path / name / f"trajectory_{number}"
        write(path, (start, start + 1, frames(start, start + 1)))
        os.utime(path, (start, start))
    assert [batch.observation.item() for batch in dataset] == [20, 30]


def test_arguments_mean_the_same_as_those_of_files(tmp_path: Path) -> None:
    with rw.files.RolloutWriter(tmp_path) as writer:
        for episode in range(6):
            for t in range(5):
                state = {"a": np.float32(episode), "b": np.full(2, t)}
                writer({"observation": state, "u": 0.0, "reward": 1.0}, terminated=t == 4)
    options: dict[str, Any] = {"seed": 3, "fields": {"action": "u"}}
    ours = rw.files.RolloutDataset(tmp_path, 2, 2, shuffle=True, keep_latest=4, start_range=(1, 4), **options)
    theirs = RolloutDataset(tmp_path, 2, 2, True, 4, [1, 4], **options)  # the original's order
    for batches in zip(ours, theirs, strict=True):
        own, same = ([leaf.tolist() for leaf in tree.flatten(batch) if leaf is not None] for batch in batches)
        assert own == same


def test_first_frame_is_marked_as_done_only_if_asked(tmp_path: Path) -> None:
    write(tmp_path / "trajectory_0", (0, 3, frames(0, 3)))
    for is_asked in (False, True):
        dataset = RolloutDataset(tmp_path, 1, first_frame_done=is_asked)
        assert [bool(batch.done[0]) for batch in dataset] == [is_asked, False, True]
        assert dataset.num_dataset_looped == 1
        dataset.reset()
        assert dataset.get_batch(3).done[:, 0].tolist() == [is_asked, False, True]


def test_a_transition_batch_is_a_step_of_an_environment(tmp_path: Path) -> None:
    write(tmp_path / "trajectory_0", (0, 2, frames(0, 2)))
    dataset = RolloutDataset(tmp_path, 1)
    first, second = dataset.get_transition_batch(), dataset.get_transition_batch()
    observation, action, reward, done, infos = second
    assert (observation.tolist(), action.shape, reward.tolist(), done.tolist()) == ([[1]], (1, 3), [1], [True])
    assert (first[4]["time_outs"].tolist(), infos["time_outs"].tolist(), [*infos]) == ([False], [True], ["time_outs"])
    fields = ("observation", "privileged_observation", "action", "reward", "done", "timeout", "next_observation")
    assert dataset.Transition._fields[:8] == (*fields, "next_privileged_observation")
    assert isinstance(dataset.get_buffer(), dataset.Transition)
    with pytest.raises(StopIteration):
        dataset.get_transition_batch()


def test_a_subclass_of_the_base_whose_batches_have_no_time_outs_has_no_infos() -> None:
    class Fixed(instinct_rl.RolloutFileBase):
        def get_batch(self, num_transitions_per_env: int | None = None) -> Any:  # noqa: ARG002  # as the base
            return SimpleNamespace(observation=1, action=2, reward=3, done=4)

    assert issubclass(RolloutDataset, instinct_rl.RolloutFileBase)
    assert issubclass(instinct_rl.RolloutFileBase, rw.files.RolloutFileBase)
    assert Fixed("nowhere", 2).get_transition_batch() == (1, 2, 3, 4, {})


def test_components_are_put_together_as_the_metadata_lists_them(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(
        json.dumps({"obs_segments": {"b": [1], "a": [2]}, "obs_disassemble_mapping": {"a": "normalized_image"}})
    )
    arrays = {"obs_a": np.array([[0, 255]], np.uint8), "obs_b": np.array([[7.0]]), "actions": np.ones((1, 1))}
    for folder in (tmp_path, [tmp_path]):
        found = RolloutDataset(folder, 1).assemble_obs_components(arrays)
        assert {key: value.tolist() for key, value in found.items()} == {"observations": [[7, 0, 1]], "actions": [[1]]}
    with pytest.raises(rw.errors.FormatError, match="component `obs_a` is missing"):
        RolloutDataset(tmp_path, 1).assemble_obs_components({"obs_b": np.zeros((1, 1))})


def test_pickles_are_converted_once_for_all(tmp_path: Path) -> None:
    pickled, converted = tmp_path / "pickled", tmp_path / "converted"
    write(pickled / "run" / "trajectory_1", (0, 2, frames(0, 2)), (2, 3, frames(2, 3, done=True)))
    write(pickled / "run" / "trajectory_0", (4, 6, frames(4, 6)))
    write(pickled / "run" / "trajectory_2", (0, 1, {"observations": Hostile(os.system, "true")}))
    (pickled / "run" / "metadata.json").write_text(json.dumps({"env": "Go1"}))
    for number, seconds in ((1, 100), (0, 200)):
        os.utime(pickled / "run" / f"trajectory_{number}", (seconds, seconds))
    left_out = convert_trajectories(pickled, converted)
    assert "system" in left_out.pop("trajectory_2")
    assert not left_out
    paths = rw.files.list_trajectories(converted)
    assert [rw.files.StoredTrajectory(path).manifest.metadata for path in paths] == [{"env": "Go1"}] * 2
    own, theirs = RolloutDataset(converted, 1), RolloutDataset(pickled, 1)
    for ours, same in zip(own, theirs, strict=True):
        assert [leaf.tolist() for leaf in ours] == [leaf.tolist() for leaf in same]
    assert len(list(own)) == 5
    transitions = rw.files.RolloutDataset(converted, 1)
    assert (len(list(transitions)), transitions.num_left_out) == (4, 1)  # no frame follows the last one of number 0
    mixed = RolloutDataset([converted, pickled], 1)
    assert len(list(mixed)) == 10


def test_reading_pickles_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    write(tmp_path / "data" / "trajectory_0", (0, 2, frames(0, 2)))
    dataset = RolloutDataset(tmp_path / "data", 1)
    assert [batch.observation.tolist() for batch in dataset] == [[[0]], [[1]]]
    write(tmp_path / "trajectory_1", (0, 1, {"observations": np.zeros((1, 1)), "dones": np.zeros((1, 1))}))
    assert dataset.load_trajectory(tmp_path / "trajectory_1", None)[1].tolist() == [rows.ACTION]
    assert not list(scratch.iterdir())


def test_all_observations_are_those_of_the_rows_and_the_one_after_them() -> None:
    storage = instinct_rl.SarsaRolloutStorage(2, 3, (1,), (2,), (1,))
    for t in range(3):
        now, after = (np.full((2, 1), float(number)) for number in (t, t + 1))
        transition = storage.Transition(now, -np.tile(now, 2), np.zeros((2, 1)), np.zeros(2), np.zeros(2))
        transition.next_observations, transition.next_critic_observations = after, -np.tile(after, 2)
        storage.add_transitions(transition)
    assert storage.all_observations[:, 1, 0].tolist() == [0, 1, 2, 3]
    assert storage.all_critic_observations[:, 0, 1].tolist() == [0, -1, -2, -3]
    assert storage.all_observations[:-1].tolist() == storage.observations.tolist()
    assert storage.all_observations[1:].tolist() == storage.next_observations.tolist()
    assert instinct_rl.SarsaRolloutStorage(2, 3, (1,), None, (1,)).all_critic_observations is None


def test_storages_are_of_each_other_and_spelled_as_in_the_original() -> None:
    assert issubclass(instinct_rl.ActionLabelRollout, instinct_rl.QueueRolloutStorage)
    for kind in (instinct_rl.RolloutStorage, instinct_rl.QueueRolloutStorage, instinct_rl.SarsaRolloutStorage):
        assert issubclass(kind, instinct_rl.RolloutStorage)
        assert kind.reccurent_mini_batch_generator is rw.rollouts.RolloutStorage.recurrent_mini_batch_generator
