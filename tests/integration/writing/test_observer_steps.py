"""What becomes of a step's leaves on their way to a real server, and which steps are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from episodes import expected, observed
from kinds import contents
from reading import Place, fifo, read
from reading import spec as spec_of
from server_process import HostedServer

import reverb_writer as rw

pytestmark = [contents, pytest.mark.filterwarnings("ignore:`stride_length`")]


# Padding.


NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


def test_padding_has_dtype_and_shape_of_every_leaf(place: Place) -> None:
    step = {name: np.ones((2, 1), name) for name in NUMBERS} | {"bytes": np.array([b"a\0", "ä"], object)}
    with rw.TrajectoryObserver(place.client, "a", 3, end_of_episode="cover") as observer:
        observer(step, end_of_episode=True)
    (item,) = read(place.client, "a")
    for name, column in zip(sorted(step), item.data, strict=True):
        if name == "bytes":
            assert column.tolist() == [[b"a\0", "ä".encode()], [b"", b""], [b"", b""]]
        else:
            assert (column.dtype, column.shape) == (np.dtype(name), (3, 2, 1))
            np.testing.assert_array_equal(column, np.array([1, 0, 0], name)[:, None, None].repeat(2, 1))


# Steps that are refused.


def good_step(number: int) -> dict[str, Any]:
    return {"n": np.int64(number), "x": np.full(2, number, np.float32), "s": "text"}


BAD_STEPS = [
    {"n": np.int64(1), "x": np.zeros(2, np.float32)},
    {**good_step(1), "extra": 1},
    {**good_step(1), "x": np.zeros(2)},
    {**good_step(1), "x": np.zeros(3, np.float32)},
    {**good_step(1), "n": 0.5},
    {**good_step(1), "s": "\ud800"},
    {**good_step(1), "s": np.array({}, object)},
    {**good_step(1), "x": [np.float32(1), np.float32(1)]},
    None,
    3,
]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 6])
def test_refused_step_changes_nothing(place: Place, at: int) -> None:
    spec = rw.WindowSpec(3, 2, "cover")
    with observed(place, spec, spec=good_step(0)) as observer:
        for i in range(7):
            if i == at:
                for bad in BAD_STEPS:
                    with pytest.raises(rw.errors.StructureError, match=rf"^step {i}[:,]"):
                        observer(bad, end_of_episode=True)
                assert observer.stats().steps == i
            observer(good_step(i + 1), end_of_episode=i == 6)
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == expected(spec, [7])
    assert [item.data[1].tolist() for item in items] == [
        [b"text" if number else b"" for number in item.data[0].tolist()] for item in items
    ]


def test_leaves_are_copied(place: Place) -> None:
    array = np.zeros(2)
    strings = np.array(["", ""], object)
    with rw.TrajectoryObserver(
        place.client, "a", 2, end_of_episode="cover", priority=lambda w: w["x"].sum()
    ) as observer:
        for number in range(1, 4):
            array[:] = number
            strings[:] = str(number)
            observer({"x": array, "s": strings}, end_of_episode=number == 3)
            array[:] = -1
            strings[:] = "spoilt"
    items = read(place.client, "a")
    assert [item.data[1].tolist() for item in items] == [[[1, 1], [2, 2]], [[2, 2], [3, 3]]]
    assert [item.data[0].tolist() for item in items] == [[[b"1"] * 2, [b"2"] * 2], [[b"2"] * 2, [b"3"] * 2]]
    assert [item.info.priority for item in items] == [6, 10]


def test_leaf_that_reverb_cannot_store_is_refused_by_its_path(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1) as observer:
        with pytest.raises(rw.errors.StructureError, match="leaf `t/when`: dtype datetime64"):
            observer({"t": {"when": np.datetime64("2026-01-01")}, "x": 1})
        observer({"n": 1})  # nothing was learned of the refused one
    assert place.column() == [[1]]


# Tables.


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"table": "c", "sequence_length": 2}, "`c`"),
        ({"table": ["a", "d", "c"], "sequence_length": 2}, "`c`, `d`"),
        ({"windows": {"a": rw.WindowSpec(1), "c": rw.WindowSpec(2)}}, "`c`"),
    ],
)
def test_unknown_table_is_found_at_once_with_the_tables_that_there_are(
    place: Place, arguments: dict[str, Any], missing: str
) -> None:
    with pytest.raises(rw.errors.StructureError) as refusal:
        rw.TrajectoryObserver(place.client, **arguments)
    assert str(refusal.value) == f"table {missing} is not on the server at {place.address}; it has `a`, `b`."
    with pytest.raises(rw.errors.StructureError, match="table `c` is not on the server"):
        rw.SequenceObserver(place.address, "c", 2)
    with pytest.raises(rw.errors.StructureError, match="table `c` is not on the server"):
        rw.EpisodeObserver(place.address, "c", 2)


SIGNATURE = {"x": spec_of((None, 2), np.float32), "y": {"z": spec_of((None,), np.int64)}}


@pytest.fixture
def signed(replay_server: Callable[..., HostedServer]) -> Iterator[rw.Client]:
    server = replay_server(
        fifo("signed", signature=SIGNATURE),
        fifo("masked", signature=(spec_of((None,), np.int64), spec_of((None,), bool))),
    )
    with rw.Client(server.address, timeout_s=60) as client:
        yield client


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"x": np.zeros(2), "y": {"z": np.int64(1)}},
            "leaf `x`: float64 (2,), but table `signed` holds float32 (2,) in `x` (its signature).",
        ),
        (
            {"x": np.zeros(2, np.float32), "y": {"z": np.zeros(1, np.int64)}},
            "leaf `y/z`: int64 (1,), but table `signed` holds int64 () in `y/z` (its signature).",
        ),
        (
            {"x": np.zeros(2, np.float32)},
            "table `signed`: its signature has 2 leaves (x, y/z), got 1 (x).",
        ),
    ],
)
def test_step_that_is_not_the_table_s_is_refused_by_leaf_path(signed: rw.Client, step: Any, message: str) -> None:
    with rw.TrajectoryObserver(signed, "signed", 1) as observer:
        for _ in range(2):
            with pytest.raises(rw.errors.StructureError) as refusal:
                observer(step)
            assert str(refusal.value).startswith(message)
        observer({"x": np.ones(2, np.float32), "y": {"z": 3}})
    (item,) = signed.sample("signed")
    assert item.data["x"].tolist() == [[1, 1]]
    assert item.data["y"]["z"].tolist() == [3]


def test_mask_is_part_of_what_the_signature_asks_for(signed: rw.Client) -> None:
    with (
        rw.TrajectoryObserver(signed, "masked", 2) as observer,
        pytest.raises(rw.errors.StructureError, match="its signature has 2 leaves"),
    ):
        observer((np.int64(1),))
    with rw.TrajectoryObserver(signed, "masked", 2, mask=True, end_of_episode="cover") as observer:
        observer((np.int64(1),), end_of_episode=True)
    (item,) = read(signed, "masked")
    assert [column.tolist() for column in item.data] == [[1, 0], [True, False]]
