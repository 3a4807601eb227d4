"""Observers of one environment and of many on a real server: what is read back are the windows that `windowing` has."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from episodes import cut, expected, feed, observed
from kinds import contents
from reading import Place, Serve, fifo, read
from reading import spec as spec_of
from waiting import eventually

import reverb_writer as rw

pytestmark = [contents, pytest.mark.filterwarnings("ignore:`stride_length`")]


def test_large_steps_are_sent_in_time(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 4, 2) as observer:
        for number in range(40):
            observer({"frame": np.full((300, 1000), number, np.int32)}, end_of_episode=number == 39)
    items = read(place.client, "a")
    assert [item.data[0][:, 7, 7].tolist() for item in items] == cut(range(40), rw.WindowSpec(4, 2).windows(40))
    assert all((item.data[0] == item.data[0][:, :1, :1]).all() for item in items)


def test_steps_tell_the_end_of_their_episode_unless_the_caller_knows_better(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        for number in range(1, 6):
            observer({"n": np.int64(number), "is_last": number in (3, 5)})
        assert observer.stats().episodes == 2
        observer({"n": np.int64(6), "is_last": False}, end_of_episode=True)
        observer({"n": np.int64(7), "is_last": True}, end_of_episode=False)
        observer({"n": np.int64(8), "is_last": False})
    assert place.column("a", 1) == [[1, 2], [2, 3], [4, 5], [7, 8]]


def test_tables_of_an_observer_get_the_same_windows_and_observers_have_priorities_of_their_own(place: Place) -> None:
    def total(window: Any) -> float:
        return float(window["n"].sum())

    client = place.client
    with (
        rw.TrajectoryObserver(client, "b", 2, priority=0.5) as short,
        rw.TrajectoryObserver(client, "a", 3, priority=2.5) as middle,
        rw.TrajectoryObserver(client, ["a", "b"], 4, 4, total, end_of_episode="cover") as longest,
    ):
        for observer in (short, middle, longest):
            feed(observer, [5])
    found = {
        table: sorted((sample.data[0].tolist(), sample.info.priority) for sample in read(place.client, table))
        for table in ("a", "b")
    }
    long = [([1, 2, 3, 4], 10.0), ([5, 0, 0, 0], 5.0)]
    assert found["a"] == sorted([([1, 2, 3], 2.5), ([2, 3, 4], 2.5), ([3, 4, 5], 2.5), *long])
    assert found["b"] == sorted([([1, 2], 0.5), ([2, 3], 0.5), ([3, 4], 0.5), ([4, 5], 0.5), *long])


def test_episodes_that_are_too_short_for_any_window_are_a_warning_once_and_summed_up_at_the_end(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "reverb_writer"), observed(place, rw.WindowSpec(20)) as observer:
        feed(observer, [7] * 30)
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    first, last = told
    assert first[0] == last[0] == "WARNING"
    assert "An episode of 7 steps is shorter than a window (`sequence_length` 20): nothing of it is written" in first[1]
    assert last[1] == "The observer was closed after 210 steps. Steps in no window, by reason: short_episode 210."


@pytest.mark.parametrize("end", ["close", "reset"])
def test_episodes_of_a_spanning_stream_are_sent_and_counted_at_their_ends(place: Place, end: str) -> None:
    with rw.SequenceObserver(place.client, "a", 2, chunk_length=1000, max_delay_s=1000) as observer:
        feed(observer, [3])
        eventually(lambda: place.client.server_info()["a"].current_size == 2)
        feed(observer, [3])
        getattr(observer, end)()
        assert observer.stats().episodes == 2


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


@pytest.mark.parametrize("at", [0, 2, 3, 6])
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
    array, strings = np.zeros(2), np.array(["", ""], object)
    options: Any = {"end_of_episode": "cover", "priority": lambda window: window["x"].sum()}
    with rw.TrajectoryObserver(place.client, "a", 2, **options) as observer:
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


def test_unknown_tables_are_found_at_once_with_the_tables_that_there_are(place: Place) -> None:
    with pytest.raises(rw.errors.StructureError) as refusal:
        rw.TrajectoryObserver(place.client, ["a", "d", "c"], 2)
    assert str(refusal.value) == f"table `c`, `d` is not on the server at {place.address}; it has `a`, `b`."


SIGNATURE = {"x": spec_of((None, 2), np.float32), "y": {"z": spec_of((None,), np.int64)}}


def test_step_that_is_not_the_table_s_is_refused_by_leaf_path_and_stored_flags_are_leaves(serve: Serve) -> None:
    flags = dict.fromkeys(("is_first", "is_last", "mask", "terminated", "truncated"), spec_of((None,), bool))
    client = serve(
        fifo("signed", signature=SIGNATURE), fifo("flagged", signature={"x": spec_of((None,), np.int64), **flags})
    )
    another_dtype = {"x": np.zeros(2), "y": {"z": np.int64(1)}}
    with rw.TrajectoryObserver(client, "signed", 1) as observer:
        for step, message in (
            (another_dtype, "leaf `x`: float64 (2,), but table `signed` holds float32 (2,) in `x` (its signature)."),
            ({"x": np.zeros(2, np.float32)}, "table `signed`: its signature has 2 leaves (x, y/z), got 1 (x)."),
        ):
            with pytest.raises(rw.errors.StructureError, match=f"^{re.escape(message)}"):
                observer(step)
        observer({"x": np.ones(2, np.float32), "y": {"z": 3}})
    (item,) = client.sample("signed")
    assert (item.data["x"].tolist(), item.data["y"]["z"].tolist()) == ([[1, 1]], [3])
    with (
        rw.TrajectoryObserver(client, "flagged", 2) as observer,
        pytest.raises(rw.errors.StructureError, match="its signature has 6 leaves"),
    ):
        observer({"x": np.int64(1)})
    with rw.TrajectoryObserver(client, "flagged", 2, store_flags=True, end_of_episode="cover") as observer:
        observer({"x": np.int64(1)}, truncated=True)
    (item,) = client.sample("flagged")
    assert {name: column.tolist() for name, column in item.data.items()} == {
        "is_first": [True, False],
        "is_last": [True, False],
        "mask": [True, False],
        "terminated": [False, False],
        "truncated": [True, False],
        "x": [1, 0],
    }


def python_calls(call: Any) -> list[str]:
    """Return the names of the Python functions that a call runs in this thread, itself included."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the lambda


def test_calls_of_a_vector_step_do_not_grow_with_the_environments(place: Place) -> None:
    counts = []
    for num_envs in (2, 50):
        step, go_on = {"obs": np.zeros((num_envs, 4)), "reward": np.zeros(num_envs)}, np.zeros(num_envs, bool)
        options: Any = {"num_envs": num_envs, "chunk_length": 20, "max_delay_s": 1000}
        with rw.TrajectoryObserver(place.client, "a", 20, **options) as observer:
            observer(step, end_of_episode=go_on)
            counts.append(len(python_calls(lambda step=step, go_on=go_on: observer(step, end_of_episode=go_on))))
    assert counts[0] == counts[1]


# Many environments: each is what an observer of its own would have written. Steps are (environment, number).


def windows_by_env(place: Place, table: str = "a") -> dict[int, list[list[int]]]:
    """Take out all items; return the numbers in the windows of each environment, in their order."""
    found: dict[int, list[list[int]]] = {}
    for item in read(place.client, table):
        envs, numbers = (column.tolist() for column in item.data[:2])
        assert set(envs) <= {envs[0], 0}
        found.setdefault(envs[0], []).append(numbers)
    return found


def step_of(number: int, num_envs: int) -> dict[str, Any]:
    return {"env": np.arange(1, num_envs + 1), "n": np.full(num_envs, number)}


@pytest.mark.parametrize(
    ("step", "end_of_episode", "message"),
    [
        ({"env": np.arange(3)}, None, "step 2: .* Missing: `n`"),
        (step_of(9, 2), None, r"step 2, leaf `env`: int64 \(2,\), expected int64 \(3,\)"),
        ({**step_of(9, 3), "n": 5}, None, r"step 2, leaf `n`: int64 \(\)"),
        (step_of(9, 3), True, r"`end_of_episode` has shape \(\), expected \(3,\): one flag per environment"),
        (step_of(9, 3), [True], r"`end_of_episode` has shape \(1,\)"),
        (step_of(9, 3), [[True] * 3], r"`end_of_episode` has shape \(1, 3\)"),
    ],
)
def test_refused_step_or_reset_of_environments_changes_nothing(
    place: Place, step: Any, end_of_episode: Any, message: str
) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3, num_envs=3) as observer:
        observer(step_of(1, 3))
        observer(step_of(2, 3))
        with pytest.raises(rw.errors.StructureError, match=message):
            observer(step, end_of_episode=end_of_episode)
        for env_ids in ([3], [-1], [0, 5], [True, False], [0.0], np.array([True, False])):
            with pytest.raises(rw.errors.SpecError, match="`env_ids` must be"):
                observer.reset(env_ids=env_ids)
        observer(step_of(3, 3))
    assert windows_by_env(place) == {env: [[1, 2, 3]] for env in (1, 2, 3)}


def test_nothing_is_learned_of_a_refused_first_step(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1, num_envs=2) as observer:
        refusals: list[tuple[Any, dict[str, Any], str]] = [
            ({"x": np.zeros(2)}, {"end_of_episode": True}, "`end_of_episode` has shape"),
            ({"x": np.zeros(3)}, {}, r"first step, leaf `x`: shape \(3,\), expected \(2, \.\.\.\)"),
            (step_of(1, 2), {"env_mask": [True]}, r"`env_mask` has shape \(1,\), expected \(2,\)"),
            ({"x": np.zeros(2, "M8[s]")}, {}, "leaf `x`: dtype datetime64"),
        ]
        for step, options, message in refusals:
            with pytest.raises(rw.errors.StructureError, match=message):
                observer(step, **options)
        observer(step_of(1, 2))
    assert windows_by_env(place) == {1: [[1]], 2: [[1]]}


def test_arguments_of_several_environments_are_refused_for_one(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        observer({"n": 1})
        with pytest.raises(rw.errors.SpecError, match="`env_mask` is for several environments"):
            observer({"n": 2}, env_mask=[True])
        for env_ids in ([], [0]):
            with pytest.raises(rw.errors.SpecError, match="`env_ids` is for several environments"):
                observer.reset(env_ids=env_ids)
        observer({"n": 2}, end_of_episode=True)
    assert place.column() == [[1, 2]]


@pytest.mark.parametrize("priority", [1.0, lambda _: 1.0], ids=["together", "one by one"])
def test_reset_ends_the_episodes_of_some_environments_or_of_all(place: Place, priority: Any) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3, 2, priority, num_envs=4) as observer:
        observer.reset()  # before the first step
        for number in range(1, 8):
            observer(step_of(number, 4))
            if number == 4:
                observer.reset(env_ids=[0])
                observer.reset(discard=True, env_ids=(1,))
                observer.reset(env_ids=np.array([], int))
                observer.reset(env_ids=np.array([0]))  # of nothing
        observer.reset(env_ids=[3, 2])
        assert observer.stats().dropped_steps == {"reset": 1}
        assert observer.stats().episodes == 4
        observer(step_of(8, 4))
        observer.reset()
        assert observer.stats().dropped_steps == {"reset": 1, "short_episode": 2}
        assert observer.stats().episodes == 8
    assert windows_by_env(place) == {
        1: [[1, 2, 3], [2, 3, 4], [5, 6, 7], [6, 7, 8]],
        2: [[1, 2, 3], [5, 6, 7], [6, 7, 8]],
        3: [[1, 2, 3], [3, 4, 5], [5, 6, 7]],
        4: [[1, 2, 3], [3, 4, 5], [5, 6, 7]],
    }


def test_end_of_an_episode_cuts_no_chunk_of_other_environments(place: Place) -> None:
    """Their complete windows wait for the chunk to be full: many environments would send twice as many chunks else."""
    with rw.TrajectoryObserver(place.client, "a", 2, num_envs=3, max_delay_s=float("inf")) as observer:
        observer(step_of(1, 3))
        observer(step_of(2, 3), end_of_episode=[True, False, False])
        eventually(lambda: observer.stats().acknowledged_items > 0)
        assert (observer.stats().acknowledged_items, observer.stats().pending_items) == (1, 2)
    assert windows_by_env(place) == {env: [[1, 2]] for env in (1, 2, 3)}


@pytest.mark.parametrize(
    ("length", "options", "num_items"),
    [(2, {}, 1 + 5 + 20), (8, {}, 0 + 0 + 14), (8, {"end_of_episode": "tile"}, 2 + 6 + 21)],
)
def test_items_of_episodes_are_as_many_as_the_table_of_a_program_counts(
    place: Place, length: int, options: Any, num_items: int
) -> None:
    """Episodes of 1, 5 and 20 actions. `TableConfig.replay` and the page on rate limiters have the numbers."""
    with rw.TrajectoryObserver(place.client, "a", length, **options) as observer:
        for num_actions in (1, 5, 20):
            for at in range(1, num_actions + 1):
                step = {"observation": np.float32(at), "action": np.int64(0), "reward": np.float32(1)}
                observer(step, terminated=at == num_actions, final_observation=np.float32(0))
    assert place.client.server_info()["a"].current_size == num_items
