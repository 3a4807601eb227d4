"""TF-Agents' observers, and ours of the same names, write the same items for the same calls.

Every episode length and every place of a reset is tried with all small numbers; Hypothesis then mixes the calls. The
exceptions, which are TF-Agents' faults, are in `test_tf_agents_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tree
from hypothesis import given, settings
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer import tf_agents as ours

from .trajectories import (
    EPISODES,
    MODES,
    SEQUENCES,
    SIDES,
    TRAJECTORIES,
    Script,
    Steps,
    assert_same,
    play,
    play_both,
    take,
)

# S > L warns once per process and pair; that is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

SMALL = range(1, 6)
PRIORITY = 2.5


def episodes_of_every_length(length: int, stride: int, _: str) -> Iterator[Any]:
    steps = Steps()
    for n in range(1, length + 2 * stride + 2):
        yield from steps.episode(n)


def resets_after_every_number_of_steps(length: int, stride: int, mode: str) -> Iterator[Any]:
    steps = Steps()
    for k in range(length + stride + 2):
        yield from (*steps.beginning(k), "drop and reset", *steps.episode(1 + k % 3))
        if mode != "none":  # without padding these are faults a and b
            yield from (*steps.beginning(k), "write and reset", *steps.episode(1 + k % 4))


def sequences_over_episodes(length: int, stride: int, mode: str) -> Iterator[Any]:
    steps = Steps()
    for k in range(length + stride + 1):
        for n in (3, 1, 4, 2):
            yield from steps.episode(n)
        yield from (*steps.beginning(k), "drop and reset", *steps.episode(2))
        yield from (*steps.beginning(k), "write and reset" if mode != "none" else "drop and reset")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
@pytest.mark.parametrize(
    ("name", "moves"),
    [
        (TRAJECTORIES, episodes_of_every_length),
        (TRAJECTORIES, resets_after_every_number_of_steps),
        (SEQUENCES, sequences_over_episodes),
    ],
)
def test_all_small_numbers_give_the_same_windows(
    peer: Any, name: str, moves: Callable[..., Iterator[Any]], length: int, stride: int, mode: str
) -> None:
    script: Script = []
    for position, move in enumerate(moves(length, stride, mode)):
        script += ["flush", move] if position % 7 == 0 else [move]
    play_both(peer, name, script, length, stride, PRIORITY, *MODES[mode])


MOVES = st.one_of(
    st.tuples(st.sampled_from(["episode", "beginning"]), st.integers(1, 9)),
    st.tuples(st.sampled_from(["flush", "drop and reset", "write and reset", "reopen", "close and reset"]), st.just(0)),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "chunk_length": st.integers(1, 12),
        "max_delay_s": st.just(1e-3),  # so windows are sent in mid-episode
        "max_in_flight_items": st.integers(1, 5),
    },
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [TRAJECTORIES, SEQUENCES])
@settings(max_examples=150, derandomize=True)
@given(
    numbers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(list(MODES)),
    moves=st.lists(MOVES),
    options=OPTIONS,
)
def test_any_calls_in_any_order_give_the_same_windows(
    peer: Any, name: str, numbers: tuple[int, int], mode: str, moves: list[tuple[str, int]], options: dict[str, Any]
) -> None:
    steps = Steps()
    script: Script = []
    writable = mode != "none"  # `write and reset`: without padding faults a and b, and after `open` a fault of its own
    for move, n in moves:
        if n:
            script += steps.episode(n) if move == "episode" else steps.beginning(n)
            writable = mode != "none"
        elif move == "reopen":
            script += ["close", "open"]
            writable = False
        elif move == "close and reset":
            script += ["close", "drop and reset"]
        elif writable or move != "write and reset":
            script.append(move)
    play_both(peer, name, script, *numbers, PRIORITY, *MODES[mode], **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [TRAJECTORIES, SEQUENCES])
@pytest.mark.parametrize(("length", "stride"), [(20, 1), (20, 10), (20, 20), (20, 30), (33, 7), (7, 3), (1, 1)])
def test_long_episodes_give_the_same_windows(peer: Any, name: str, length: int, stride: int, mode: str) -> None:
    steps = Steps()
    script = [step for n in (5, 300, 19, 20, 21, 47, 1, 120) for step in steps.episode(n)]
    play_both(peer, name, script, length, stride, PRIORITY, *MODES[mode])


# Worked by hand from the descriptions: the comparison above is not one of two empty lists.


@pytest.mark.parametrize(
    ("length", "stride", "mode", "expected"),
    [
        (2, 1, "none", ["1 2", "2 3", "3 4B"]),
        (4, 2, "none", ["1 2 3 4B"]),
        (5, 1, "pad", ["1 2 3 4B P"]),
        (3, 2, "pad", ["1 2 3"]),
        (3, 1, "tile", ["1 2 3", "2 3 4B", "3 4B P", "4B P P"]),
        (3, 2, "tile", ["1 2 3", "3 4B P"]),
    ],
)
def test_the_windows_of_a_four_step_episode_are_these(
    peer: Any, length: int, stride: int, mode: str, expected: list[str]
) -> None:
    assert play_both(peer, TRAJECTORIES, Steps().episode(4), length, stride, 1, *MODES[mode]) == expected


def test_a_padded_window_is_this_field_by_field(peer: Any) -> None:
    with closing(ours.ReverbAddTrajectoryObserver(peer, "ours", 4, pad_end_of_episodes=True)) as observer:
        play(observer, Steps().episode(3))
    (item,) = take(peer, "ours")
    window = item.window
    assert window.step_type.tolist() == [0, 1, 2, 2]
    assert window.next_step_type.tolist() == [1, 2, 0, 0]
    assert window.observation["number"].tolist() == [1, 2, 3, 0]
    assert window.observation["touch"].tolist() == [[False, True], [True, True], [False, True], [False, False]]
    assert window.reward.tolist() == [1, 2, 0, 0]
    assert window.discount.tolist() == [1, 0, 1, 0]
    assert (window.step_type.dtype, window.reward.dtype, window.observation["camera"].dtype) == ("i4", "f4", "u1")


# What a step may be


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_policy_info_stays_empty(peer: Any, mode: str) -> None:
    steps = Steps(nested=False)
    script = [*steps.episode(6), *steps.beginning(2), "drop and reset", *steps.episode(2)]
    play_both(peer, TRAJECTORIES, script, 4, 2, 1, *MODES[mode], nested=False)


CAMERA = np.empty((2, 3, 1), np.uint8)


def with_camera(step: Any, camera: Any) -> Any:
    return step._replace(observation={**step.observation, "camera": camera})


def viewed(step: Any, _: Any) -> Any:
    return with_camera(step, np.repeat(step.observation["camera"], 2, axis=1)[:, ::-2].transpose(2, 1, 0))


def in_place(step: Any, _: Any) -> Any:
    CAMERA[...] = step.observation["camera"]
    return with_camera(step, CAMERA)


def in_python(step: Any, _: Any) -> Any:
    info = {"log_prob": -1.0, "logits": step.policy_info["logits"]}
    return step._replace(action=(7, 0.5), policy_info=info, reward=3)


def with_strings(step: Any, _: Any) -> Any:
    name = b"x" * int(step.observation["number"])
    return step._replace(policy_info=(np.array(name, object), np.array([name, b""], object)))


KINDS: dict[str, Callable[[Any, Any], Any]] = {  # of a step and a module
    "our own trajectory": lambda step, module: rw.Trajectory(**step._asdict()) if module is ours else step,
    "views of arrays": viewed,
    "an array that the environment uses again": in_place,
    "numbers of Python": in_python,
    "strings": with_strings,
    "tensors": lambda step, _: tf.nest.map_structure(tf.constant, step),
}


@pytest.mark.parametrize(
    ("kind", "mode"),  # TF-Agents refuses its own padding of numbers of Python
    [(kind, mode) for kind in KINDS for mode in MODES if kind != "numbers of Python" or mode == "none"],
)
def test_steps_of_this_kind_give_the_same_windows(peer: Any, kind: str, mode: str) -> None:
    def script(module: Any) -> Iterator[Any]:
        steps = Steps()
        return (KINDS[kind](step, module) for step in steps.episode(6) + steps.episode(2))

    assert play_both(peer, TRAJECTORIES, script, 4, 1, 1, *MODES[mode])


# Several tables


TWO_TABLES = [(module, (table, f"{table}_too")) for module, table in SIDES]


def assert_same_in_all_tables(peer: Any) -> None:
    expected = take(peer, "theirs")
    assert expected
    for table in ("theirs_too", "ours", "ours_too"):
        assert_same(take(peer, table), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [TRAJECTORIES, SEQUENCES])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (3, 2), (4, 1), (2, 3)])
def test_every_table_of_a_list_gets_every_window(peer: Any, name: str, length: int, stride: int, mode: str) -> None:
    steps = Steps()
    script = [*steps.episode(6), *steps.episode(2), *steps.beginning(5), "flush", "drop and reset", *steps.episode(3)]
    for module, tables in TWO_TABLES:
        with closing(getattr(module, name)(peer, tables, length, stride, PRIORITY, *MODES[mode])) as observer:
            play(observer, script)
    assert_same_in_all_tables(peer)


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_several_lengths_from_one_observer_are_the_windows_of_several_observers(
    peer: Any, first: str, second: str
) -> None:
    steps = Steps()
    script = [*steps.episode(6), *steps.episode(2), *steps.beginning(5), "flush", "drop and reset", *steps.episode(30)]
    kinds = {"": (2, 1, first), "_too": (7, 3, second)}
    specs = {
        f"ours{suffix}": rw.WindowSpec(length, stride, "drop" if mode == "none" else mode)
        for suffix, (length, stride, mode) in kinds.items()
    }
    with closing(rw.TrajectoryObserver(peer, windows=specs)) as observer:
        play(observer, script)
    theirs, _ = SIDES[0]
    for suffix, (length, stride, mode) in kinds.items():
        table = f"theirs{suffix}"
        with closing(theirs.ReverbAddTrajectoryObserver(peer, table, length, stride, 1, *MODES[mode])) as observer:
            play(observer, script)
        expected = take(peer, table)
        assert expected
        assert_same(take(peer, f"ours{suffix}"), expected)


# Whole episodes


def test_episodes_up_to_the_maximum_are_an_item_each(peer: Any) -> None:
    steps = Steps()
    script = [move for n in range(1, 6) for move in steps.episode(n)]
    assert play_both(peer, EPISODES, script, 5, 1.5) == ["1B", "2 3B", "4 5 6B", "7 8 9 10B", "11 12 13 14 15B"]


EPISODE_MOVES = st.one_of(
    st.tuples(st.just("episode"), st.integers(1, 7)),
    st.tuples(st.just("beginning"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["flush", "drop and reset", "write and reset", "reopen"]), st.just(0)),
)


@settings(max_examples=60, derandomize=True)
@given(moves=st.lists(EPISODE_MOVES))
def test_any_calls_in_any_order_give_the_same_episodes(peer: Any, moves: list[tuple[str, int]]) -> None:
    steps = Steps()
    script: Script = []
    num_cached, most = 0, 4
    for move, n in moves:
        if n:
            script += steps.episode(n) if move == "episode" else steps.beginning(n)
            num_cached = 0 if move == "episode" else num_cached + n
        elif move == "reopen":
            script += ["close", "open", "drop and reset"]  # TF-Agents goes on counting if it is opened alone
            num_cached = 0
        elif move != "write and reset" or 0 < num_cached <= most:  # of too few or too many steps it is fault d
            script.append(move)
            num_cached = 0 if "reset" in move else num_cached
    play_both(peer, EPISODES, script, most, 1.5, True)


def test_priorities_of_episodes_change_with_the_next_item(peer: Any) -> None:
    for module, table in SIDES:
        steps = Steps()
        with closing(module.ReverbAddEpisodeObserver(peer, table, 5, priority=3)) as observer:
            play(observer, steps.episode(2))
            play(observer, steps.beginning(1))
            observer.update_priority(0.25)
            play(observer, steps.episode(2) + steps.episode(1))
    items = take(peer, "theirs")
    assert [item.priority for item in items] == [3, 0.25, 0.25]
    assert_same(take(peer, "ours"), items)


def test_every_table_of_a_list_gets_every_episode(peer: Any) -> None:
    for module, tables in TWO_TABLES:
        steps = Steps()
        with closing(module.ReverbAddEpisodeObserver(peer, list(tables), 5)) as observer:
            play(observer, steps.episode(3) + steps.episode(5))
    assert_same_in_all_tables(peer)


@pytest.mark.parametrize("max_sequence_length", [0, -1])
def test_a_maximum_below_one_is_refused(peer: Any, max_sequence_length: int) -> None:
    for module, table in SIDES:
        with pytest.raises(ValueError, match="max_sequence_length"):
            module.ReverbAddEpisodeObserver(peer, table, max_sequence_length)


# Many environments: each gives the windows of an observer of its own.


ENV = 1000


@settings(max_examples=100, derandomize=True)
@given(
    numbers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(list(MODES)),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    chunk_length=st.none() | st.integers(1, 9),
)
def test_each_env_gives_the_windows_of_an_observer_of_its_own(
    peer: Any, numbers: tuple[int, int], mode: str, lengths: list[list[int]], chunk_length: int | None
) -> None:
    sources = [Steps(first=ENV * env + 1) for env in range(len(lengths))]
    streams = [[s for n in own for s in source.episode(n)] for source, own in zip(sources, lengths, strict=True)]
    num_steps = min(map(len, streams))
    end = "drop" if mode == "none" else mode
    options: dict[str, Any] = {"num_envs": len(streams), "end_of_episode": end, "chunk_length": chunk_length}
    with closing(rw.TrajectoryObserver(peer, "ours", *numbers, **options)) as observer:
        for steps in zip(*(stream[:num_steps] for stream in streams), strict=True):
            observer(tree.map_structure(lambda *leaves: np.stack(leaves), *steps))
    found = take(peer, "ours")
    theirs, _ = SIDES[0]
    for env, stream in enumerate(streams):
        with closing(theirs.ReverbAddTrajectoryObserver(peer, "theirs", *numbers, 1.0, *MODES[mode])) as one:
            play(one, stream[:num_steps])
        own = [item for item in found if int(item.window.observation["number"].max()) // ENV == env]
        assert_same(own, take(peer, "theirs"))
