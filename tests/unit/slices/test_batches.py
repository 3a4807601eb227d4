"""What a batch does by itself: weights, pinned memory, texts with shapes instead of numbers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.slices.axes import converted
from reverb_writer.slices.batch import Batch


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


def test_mask_of_windows_is_that_of_their_kinds() -> None:
    kinds = np.array([[3, 12], [3, 16]], np.uint8)
    assert Batch({}, info_of(2), row_kinds=kinds).mask.tolist() == [[True, True], [True, False]]


def test_rows_after_a_shorter_item_are_padding() -> None:
    """Of items without kinds: the first was cut after two rows, so that no leaf shows its end."""
    info = dataclasses.replace(info_of(2), lengths=np.array([2, 3]))
    steps = {name: np.ones((2, 3)) for name in ("observation", "action", "reward", "discount")}
    batch = Batch(steps, info)
    assert batch.mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.kinds.tolist() == [[2, 2, 16], [2, 2, 2]]
    assert rw.to_transitions(batch).mask.tolist() == [[True, False], [True, True]]
    without_names = Batch([np.ones((2, 3)), np.ones((2, 3))], info)
    assert without_names.mask.tolist() == [[True, True, False], [True, True, True]]
    with pytest.raises(rw.errors.StructureError, match="no leaf shows where episodes end"):
        _ = without_names.kinds


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
