"""Observers on a real server: what is read back are the windows that `windowing` says, and nothing else.

Steps are numbered from 1 on, so that zeros are padding.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from reading import fifo, read, read_column
from server_process import HostedServer, ServerProcess

import reverb_writer as rw
from reverb_writer.wire.signatures import ArraySpec

MODES = tuple(rw.EndOfEpisode)
NEEDS_OVERLAP = (rw.EndOfEpisode.COVER, rw.EndOfEpisode.TRUNCATE, rw.EndOfEpisode.ALIGN_END)

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


class Place(NamedTuple):
    """A server with tables `a` and `b`, and a client of it."""

    address: str
    client: rw.Client

    def column(self, table: str = "a", column: int = 0) -> list[list[Any]]:
        return read_column(self.client, table, column)


@pytest.fixture(scope="module")
def server(shared_process: ServerProcess) -> Iterator[HostedServer]:
    started = shared_process.start(fifo("a"), fifo("b"))
    yield started
    started.stop()


@pytest.fixture
def place(server: HostedServer) -> Iterator[Place]:
    with rw.Client(server.address, timeout_s=20) as client:
        for table in ("a", "b"):
            client.reset(table)
        yield Place(server.address, client)


def specs(lengths: Iterable[int], strides: Iterable[int]) -> list[rw.WindowSpec]:
    """Return every spec that there is of these lengths and strides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # S > L warns once per process and pair
        return [
            rw.WindowSpec(length, stride, mode)
            for mode, length, stride in itertools.product(MODES, lengths, strides)
            if stride <= length or mode not in NEEDS_OVERLAP
        ]


def observed(place: Place, spec: rw.WindowSpec, tables: Any = "a", /, **options: Any) -> rw.TrajectoryObserver:
    return rw.TrajectoryObserver(
        place.client,
        tables,
        spec.sequence_length,
        spec.stride_length,
        end_of_episode=spec.end_of_episode,
        **options,
    )


def cut(steps: Sequence[int], windows: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the windows of an episode's steps, with zeros for padding."""
    padded = [*steps, *itertools.repeat(0, 100)]
    return [padded[start:stop] for start, stop in windows]


def expected(spec: rw.WindowSpec, lengths: Iterable[int], first: int = 1) -> list[list[int]]:
    """Return the windows of episodes of these lengths, whose steps are numbered through from `first` on."""
    found = []
    for n in lengths:
        found += cut(range(first, first + n), spec.windows(n))
        first += n
    return found


def feed(observer: Any, lengths: Iterable[int], first: int = 1, after: Callable[[int], None] = lambda _: None) -> None:
    """Pass episodes of these lengths; `after` is called with the number of each step."""
    numbers = itertools.count(first)
    for n in lengths:
        for i in range(n):
            number = next(numbers)
            observer({"n": np.int64(number)}, end_of_episode=i == n - 1)
            after(number)


# All windows of every mode.

GRID = specs(range(1, 6), range(1, 7))
EPISODES = range(1, 10)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_read_back_are_the_windows_of_every_episode(place: Place, mode: rw.EndOfEpisode) -> None:
    for spec in GRID:
        if spec.end_of_episode is mode:
            with observed(place, spec) as observer:
                feed(observer, EPISODES)
            windows = place.column()
            assert windows == expected(spec, EPISODES), spec
            # Every step is in a window, or counted with a reason.
            stats = observer.stats()
            dropped: dict[str, int] = {}
            for n in EPISODES:
                for reason, count in spec.num_dropped(n).items():
                    dropped[reason] = dropped.get(reason, 0) + count
            assert stats.dropped_steps == dropped
            covered = set(itertools.chain.from_iterable(windows)) - {0}
            assert stats.steps == len(covered) + sum(dropped.values())
            assert stats.steps == sum(EPISODES)
            assert stats.episodes == len(EPISODES)
            assert (stats.items, stats.acknowledged_items) == (len(windows), len(windows))
            assert (stats.pending_items, stats.pending_bytes, stats.dropped_items) == (0, 0, 0)


# The result does not depend on how steps are fed and sent (invariant I5).

SMALL_GRID = specs((1, 3, 4), (1, 2, 3, 5))
SMALL_EPISODES = (3, 1, 6, 4, 9, 2)
WAYS: dict[str, dict[str, Any]] = {
    "one step a chunk": {"chunk_length": 1},
    "two steps a chunk": {"chunk_length": 2},
    "five steps a chunk": {"chunk_length": 5},
    "long chunks": {"chunk_length": 1000},
    "sent all the time": {"max_delay_s": 0.002},
    "few in flight": {"max_in_flight_items": 1},
    "few bytes in flight": {"max_in_flight_bytes": 1},
    "a spec beforehand": {"spec": {"n": ArraySpec((), np.int64)}},
}


@pytest.mark.parametrize("way", WAYS)
def test_windows_are_the_same_however_they_are_sent(place: Place, way: str) -> None:
    for spec in SMALL_GRID:
        with observed(place, spec, **WAYS[way]) as observer:
            feed(observer, SMALL_EPISODES)
        assert place.column() == expected(spec, SMALL_EPISODES), spec


@pytest.mark.parametrize("period", [1, 2, 3])
def test_windows_are_the_same_whenever_they_are_flushed(place: Place, period: int) -> None:
    for spec in specs((3, 4), (2, 3)):
        with observed(place, spec) as observer:
            feed(observer, SMALL_EPISODES, after=lambda number, o=observer: number % period or o.flush())
        assert place.column() == expected(spec, SMALL_EPISODES), spec


def test_all_tables_get_the_same_windows(place: Place) -> None:
    for spec in SMALL_GRID:
        with observed(place, spec, ["b", "a"]) as observer:
            feed(observer, SMALL_EPISODES)
        windows = expected(spec, SMALL_EPISODES)
        assert place.column("a") == windows
        assert place.column("b") == windows
        assert observer.stats().items == 2 * len(windows)


def test_many_requests_are_one_stream_of_windows(place: Place) -> None:
    lengths = [700, 1, 3000, 512, 40]
    for spec in (
        rw.WindowSpec(3, 2, "align_end"),
        rw.WindowSpec(20, 7, "truncate"),
        rw.WindowSpec(20, 20, "cover"),
        rw.WindowSpec(2, 1, "tile"),
        rw.WindowSpec(5, 9, "pad"),
    ):
        with observed(place, spec) as observer:
            feed(observer, lengths)
        padded = expected(rw.WindowSpec(spec.sequence_length, spec.stride_length, "drop"), [0])
        assert padded == []
        numbers = itertools.accumulate(lengths, initial=1)
        windows: list[list[int]] = []
        for first, n in zip(numbers, lengths, strict=False):
            steps = [*range(first, first + n), *[0] * 20]
            windows += [steps[start:stop] for start, stop in spec.windows(n)]
        assert place.column() == windows, spec


def test_large_steps_are_sent_in_time(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 4, 2) as observer:
        for number in range(40):
            observer({"frame": np.full((300, 1000), number, np.int32)}, end_of_episode=number == 39)
    items = read(place.client, "a")
    assert [item.data[0][:, 7, 7].tolist() for item in items] == cut(range(40), rw.WindowSpec(4, 2).windows(40))
    assert all((item.data[0] == item.data[0][:, :1, :1]).all() for item in items)


# Episodes stay apart (invariant I4).


def test_no_window_holds_steps_of_two_episodes(place: Place) -> None:
    for spec in SMALL_GRID:
        with observed(place, spec) as observer:
            for episode, n in enumerate(SMALL_EPISODES, 1):
                for i in range(n):
                    observer((np.int64(episode), np.int64(i)), end_of_episode=i == n - 1)
        for item in read(place.client, "a"):
            assert len(set(item.data[0].tolist()) - {0}) == 1


def test_server_counts_episodes(place: Place) -> None:
    with observed(place, rw.WindowSpec(2)) as observer:
        feed(observer, [3, 4, 2])
    assert place.client.server_info()["a"].num_episodes == 3


# Boundaries.


def boundary_steps(kind: str, numbers: Sequence[int]) -> list[Any]:
    last = [False] * (len(numbers) - 1) + [True]
    if kind == "is_last":
        return [{"n": np.int64(n), "is_last": end} for n, end in zip(numbers, last, strict=True)]
    if kind == "dm_env":
        types = [0, *[1] * (len(numbers) - 2), 2]
        return [{"n": np.int64(n), "step_type": np.int32(kind)} for n, kind in zip(numbers, types, strict=True)]
    return [
        rw.Trajectory(np.int32(2 if end else 1), np.int64(n), (), (), np.int32(0), np.float32(0), np.float32(1))
        for n, end in zip(numbers, last, strict=True)
    ]


@pytest.mark.parametrize(("kind", "column"), [("is_last", 1), ("dm_env", 0), ("trajectory", 1)])
def test_steps_tell_the_end_of_their_episode(place: Place, kind: str, column: int) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        for step in [*boundary_steps(kind, [1, 2, 3]), *boundary_steps(kind, [4, 5])]:
            observer(step)
        assert observer.stats().episodes == 2
    assert place.column("a", column) == [[1, 2], [2, 3], [4, 5]]


def test_caller_knows_better_than_the_step(place: Place) -> None:
    steps = boundary_steps("is_last", [1, 2, 3])
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        observer(steps[0], end_of_episode=True)
        observer(steps[2], end_of_episode=False)
        observer(steps[1])
    assert place.column("a", 1) == [[3, 2]]


# Padding.


def test_padding_of_a_trajectory_is_that_of_tf_agents(place: Place) -> None:
    """Behaviour A.1, field by field."""
    rows = [(0, 0, 1, 0, 1), (1, 1, 2, 1, 0), (2, 2, 0, 0, 1)]
    with rw.TrajectoryObserver(place.client, "a", 4, pad_end_of_episodes=True) as observer:
        for step_type, number, next_step_type, reward, discount in rows:
            observer(
                rw.Trajectory(
                    np.int32(step_type),
                    {"x": np.full((2,), number, np.uint8), "s": str(number)},
                    np.int64(number),
                    (),
                    np.int32(next_step_type),
                    np.float32(reward),
                    np.float32(discount),
                )
            )
    (item,) = read(place.client, "a")
    step_type, strings, pixels, action, next_step_type, reward, discount = item.data
    assert (step_type.dtype, step_type.tolist()) == (np.int32, [0, 1, 2, 2])
    assert strings.tolist() == [b"0", b"1", b"2", b""]
    assert (pixels.dtype, pixels.tolist()) == (np.uint8, [[0, 0], [1, 1], [2, 2], [0, 0]])
    assert (action.dtype, action.tolist()) == (np.int64, [0, 1, 2, 0])
    assert (next_step_type.dtype, next_step_type.tolist()) == (np.int32, [1, 2, 0, 0])
    assert (reward.dtype, reward.tolist()) == (np.float32, [0, 1, 0, 0])
    assert (discount.dtype, discount.tolist()) == (np.float32, [1, 0, 1, 0])


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


def test_bfloat16_is_written_and_padded(place: Place) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with rw.TrajectoryObserver(place.client, "a", 3, end_of_episode="cover") as observer:
        observer({"x": np.array([1.5, -2], bfloat16)})
        observer({"x": np.array([3, 4], bfloat16)}, end_of_episode=True)
    (item,) = read(place.client, "a")
    assert item.data[0].dtype == bfloat16
    assert item.data[0].astype(float).tolist() == [[1.5, -2], [3, 4], [0, 0]]


def test_mask_is_true_for_real_steps_only(place: Place) -> None:
    for spec in SMALL_GRID:
        with observed(place, spec, mask=True) as observer:
            feed(observer, SMALL_EPISODES)
        items = read(place.client, "a")
        assert [item.data[0].tolist() for item in items] == expected(spec, SMALL_EPISODES)
        for item in items:
            assert item.data[1].dtype == bool
            assert item.data[1].tolist() == [number > 0 for number in item.data[0].tolist()]


# Reset in mid-episode.


def windows_after_reset(spec: rw.WindowSpec, n: int) -> list[tuple[int, int]]:
    """Return what an episode of `n` steps leaves that `reset()` ends: without padding, the last L steps, once."""
    windows = spec.windows(n)
    length = spec.sequence_length or 0
    if spec.end_of_episode is rw.EndOfEpisode.DROP and n >= length and (n - length, n) not in windows:
        windows = [*windows, (n - length, n)]
    return windows


@pytest.mark.parametrize("flushed", [False, True])
def test_reset_writes_what_no_window_holds_yet(place: Place, flushed: bool) -> None:
    for spec in specs((3, 4), (1, 3, 5)) if flushed else SMALL_GRID:
        drop = spec.end_of_episode is rw.EndOfEpisode.DROP
        with observed(place, spec) as observer:
            windows: list[list[int]] = []
            first = 1
            for n in range(1, 9):
                for number in range(first, first + n):
                    observer({"n": np.int64(number)})
                if flushed:
                    observer.flush()
                if drop and n < (spec.sequence_length or 0):
                    with pytest.raises(
                        ValueError,
                        match=f"not enough steps remain in the cache to write an item with sequence_length="
                        f"{spec.sequence_length}, consider enabling pad_end_of_episodes",
                    ):
                        observer.reset()
                    observer.reset(write_cached_steps=False)
                else:
                    observer.reset()
                    windows += cut(range(first, first + n), windows_after_reset(spec, n))
                observer.reset()  # of nothing
                first += n
            covered = set(itertools.chain.from_iterable(windows)) - {0}
            assert observer.stats().steps == len(covered) + sum(observer.stats().dropped_steps.values())
        assert place.column() == windows, spec


def test_refused_reset_lets_the_episode_go_on(place: Place) -> None:
    with observed(place, rw.WindowSpec(3)) as observer:
        feed(observer, [0])
        observer({"n": np.int64(1)})
        observer({"n": np.int64(2)})
        with pytest.raises(rw.SpecError, match="not enough steps"):
            observer.reset()
        observer({"n": np.int64(3)}, end_of_episode=True)
        assert observer.stats().dropped_steps == {}
    assert place.column() == [[1, 2, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_reset_without_writing_leaves_the_complete_windows(place: Place, mode: rw.EndOfEpisode) -> None:
    spec = rw.WindowSpec(3, 2, mode)
    with observed(place, spec) as observer:
        for n in (2, 3, 6):
            for number in range(1, n + 1):
                observer({"n": np.int64(number)})
            observer.reset(write_cached_steps=False)
        assert observer.stats().dropped_steps == {"reset": 2 + 0 + 1}
        assert observer.stats().episodes == 3
    assert place.column() == [[1, 2, 3], [1, 2, 3], [3, 4, 5]]


@pytest.mark.parametrize("mode", MODES)
def test_close_leaves_the_complete_windows_and_counts_the_rest(place: Place, mode: rw.EndOfEpisode) -> None:
    with observed(place, rw.WindowSpec(3, 2, mode)) as observer:
        for number in range(1, 7):
            observer({"n": np.int64(number)})
    assert observer.stats().dropped_steps == {"reset": 1}
    assert place.column() == [[1, 2, 3], [3, 4, 5]]


# Several kinds of windows.


def test_one_observer_writes_several_kinds_of_windows(place: Place) -> None:
    kinds = {"a": rw.WindowSpec(2, 2, "pad"), "b": rw.WindowSpec(5, 3, "truncate")}
    with rw.TrajectoryObserver(place.client, windows=kinds) as observer:
        feed(observer, SMALL_EPISODES)
    for table, spec in kinds.items():
        assert place.column(table) == expected(spec, SMALL_EPISODES)
    dropped = [reason for spec in kinds.values() for n in SMALL_EPISODES for reason in spec.num_dropped(n).items()]
    assert sum(observer.stats().dropped_steps.values()) == sum(count for _, count in dropped)


def test_every_pair_of_kinds_shares_the_steps(place: Place) -> None:
    pairs = itertools.product(specs((1, 4), (1, 3)), specs((3,), (2, 4)))
    for one, other in itertools.islice(pairs, 0, None, 3):
        kinds = {"a": one, "b": other}
        with rw.TrajectoryObserver(place.client, windows=kinds) as observer:
            feed(observer, SMALL_EPISODES)
        for table, spec in kinds.items():
            assert place.column(table) == expected(spec, SMALL_EPISODES), kinds


def test_targets_have_tables_and_priorities_of_their_own(place: Place) -> None:
    windows = {
        "a": rw.Target(rw.WindowSpec(3), priority=2.5),
        "long": rw.Target(rw.WindowSpec(4, 4, "cover"), ("a", "b"), lambda window: window["n"].sum()),
    }
    with rw.TrajectoryObserver(place.client, "b", 2, priority=0.5, windows=windows) as observer:
        feed(observer, [5])
    found = {
        table: sorted((sample.data[0].tolist(), sample.info.priority) for sample in read(place.client, table))
        for table in ("a", "b")
    }
    long = [([1, 2, 3, 4], 10.0), ([5, 0, 0, 0], 5.0)]
    assert found["a"] == sorted([([1, 2, 3], 2.5), ([2, 3, 4], 2.5), ([3, 4, 5], 2.5), *long])
    assert found["b"] == sorted([([1, 2], 0.5), ([2, 3], 0.5), ([3, 4], 0.5), ([4, 5], 0.5), *long])


# Priorities.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk_length", [None, 1, 7])
def test_function_gives_each_window_its_priority(
    place: Place, mode: rw.EndOfEpisode, chunk_length: int | None
) -> None:
    spec = rw.WindowSpec(4, 3, mode)
    with observed(place, spec, priority=lambda window: window["n"].sum() / 4, chunk_length=chunk_length) as observer:
        feed(observer, SMALL_EPISODES)
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == expected(spec, SMALL_EPISODES)
    assert [item.info.priority for item in items] == [sum(item.data[0].tolist()) / 4 for item in items]


def test_function_sees_the_nest_of_the_window_without_the_mask(place: Place) -> None:
    seen: list[Any] = []

    def keep(window: Any) -> float:
        seen.append(window)
        return 1.0

    step = rw.Trajectory(np.int32(1), {"x": np.ones(2)}, "name", (), np.int32(1), 0.5, np.float32(1))
    with rw.TrajectoryObserver(
        place.client, "a", 3, end_of_episode="cover", priority=keep, mask=True
    ) as observer:
        observer(step)
        observer(step, end_of_episode=True)
    (window,) = seen
    assert isinstance(window, rw.Trajectory)
    assert window.observation["x"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert window.step_type.tolist() == [1, 1, 2]
    assert window.action.tolist() == [b"name", b"name", b""]
    assert window.policy_info == ()


def broken(window: Any) -> float:
    raise ZeroDivisionError


@pytest.mark.parametrize("answer", [broken, lambda _: float("nan"), lambda _: -1, lambda _: float("inf"), lambda _: "x"])
@pytest.mark.parametrize("bad", range(1, 8))
def test_function_that_fails_changes_nothing(place: Place, bad: int, answer: Callable[[Any], Any]) -> None:
    spec = rw.WindowSpec(3, 2, "tile")
    failing = False
    with observed(place, spec, priority=lambda w: answer(w) if failing else float(w["n"][0])) as observer:
        for number in range(1, 8):
            failing = number == bad
            if failing and (number == 7 or number in (3, 5)):
                with pytest.raises((rw.SpecError, ZeroDivisionError)):
                    observer({"n": np.int64(99)}, end_of_episode=number == 7)
            failing = False
            observer({"n": np.int64(number)}, end_of_episode=number == 7)
        assert observer.stats().steps == 7
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == expected(spec, [7])
    assert [item.info.priority for item in items] == [1, 3, 5, 7]


def test_function_that_fails_at_a_reset_changes_nothing(place: Place) -> None:
    answers = [1.0, -1.0, 2.0]
    with observed(place, rw.WindowSpec(2, 2), priority=lambda _: answers.pop(0)) as observer:
        for number in range(1, 4):
            observer({"n": np.int64(number)})
        with pytest.raises(rw.SpecError, match="got -1.0"):
            observer.reset()
        observer.reset()
    assert [(item.data[0].tolist(), item.info.priority) for item in read(place.client, "a")] == [
        ([1, 2], 1),
        ([2, 3], 2),
    ]


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), -0.1, "1", None])
def test_constant_that_is_no_priority_is_refused_at_construction(place: Place, priority: Any) -> None:
    with pytest.raises(rw.SpecError, match="`priority` must be a finite number >= 0"):
        rw.TrajectoryObserver(place.client, "a", 2, priority=priority)


def test_priority_zero_is_one(place: Place) -> None:
    with observed(place, rw.WindowSpec(1), priority=0) as observer:
        feed(observer, [1])
    assert [item.info.priority for item in read(place.client, "a")] == [0]


# Steps that are refused.


class Pair(NamedTuple):
    n: Any
    x: Any


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
                    with pytest.raises(rw.StructureError, match=rf"^step {i}[:,]"):
                        observer(bad, end_of_episode=True)
                assert observer.stats().steps == i
            observer(good_step(i + 1), end_of_episode=i == 6)
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == expected(spec, [7])
    assert [item.data[1].tolist() for item in items] == [
        [b"text" if number else b"" for number in item.data[0].tolist()] for item in items
    ]


def test_other_containers_and_numbers_are_the_same_step(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 3) as observer:
        observer({"n": np.int32(1), "x": np.array([1, 2], np.float32)})
        observer(Pair(2, np.array([3, 4], ">f4")))
        observer({"x": np.array([5, 0, 6], np.float32)[::2], "n": 3})
    (item,) = read(place.client, "a")
    assert (item.data[0].dtype, item.data[0].tolist()) == (np.int32, [1, 2, 3])
    assert (item.data[1].dtype, item.data[1].tolist()) == (np.float32, [[1, 2], [3, 4], [5, 6]])


def test_leaves_are_copied(place: Place) -> None:
    array = np.zeros(2)
    strings = np.array(["", ""], object)
    with rw.TrajectoryObserver(place.client, "a", 2, end_of_episode="cover", priority=lambda w: w["x"].sum()) as observer:
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
        with pytest.raises(rw.StructureError, match="leaf `t/when`: dtype datetime64"):
            observer({"t": {"when": np.datetime64("2026-01-01")}, "x": 1})
        observer({"n": 1})  # nothing was learned of the refused one
    assert place.column() == [[1]]


# Tables.


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({"table_name": "c", "sequence_length": 2}, "`c`"),
        ({"table_name": ["a", "d", "c"], "sequence_length": 2}, "`c`, `d`"),
        ({"windows": {"a": rw.WindowSpec(1), "c": rw.WindowSpec(2)}}, "`c`"),
    ],
)
def test_unknown_table_is_found_at_once_with_the_tables_that_there_are(
    place: Place, arguments: dict[str, Any], missing: str
) -> None:
    with pytest.raises(rw.StructureError) as refusal:
        rw.TrajectoryObserver(place.client, **arguments)
    assert str(refusal.value) == f"table {missing} is not on the server at {place.address}; it has `a`, `b`."
    with pytest.raises(rw.StructureError, match="table `c` is not on the server"):
        rw.SequenceObserver(place.address, "c", 2)
    with pytest.raises(rw.StructureError, match="table `c` is not on the server"):
        rw.EpisodeObserver(place.address, "c", 2)


SIGNATURE = {"x": ArraySpec((None, 2), np.float32), "y": {"z": ArraySpec((None,), np.int64)}}


@pytest.fixture
def signed(replay_server: Callable[..., HostedServer]) -> Iterator[rw.Client]:
    server = replay_server(
        fifo("signed", signature=SIGNATURE),
        fifo("loose", signature={"x": ArraySpec(None, np.float32), "y": ArraySpec((None, None), np.int64)}),
        fifo("masked", signature=(ArraySpec((None,), np.int64), ArraySpec((None,), bool))),
    )
    with rw.Client(server.address, timeout_s=20) as client:
        yield client


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            {"x": np.zeros(2), "y": {"z": np.int64(1)}},
            "leaf `x`: float64 (2,), but table `signed` holds float32 (2,) in `x` (its signature). "
            "Cast or reshape the leaf.",
        ),
        (
            {"x": np.zeros(2, np.float32), "y": {"z": np.zeros(1, np.int64)}},
            "leaf `y/z`: int64 (1,), but table `signed` holds int64 () in `y/z` (its signature). "
            "Cast or reshape the leaf.",
        ),
        (
            {"x": np.zeros(2, np.float32)},
            "table `signed`: its signature has 2 leaves (x, y/z), the step has 1 (x).",
        ),
    ],
)
def test_step_that_is_not_the_table_s_is_refused_by_leaf_path(signed: rw.Client, step: Any, message: str) -> None:
    with rw.TrajectoryObserver(signed, "signed", 1) as observer:
        for _ in range(2):
            with pytest.raises(rw.StructureError) as refusal:
                observer(step)
            assert str(refusal.value) == message
        observer({"x": np.ones(2, np.float32), "y": {"z": 3}})
    (item,) = read(signed, "signed")
    assert item.data["x"].tolist() == [[1, 1]]
    assert item.data["y"]["z"].tolist() == [3]


def test_signature_may_leave_sizes_open(signed: rw.Client) -> None:
    with rw.TrajectoryObserver(signed, "loose", 1) as observer:
        with pytest.raises(rw.StructureError, match=r"leaf `y`: int64 \(\), but table `loose` holds int64 \(None,\)"):
            observer({"x": np.zeros((2, 3), np.float32), "y": np.int64(1)})
        with pytest.raises(rw.StructureError, match=r"leaf `x`: float64 \(\), but table `loose` holds float32 None"):
            observer({"x": 1.0, "y": np.zeros(5, np.int64)})
        observer({"x": np.zeros((2, 3), np.float32), "y": np.zeros(5, np.int64)})
    assert len(read(signed, "loose")) == 1


def test_mask_is_part_of_what_the_signature_asks_for(signed: rw.Client) -> None:
    with (
        rw.TrajectoryObserver(signed, "masked", 2) as observer,
        pytest.raises(rw.StructureError, match="its signature has 2 leaves"),
    ):
        observer((np.int64(1),))
    with rw.TrajectoryObserver(signed, "masked", 2, mask=True, end_of_episode="cover") as observer:
        observer((np.int64(1),), end_of_episode=True)
    (item,) = read(signed, "masked")
    assert [column.tolist() for column in item.data] == [[1, 0], [True, False]]


# When items are there.


def eventually(true: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_window_is_there_although_its_chunk_is_not_full(place: Place) -> None:
    with observed(place, rw.WindowSpec(2), chunk_length=1000, max_delay_s=0.02) as observer:
        observer({"n": np.int64(1)})
        observer({"n": np.int64(2)})
        assert eventually(lambda: place.client.server_info()["a"].current_size == 1)
        observer({"n": np.int64(3)})
        assert eventually(lambda: place.client.server_info()["a"].current_size == 2)
        assert place.column() == [[1, 2], [2, 3]]


def test_windows_are_there_after_the_end_of_an_episode(place: Place) -> None:
    with observed(place, rw.WindowSpec(2), chunk_length=1000, max_delay_s=1000) as observer:
        feed(observer, [3])
        assert eventually(lambda: observer.stats().acknowledged_items == 2)
        assert place.column() == [[1, 2], [2, 3]]


def test_windows_are_there_after_a_flush(place: Place) -> None:
    with observed(place, rw.WindowSpec(2), chunk_length=1000, max_delay_s=1000) as observer:
        for number in range(1, 4):
            observer({"n": np.int64(number)})
        stats = observer.stats()
        assert (stats.items, stats.acknowledged_items, stats.pending_items) == (2, 0, 2)
        observer.flush()
        stats = observer.stats()
        assert (stats.items, stats.acknowledged_items, stats.pending_items) == (2, 2, 0)
        assert place.client.server_info()["a"].current_size == 2
        observer.flush()
        observer({"n": np.int64(4)})
        observer.flush()
        assert place.column() == [[1, 2], [2, 3], [3, 4]]


# Life and death.


@pytest.mark.parametrize("kind", [rw.TrajectoryObserver, rw.SequenceObserver, rw.EpisodeObserver])
def test_closed_observer_says_so_until_it_is_opened_again(place: Place, kind: Any) -> None:
    observer = kind(place.address, "a", 3)
    observer({"n": np.int64(1)})
    observer.close()
    observer.close()
    for call in (lambda: observer({"n": np.int64(2)}), observer.flush, observer.reset):
        with pytest.raises(rw.ClosedError, match=r"the observer is closed. Call `open\(\)`"):
            call()
    assert observer.stats().dropped_steps == {"reset": 1}
    observer.open()
    observer.open()
    for number in range(2, 5):
        observer({"n": np.int64(number)}, end_of_episode=number == 4)
    observer.flush()
    assert place.column() == [[2, 3, 4]]
    assert (observer.stats().steps, observer.stats().items) == (4, 1)
    observer.close()
    assert (observer.stats().steps, observer.stats().acknowledged_items) == (4, 1)


def test_reopened_observer_asks_for_the_same_structure(place: Place) -> None:
    observer = observed(place, rw.WindowSpec(1))
    feed(observer, [1])
    observer.close()
    observer.open()
    with pytest.raises(rw.StructureError, match="step 1, leaf `n`: float64"):
        observer({"n": np.float64(1)})
    observer.close()


def test_block_closes_the_observer_and_an_own_client_only(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1) as observer:
        feed(observer, [1])
        assert observer.client is place.client
    with pytest.raises(rw.ClosedError):
        observer.flush()
    assert place.column() == [[1]]  # the client is still usable


def test_anything_with_a_server_address_is_a_client(place: Place) -> None:
    class ReverbClient:
        server_address = place.address

    with rw.TrajectoryObserver(ReverbClient(), "a", 1) as observer:
        feed(observer, [2])
    assert place.column() == [[1], [2]]
    with pytest.raises(rw.SpecError, match="`client` must be a Client, an address or a reverb.Client, got int"):
        rw.TrajectoryObserver(8000, "a", 1)


def test_observers_may_share_a_client(place: Place) -> None:
    with observed(place, rw.WindowSpec(1), "a") as one, observed(place, rw.WindowSpec(2), "b") as other:
        feed(one, [2])
        feed(other, [3], first=5)
    assert place.column("a") == [[1], [2]]
    assert place.column("b") == [[5, 6], [6, 7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_length": 0}, "`chunk_length` must be >= 1, got 0"),
        ({"chunk_length": 16384}, "`chunk_length` must be <= 16383, got 16384"),
        ({"chunk_length": 2.5}, "`chunk_length` must be an integer"),
        ({"max_delay_s": 0}, "`max_delay_s` must be > 0 seconds, got 0"),
        ({"timeout_s": -1}, "`timeout_s` must be > 0 seconds, got -1"),
        ({"timeout_s": float("nan")}, "`timeout_s` must be > 0 seconds, got nan"),
        ({"max_in_flight_items": 0}, "`max_in_flight_items` must be >= 1, got 0"),
        ({"max_in_flight_bytes": 0}, "`max_in_flight_bytes` must be >= 1, got 0"),
        ({"on_block": "panic"}, "`on_block` must be 'wait', 'raise' or 'drop_oldest', got 'panic'"),
        ({"end_of_episode": "finish"}, "`end_of_episode` must be one of"),
        ({"tile_end_of_episodes": True}, "Must set `pad_end_of_episodes=True`"),
    ],
)
def test_options_that_cannot_work_are_refused_at_construction(
    place: Place, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rw.SpecError, match=message):
        rw.TrajectoryObserver(place.client, "a", 2, **options)


# Windows over the whole stream of steps.


@pytest.mark.parametrize("period", [None, 1, 3])
def test_spanning_windows_go_on_over_the_ends_of_episodes(place: Place, period: int | None) -> None:
    for spec in specs((1, 3, 4), (1, 2, 5)):
        if spec.end_of_episode is not rw.EndOfEpisode.DROP or (period and spec.sequence_length == 1):
            continue
        with rw.SequenceObserver(place.client, "a", spec.sequence_length, spec.stride_length) as observer:
            feed(observer, [4, 1, 3, 2], after=lambda n, o=observer: period and (n % period or o.flush()))
            observer.flush()
            assert observer.stats().episodes == 4
        assert place.column() == cut(range(1, 11), spec.spanning_windows(10)), spec


def test_spanning_windows_of_tf_agents(place: Place) -> None:
    """Behaviour 1.5: two episodes of four steps."""
    for length, stride, windows in [
        (3, 1, "123 234 345 456 567 678"),
        (3, 2, "123 345 567"),
        (4, 4, "1234 5678"),
    ]:
        with rw.SequenceObserver(place.client, "a", length, stride) as observer:
            feed(observer, [4, 4])
        assert place.column() == [[int(digit) for digit in window] for window in windows.split()]


@pytest.mark.parametrize("mode", MODES)
def test_reset_ends_a_spanning_stream_by_its_mode(place: Place, mode: rw.EndOfEpisode) -> None:
    spec = rw.WindowSpec(3, 3, mode)
    with rw.SequenceObserver(place.client, "a", 3, 3, end_of_episode=mode) as observer:
        feed(observer, [2, 2, 3])
        observer.reset()
        feed(observer, [3], first=8)
        observer.reset(write_cached_steps=False)
    assert place.column() == [
        *cut(range(1, 8), windows_after_reset(spec, 7)),
        [8, 9, 10],
    ]


def test_windows_are_sent_at_the_ends_of_episodes_of_a_spanning_stream(place: Place) -> None:
    with rw.SequenceObserver(place.client, "a", 2, chunk_length=1000, max_delay_s=1000) as observer:
        feed(observer, [3])
        assert eventually(lambda: place.client.server_info()["a"].current_size == 2)


# Whole episodes.


@pytest.mark.parametrize("chunk_length", [None, 1, 3])
def test_episode_is_one_item_of_its_own_length(place: Place, chunk_length: int | None) -> None:
    lengths = [1, 5, 1000, 99, 100, 101]
    with rw.EpisodeObserver(place.client, ["a", "b"], 1000, priority=3, chunk_length=chunk_length) as observer:
        feed(observer, lengths)
    firsts = itertools.accumulate(lengths, initial=1)
    episodes = [list(range(first, first + n)) for first, n in zip(firsts, lengths, strict=False)]
    assert place.column("b") == episodes
    items = read(place.client, "a")
    assert [item.data[0].tolist() for item in items] == episodes
    assert {item.info.priority for item in items} == {3}
    stats = observer.stats()
    assert (stats.steps, stats.episodes, stats.items, stats.dropped_steps) == (sum(lengths), 6, 12, {})


def test_episode_spans_many_chunks_of_large_steps(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 300) as observer:
        for number in range(250):
            observer({"frame": np.full((40, 1000), number % 251, np.uint8)}, end_of_episode=number == 249)
    (item,) = read(place.client, "a")
    assert item.data[0].shape == (250, 40, 1000)
    assert (item.data[0] == np.arange(250, dtype=np.uint8)[:, None, None]).all()


def test_overflow_is_refused_once_and_the_next_episode_is_written(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3) as observer:
        for n, numbers in ((5, range(1, 6)), (4, range(6, 10))):
            refused = 0
            for number in numbers:
                try:
                    observer({"n": np.int64(number)}, end_of_episode=number == numbers[-1])
                except ValueError as error:
                    refused += 1
                    assert "longer than max_sequence_length=3 steps, boundary step included" in str(error)
            assert refused == 1, n
        feed(observer, [3], first=10)
        stats = observer.stats()
        assert (stats.steps, stats.episodes, stats.dropped_steps) == (12, 3, {"overflow": 9})
    assert place.column() == [[10, 11, 12]]


def test_overflow_is_bypassed_counted_and_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        feed(observer, [5, 3, 4, 1])
        assert observer.stats().dropped_steps == {"overflow": 9}
    assert place.column() == [[6, 7, 8], [13]]
    assert len([record for record in caplog.records if "max_sequence_length=3" in record.message]) == 2


@pytest.mark.parametrize("write_cached_steps", [True, False])
def test_reset_ends_an_overflow(place: Place, write_cached_steps: bool) -> None:
    with rw.EpisodeObserver(place.client, "a", 2, bypass_partial_episodes=True) as observer:
        for number in range(1, 5):
            observer({"n": np.int64(number)})
        observer.reset(write_cached_steps)
        feed(observer, [2], first=5)
        assert observer.stats().dropped_steps == {"overflow": 4}
    assert place.column() == [[5, 6]]


def test_overflow_ends_with_the_observer(place: Place) -> None:
    observer = rw.EpisodeObserver(place.client, "a", 2, bypass_partial_episodes=True)
    for number in range(1, 5):
        observer({"n": np.int64(number)})
    observer.close()
    assert observer.stats().dropped_steps == {"overflow": 4}
    observer.open()
    feed(observer, [2], first=5)
    observer.close()
    assert place.column() == [[5, 6]]


def test_step_of_an_overflow_is_checked_too(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 1, bypass_partial_episodes=True) as observer:
        observer({"n": np.int64(1)})
        for _ in range(2):
            with pytest.raises(rw.StructureError, match="step 1, leaf `n`"):
                observer({"n": 0.5})
        observer({"n": np.int64(2)})
        with pytest.raises(rw.StructureError, match="step 2, leaf `n`"):
            observer({"n": 0.5}, end_of_episode=True)
        observer({"n": np.int64(3)}, end_of_episode=True)
        assert observer.stats().dropped_steps == {"overflow": 3}


def test_part_of_an_episode_is_written_or_dropped_at_a_reset(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5) as observer:
        for write in (True, False):
            for number in range(1, 4):
                observer({"n": np.int64(number)})
            observer.reset(write)
            observer.reset(write)
        assert observer.stats().dropped_steps == {"reset": 3}
    assert place.column() == [[1, 2, 3]]


def test_priority_of_episodes_can_be_changed(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5, priority=1) as observer:
        observer.update_priority(2)
        feed(observer, [1])
        observer({"n": np.int64(2)})
        observer.update_priority(3.5)
        for bad in (-1, float("nan")):
            with pytest.raises(rw.SpecError, match="`priority`"):
                observer.update_priority(bad)
        with pytest.raises(rw.SpecError, match="between episodes only"):
            observer.update_priority(lambda episode: episode["n"].sum())
        observer({"n": np.int64(3)}, end_of_episode=True)
        observer.update_priority(lambda episode: episode["n"].sum())
        feed(observer, [2], first=4)
        observer.update_priority(7)
        feed(observer, [1], first=6)
        observer.close()
        observer.open()
        feed(observer, [1], first=7)
    assert [(item.data[0].tolist(), item.info.priority) for item in read(place.client, "a")] == [
        ([1], 2),
        ([2, 3], 3.5),
        ([4, 5], 9),
        ([6], 7),
        ([7], 7),
    ]


def test_function_of_the_whole_episode_is_its_priority(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 500, priority=lambda episode: len(episode["n"])) as observer:
        feed(observer, [3, 250, 1])
    assert [item.info.priority for item in read(place.client, "a")] == [3, 250, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", 0), "`max_sequence_length` must be >= 1, got 0"),
        (("a", 2.0), "`max_sequence_length` must be an integer"),
        (([], 2), "`table_name` must be a name or several different ones, got none"),
        ((["a", "a"], 2), "`table_name` must be a name or several different ones"),
        (("a", 2, -1.0), "`priority` must be a finite number >= 0"),
    ],
)
def test_episode_arguments_that_cannot_work_are_refused(place: Place, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(rw.SpecError, match=message):
        rw.EpisodeObserver(place.client, *arguments)
