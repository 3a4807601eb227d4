"""What a batch does by itself: weights, pinned memory, texts with shapes instead of numbers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer import slices
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.slices.axes import converted
from reverb_writer.slices.batch import Batch

RNG = np.random.default_rng(0)


def info_of(n: int, members: list[int] | None = None) -> BatchInfo:
    counts = np.full(n, 2, np.int64)
    return BatchInfo(
        np.arange(n, dtype=np.uint64),
        np.ones(n),
        np.arange(1.0, n + 1) / 8,
        counts,
        counts.astype(np.int32),
        counts,
        1.5,
        members=None if members is None else np.array(members, np.int64),
    )


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (None, [1.0, 1 / 2, 1 / 3, 1 / 4]),
        ([0, 0, 2, 2], [1.0, 1 / 2, 1.0, 3 / 4]),  # of the second dataset nothing has come
        ([1, 1, 1, 1], [1.0, 1 / 2, 1 / 3, 1 / 4]),
        (None, []),
        ([], []),
    ],
)
def test_importance_weights_are_relative_to_the_largest_of_each_member(
    members: list[int] | None, expected: list[float]
) -> None:
    np.testing.assert_allclose(info_of(len(expected), members).importance_weights(), expected)


def test_information_prints_as_a_table_of_shapes() -> None:
    title, keys, *_ = str(info_of(2)).splitlines()
    assert (title, keys) == ("BatchInfo, without zeros", "  keys           uint64 [2]")


def test_mask_of_a_batch_is_that_of_its_windows_or_slices() -> None:
    assert Batch({}, None).mask is Batch({}, info_of(2)).mask is None
    mask = np.array([[True, False], [True, True]])
    assert Batch({}, dataclasses.replace(info_of(2), mask=mask)).mask is mask
    steps = {"reward": np.arange(3.0), "done": np.array([False, True, True])}
    drawn = slices.SliceSampler(2, 2, short="pad").each(slices.find_trajectories(slices.read_markers(steps)), RNG)
    assert slices.gather(steps, drawn).mask.tolist() == [True, True, True, False]


def test_memory_is_pinned_of_tensors_and_not_of_strings() -> None:
    tensor = SimpleNamespace(pin_memory=lambda: "pinned")
    names, after = np.array([[b"a", b"b"], [b"c", b"d"]], object), np.array([b"a"], object)
    data = {"observation": tensor, "name": names}
    pinned = Batch(data, converted(info_of(0), lambda _: tensor), next={"name": after}).pin_memory()
    assert pinned.data["observation"] == "pinned"
    assert pinned.data["name"] is names
    assert pinned.next["name"] is after


def test_leaf_that_is_looked_for_on_the_batch_is_said_to_be_in_its_data() -> None:
    steps = {"observation": {"rgb": np.zeros((2, 3))}, "action": np.zeros((2, 3))}
    for data, where in [
        (steps, r"`batch\.data\['observation'\]`"),
        ((steps, np.ones((2, 3), bool)), r"`batch\.data\[0\]\['observation'\]`"),
        (rw.Trajectory(*[steps["observation"]] * 7), r"`batch\.data\.observation`"),
    ]:
        with pytest.raises(AttributeError, match=f"a Batch has no `observation`: it is a part of the data, {where}"):
            Batch(data, info_of(2)).observation  # noqa: B018  # it raises
    with pytest.raises(AttributeError, match="has no `state`; the leaves of its data are `action`, `observation/rgb`"):
        Batch(steps, info_of(2)).state  # noqa: B018  # it raises
    with pytest.raises(AttributeError, match="has no `state`, only `data`, a list"):
        Batch([steps], info_of(1)).state  # noqa: B018  # it raises


def test_batch_is_copied_and_pickled() -> None:
    batch = Batch({"reward": np.zeros(2)}, info_of(2))
    for same in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):  # noqa: S301  # our own bytes
        assert repr(same) == repr(batch)
    assert not hasattr(batch, "_asdict")


def test_importance_weights_are_those_of_schaul() -> None:
    # N = 4, P = 1/2 and 1/8, beta = 1/2: (4 / 2) ** -1/2 = 0.7071 and (4 / 8) ** -1/2 = 1.4142, over the largest.
    info = BatchInfo(**{**vars(info_of(2)), "probabilities": np.array([0.5, 0.125]), "table_sizes": np.array([4, 4])})
    np.testing.assert_allclose(info.importance_weights(0.5), [0.5, 1.0])


def test_batch_shows_dtypes_and_shapes() -> None:
    info = repr(info_of(64))
    assert info.startswith("BatchInfo(keys=uint64 [64], priorities=float64 [64], ")
    data = {"x": np.zeros((64, 5, 3), np.float32), "name": np.full((64, 5), b"", object)}
    text = f"Batch(data={{'x': float32 [64, 5, 3], 'name': strings [64, 5]}}, info={info})"
    assert repr(Batch(data, info_of(64))) == text
    listed = repr(Batch([{"x": np.zeros((2, 3))}] * 64, info_of(64)))
    assert listed.startswith("Batch(data=[{'x': float64 [2, 3]}, ... 64 in all], info=")
