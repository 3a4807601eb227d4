"""Accumulators fill, hand over and refuse as they say. The numbers are those of Echo's own rules."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw
from reverb_writer.accumulator.accumulator import NotADictError
from reverb_writer.errors import SpecError, StructureError

EXAMPLE = {"step": {"o": np.ones((3, 2), np.float32), "r": np.ones(3, np.int32)}, "episode": {"ret": np.float32(1)}}


def filled(**options: Any) -> rw.TrajectoryAccumulator:
    accumulator = rw.TrajectoryAccumulator(EXAMPLE, **options)
    for o, r in (([1.0, 2.0], 1), ([5.0, 5.0], 2), ([9.0, 9.0], 3)):
        accumulator.add("step", {"o": np.array(o, np.float32), "r": np.int32(r)})
    accumulator.add("episode", {"ret": 6.5})
    return accumulator


def assert_equal(found: Any, expected: Any) -> None:
    tree.map_structure(partial(np.testing.assert_array_equal, strict=True), found, expected)


FILLED = {
    "step": {"o": np.array([[1, 2], [5, 5], [9, 9]], np.float32), "r": np.array([1, 2, 3], np.int32)},
    "episode": {"ret": np.array(6.5, np.float32)},
}


@pytest.mark.parametrize(
    ("leaves", "capacity"),
    [
        ([(4, 12), (4,)], 4),
        ([(1,)], 1),
        ([(1, 8), (1, 4, 2)], 1),
        ([(4, 8), ()], 1),  # a 0-d leaf makes it a single item, whatever the others are
        ([()], 1),
        ([(0, 3)], 0),
    ],
)
def test_capacity_is_guessed_from_the_shapes(leaves: list[tuple[int, ...]], capacity: int) -> None:
    example = {"x": {str(index): np.empty(shape) for index, shape in enumerate(leaves)}}
    assert rw.TrajectoryAccumulator(example).capacities == {"x": capacity}


NAMES = r"`capacities` must name the timescales \['step', 'episode'\], got"


@pytest.mark.parametrize(
    ("example", "capacities", "error", "message"),
    [
        *(({"x": empty}, None, StructureError, "timescale 'x' has no array leaves") for empty in ({}, (), {"a": None})),
        ({"x": {"a": np.array(["ab", "c"])}}, None, StructureError, "'x', leaf `a`: object is not a number"),
        ({"x": (np.empty((4, 8)), np.empty(3))}, None, StructureError, "'x': .* must share the same leading dimension"),
        ({"x": (np.empty((1, 8)), np.empty(5))}, None, StructureError, "'x': .* must share the same leading dimension"),
        ([np.zeros(3)], None, NotADictError, "must be a dict"),
        *((EXAMPLE, other, SpecError, NAMES) for other in ({}, {"step": 3}, {"step": 3, "episode": None, "other": 1})),
        *(({"x": 0.0}, {"x": no}, SpecError, r"`capacities\['x'\]` must be") for no in (0, -1, 2.5, True)),
    ],
)
def test_an_example_or_capacities_that_cannot_work_are_refused(
    example: Any, capacities: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        rw.TrajectoryAccumulator(example, capacities=capacities)
    assert isinstance(caught.value, TypeError) == isinstance(example, list)


def test_an_example_may_be_specs_also_with_dtypes_of_tensorflow() -> None:
    dtypes = (np.int32, SimpleNamespace(as_numpy_dtype=np.int8))
    specs = [SimpleNamespace(shape=(3, 2), dtype=dtype) for dtype in dtypes]
    built = rw.TrajectoryAccumulator({"x": specs}).build(partial=True)["x"]
    assert [(column.dtype, column.shape) for column in built] == [(np.int32, (3, 2)), (np.int8, (3, 2))]


def test_counts_tell_how_full_it_is() -> None:
    accumulator = rw.TrajectoryAccumulator(EXAMPLE)
    assert (accumulator.counts, accumulator.is_full) == ({"step": 0, "episode": 0}, False)
    accumulator = filled()
    assert (accumulator.counts, accumulator.is_full) == ({"step": 3, "episode": 1}, True)
    assert_equal(accumulator.build(), FILLED)
    assert accumulator.counts == {"step": 0, "episode": 0}
    accumulator = filled()
    accumulator.reset()
    accumulator.add("step", {"o": np.full(2, 4, np.float32), "r": 4})
    with pytest.raises(rw.errors.IncompleteError, match=r"'step' has 1 of 3, 'episode' has 0 of 1 rows"):
        accumulator.build()
    assert (rw.TrajectoryAccumulator({}).is_full, rw.TrajectoryAccumulator({}).build()) == (True, {})


@pytest.mark.parametrize(("name", "slots"), [("step", 3), ("episode", 1)])
def test_a_row_too_many_and_an_unknown_timescale_are_named(name: str, slots: int) -> None:
    accumulator = filled()
    with pytest.raises(IndexError) as caught:
        accumulator.add(name, {"o": np.zeros(2, np.float32), "r": 0} if name == "step" else {"ret": 0.0})
    assert isinstance(caught.value, rw.errors.OutOfRangeError)
    assert str(caught.value) == f"Timescale '{name}' has {slots} slots, but you tried to add at index {slots}."
    with pytest.raises(KeyError) as unknown:
        accumulator.add("zz", {})
    assert isinstance(unknown.value, rw.errors.UnknownKeyError)
    assert str(unknown.value) == "Unknown timescale 'zz'. Known: ['step', 'episode']."
    assert_equal(accumulator.build(), FILLED)


def test_insert_closes_only_a_client_of_its_own_and_single_items_have_no_dimension_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[rw.Client] = []
    original = rw.Client.close

    def close(client: rw.Client) -> None:
        closed.append(client)
        original(client)

    monkeypatch.setattr(rw.Client, "close", close)
    with rw.LocalServer([rw.TableConfig("replay")]) as server, rw.Client(server) as client:
        pair = {"value": 0.0, "nothing": None}
        accumulator = rw.TrajectoryAccumulator({"row": np.zeros((1, 2)), "steps": np.zeros((3, 2)), "pair": pair})
        for target in (client, server.address):
            for name in ("row", "steps", "steps", "steps"):
                accumulator.add(name, 1.0)
            accumulator.add("pair", pair)
            accumulator.insert(target, "replay")
        accumulator.add("row", 1.0)
        with pytest.raises(rw.errors.IncompleteError, match="'steps' has 0 of 3"):
            accumulator.insert(client, "replay")
        accumulator.insert(client, "replay", partial=True)
        assert client.server_info()["replay"].current_size == 3
        assert [one is client for one in closed] == [False]
        bare = {name: timescale.without_time() for name, timescale in accumulator._timescales.items()}
        assert bare == {"row": False, "steps": False, "pair": {"value": True, "nothing": ()}}
        (data, _) = next(iter(client.sample("replay")))
    shapes = tree.map_structure(np.shape, data)
    assert shapes == {"row": (1, 2), "steps": (3, 2), "pair": {"value": (), "nothing": ()}}


GOOD = {"o": np.zeros(2, np.float32), "r": np.int32(0)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"o": GOOD["o"]}, "Missing: `r`; unexpected: none"),
        (3.0, "Missing: `o`, `r`"),
        ({**GOOD, "o": [1.0, 2.0]}, r"leaf `o`: list, expected an array of float32 \(2,\)"),
        ({**GOOD, "o": np.zeros(3, np.float32)}, r"leaf `o`: float32 \(3,\), expected float32 \(2,\)"),
        ({**GOOD, "o": np.array([1j, 0])}, r"leaf `o`: complex128 \(2,\), expected float32 \(2,\)"),
        ({**GOOD, "r": 1.9}, "leaf `r`: .*1.9.* does not fit into int32"),
        ({**GOOD, "r": 10**30}, r"leaf `r`: object \(\), expected int32 \(\)"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_and_changes_nothing(data: Any, message: str) -> None:
    accumulator = filled()
    accumulator.build()
    first = {"o": np.array([3, 4], np.float32), "r": np.int32(7)}
    accumulator.add("step", first)
    with pytest.raises(StructureError, match=message):
        accumulator.add("step", data)
    assert accumulator.counts["step"] == 1
    built = accumulator.build(partial=True)
    assert_equal(built["step"]["o"], np.array([[3, 4], [0, 0], [0, 0]], np.float32))
    assert_equal(built["step"]["r"], np.array([7, 0, 0], np.int32))


def test_a_float_of_ml_dtypes_rounds_and_does_not_overflow() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    accumulator = rw.TrajectoryAccumulator({"x": np.zeros((2,), ml_dtypes.bfloat16)})
    accumulator.add("x", np.float32(1.001))
    with pytest.raises(StructureError, match="does not fit into bfloat16"):
        accumulator.add("x", np.float64(1e300))
    assert accumulator.build(partial=True)["x"].tolist() == [1.0, 0.0]


def test_nests_of_every_kind_come_back_as_they_were() -> None:
    zeros = np.zeros(2)
    rows = rw.Trajectory._make([*[zeros] * 6, (np.zeros((2, 3)), [zeros])])
    accumulator = rw.TrajectoryAccumulator({"a": rows, "c": {"x": np.float64(0), "nothing": None, "empty": ()}})
    for value in (1.0, 2.0):
        accumulator.add("a", tree.map_structure(lambda leaf, value=value: np.full(leaf.shape[1:], value), rows))
    with pytest.raises(StructureError, match="leaf `nothing`: int, expected None"):
        accumulator.add("c", {"x": 5.0, "nothing": 1, "empty": ()})
    accumulator.add("c", {"x": 5.0, "nothing": None, "empty": ()})
    found, column = accumulator.build(), np.array([1.0, 2.0])
    assert found["c"] == {"x": 5.0, "nothing": None, "empty": ()}
    assert_equal(found["a"], rw.Trajectory._make([*[column] * 6, (np.array([[1.0] * 3, [2.0] * 3]), [column])]))


def test_a_list_is_a_nest_of_leaves() -> None:
    accumulator = rw.TrajectoryAccumulator({"step": [np.zeros((3, 2)), [np.zeros(3)]], "end": [np.int32(0)]})
    for t in range(3):
        accumulator.add("step", [np.array([t, -t]), [t]])
    accumulator.add("end", [7])
    built = accumulator.build()
    assert tree.map_structure(lambda leaf: leaf.tolist(), built) == {
        "step": [[[0, 0], [1, -1], [2, -2]], [[0, 1, 2]]],
        "end": [7],
    }
    with pytest.raises(StructureError, match="step"):  # two leaves, not one array of two numbers
        accumulator.add("step", [[1, 2], [3]])
    assert accumulator.counts["step"] == 0
