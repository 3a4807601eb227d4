"""Accumulated rollouts arrive as one item each, columns of different lengths, and come back as the same nest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from kinds import contents
from reading import Place, Serve, fifo, read

import reverb_writer as rw

pytestmark = contents

EXAMPLE = {
    "step": {"observation": np.zeros((3, 2), np.float32), "action": np.zeros(3, np.int64)},
    "macro": np.zeros((2, 4), np.float16),
    "episode": {"return": np.float64(0), "weights": np.zeros((2, 2), np.float32), "nothing": None},
    "final": {"observation": np.zeros((1, 2), np.float32)},
}
ITEM: dict[str, Any] = {
    "step": {"observation": np.array([[0, 1], [2, 3], [4, 5]], np.float32), "action": np.array([7, 8, 9])},
    "macro": np.array([[1] * 4, [2] * 4], np.float16),
    "episode": {"return": np.array(1 / 3), "weights": np.array([[1, 2], [3, 4]], np.float32)},
    "final": {"observation": np.array([[6, 7]], np.float32)},
}


def filled() -> rw.TrajectoryAccumulator:
    accumulator = rw.TrajectoryAccumulator(EXAMPLE)
    for observation, action in zip(ITEM["step"]["observation"], ITEM["step"]["action"], strict=True):
        accumulator.add("step", {"observation": observation, "action": action})
    for row in ITEM["macro"]:
        accumulator.add("macro", row)
    accumulator.add("episode", {**ITEM["episode"], "nothing": None})
    accumulator.add("final", ITEM["final"])
    return accumulator


def assert_equal(found: Any, expected: Any) -> None:
    tree.assert_same_structure(found, expected)
    for mine, wanted in zip(tree.flatten(found), tree.flatten(expected), strict=True):
        assert mine.dtype == wanted.dtype
        np.testing.assert_array_equal(mine, wanted, strict=True)


def test_a_rollout_comes_back_as_the_nest_of_the_tables_signature_or_as_the_same_nest(serve: Serve) -> None:
    client = serve(fifo("a", signature=ITEM), fifo("b", signature=ITEM), fifo("plain"))
    for priority in (2.0, 0.5):
        accumulator = filled()
        accumulator.insert(client, ["a", "b"], priority)
        assert accumulator.counts == dict.fromkeys(EXAMPLE, 0)
    for table in ("a", "b"):
        samples = list(client.sample(table, 2))
        assert [sample.info.priority for sample in samples] == [2.0, 0.5]
        for sample in samples:
            assert_equal(sample.data, ITEM)
    filled().insert(client.address, "plain")
    (sample,) = client.sample("plain")
    assert_equal(sample.data, {**ITEM, "episode": {**ITEM["episode"], "nothing": ()}})


def test_a_refused_insert_keeps_the_rollout(place: Place) -> None:
    accumulator = filled()
    with pytest.raises(rw.errors.StructureError, match="zz"):
        accumulator.insert(place.client, "zz")
    with pytest.raises(rw.errors.SpecError, match="priority"):
        accumulator.insert(place.client, "a", -1.0)
    with pytest.raises(rw.errors.SpecError, match="`address` must be"):
        accumulator.insert(3, "a")
    accumulator.insert(place.client, "a")
    (sample,) = read(place.client, "a")
    assert_equal(sample.data, tuple(tree.flatten(ITEM)))


def test_a_squeeze_that_is_not_like_the_data_is_refused(place: Place) -> None:
    with pytest.raises(rw.errors.StructureError, match="`squeeze` must have a leaf for each of the 2"):
        place.client.insert({"x": np.zeros(1), "y": np.zeros(1)}, {"a": 1.0}, squeeze={"x": True})
    place.client.insert({"x": np.zeros(2), "y": np.ones(3)}, {"a": 1.0}, squeeze={"x": True, "y": False})
    (sample,) = read(place.client, "a")
    assert [column.tolist() for column in sample.data] == [[0, 0], [1, 1, 1]]
