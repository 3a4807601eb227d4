"""TF-Agents' trajectory and sequence observers, and ours of the same names, write the same items for the same calls.

Every episode length and every place of a reset is tried with all small numbers; Hypothesis then mixes the calls. The
exceptions, which are TF-Agents' faults, are in `test_tf_agents_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tf_agents.replay_buffers import reverb_utils as theirs

import reverb_writer as rw
from reverb_writer import tf_agents as ours

from .trajectories import Script, Steps, assert_same, labels, play, take

# S > L warns once per process and pair; that is not what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

MODES = {"none": (False, False), "pad": (True, False), "tile": (True, True)}
SMALL = range(1, 6)

MakeObserver = Callable[[Any, Any, str | tuple[str]], Any]  # of a module, a client and a table


def trajectory_observer(length: int, stride: int, mode: str, **options: Any) -> MakeObserver:
    return lambda module, client, table: module.ReverbAddTrajectoryObserver(
        client, table, length, stride, 2.5, *MODES[mode], **(options if module is ours else {})
    )


def sequence_observer(length: int, stride: int, mode: str, **options: Any) -> MakeObserver:
    return lambda module, client, table: module.ReverbTrajectorySequenceObserver(
        client, table, length, stride, 2.5, *MODES[mode], **(options if module is ours else {})
    )


def windows(peer: Any, make: MakeObserver, script: Script, *, nested: bool = True) -> list[str]:
    """Play the script to an observer of each side; compare their items leaf by leaf; return the items' labels."""
    for module, table in ((theirs, "theirs"), (ours, "ours")):
        with closing(make(module, peer, table)) as observer:
            play(observer, script)
    tables = peer.server_info(timeout=60)
    assert tables["ours"].num_episodes == tables["theirs"].num_episodes
    items = take(peer, "theirs", nested=nested)
    assert_same(take(peer, "ours", nested=nested), items)
    return labels(items)


def flushed_at_odd_times(script: Script) -> Script:
    """Insert a flush before every seventh move."""
    return [move for position, move in enumerate(script) for move in (["flush"] if position % 7 == 0 else []) + [move]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_episodes_of_every_length_give_the_same_windows(peer: Any, length: int, stride: int, mode: str) -> None:
    steps = Steps()
    script = [move for n in range(1, length + 2 * stride + 2) for move in steps.episode(n)]
    windows(peer, trajectory_observer(length, stride, mode), flushed_at_odd_times(script))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_resets_after_every_number_of_steps_give_the_same_windows(
    peer: Any, length: int, stride: int, mode: str
) -> None:
    steps = Steps()
    script: Script = []
    for k in range(length + stride + 2):
        script += [*steps.beginning(k), "drop and reset", *steps.episode(1 + k % 3)]
        if mode != "none":  # without padding these are faults a and b
            script += [*steps.beginning(k), "write and reset", *steps.episode(1 + k % 4)]
    windows(peer, trajectory_observer(length, stride, mode), flushed_at_odd_times(script))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_sequences_over_episodes_give_the_same_windows(peer: Any, length: int, stride: int, mode: str) -> None:
    steps = Steps()
    script: Script = []
    for k in range(length + stride + 1):
        for n in (3, 1, 4, 2):
            script += steps.episode(n)
        script += [*steps.beginning(k), "drop and reset", *steps.episode(2)]
        script += [*steps.beginning(k), "write and reset" if mode != "none" else "drop and reset"]
    windows(peer, sequence_observer(length, stride, mode), flushed_at_odd_times(script))


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
@pytest.mark.parametrize("make_observer", [trajectory_observer, sequence_observer])
@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(list(MODES)),
    moves=st.lists(MOVES),
    options=OPTIONS,
)
def test_any_calls_in_any_order_give_the_same_windows(
    peer: Any,
    make_observer: Any,
    numbers: tuple[int, int],
    mode: str,
    moves: list[tuple[str, int]],
    options: dict[str, Any],
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
    windows(peer, make_observer(*numbers, mode, **options), script)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_observer", [trajectory_observer, sequence_observer])
@pytest.mark.parametrize(("length", "stride"), [(20, 1), (20, 10), (20, 20), (20, 30), (33, 7), (7, 3), (1, 1)])
def test_long_episodes_give_the_same_windows(
    peer: Any, make_observer: Any, length: int, stride: int, mode: str
) -> None:
    steps = Steps()
    script = [step for n in (5, 300, 19, 20, 21, 47, 1, 120) for step in steps.episode(n)]
    windows(peer, make_observer(length, stride, mode), script)


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
    assert windows(peer, trajectory_observer(length, stride, mode), Steps().episode(4)) == expected


# What a step may be


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_policy_info_stays_empty(peer: Any, mode: str) -> None:
    steps = Steps(nested=False)
    script = [*steps.episode(6), *steps.beginning(2), "drop and reset", *steps.episode(2)]
    windows(peer, trajectory_observer(4, 2, mode), script, nested=False)


def viewed(step: Any) -> Any:
    camera = np.repeat(step.observation["camera"], 2, axis=1)[:, ::-2]
    return step._replace(observation={**step.observation, "camera": camera.transpose(2, 1, 0)})


def in_python(step: Any) -> Any:
    info = {"log_prob": -1.0, "logits": step.policy_info["logits"]}
    return step._replace(action=(7, 0.5), policy_info=info, reward=3)


KINDS: dict[str, Callable[[Any, Any], Any]] = {  # of a step and a module
    "our own trajectory": lambda step, module: rw.Trajectory(**step._asdict()) if module is ours else step,
    "views of arrays": lambda step, _: viewed(step),
    "numbers of Python": lambda step, _: in_python(step),
    "tensors": lambda step, _: tf.nest.map_structure(tf.constant, step),
}


@pytest.mark.parametrize(
    ("kind", "mode"),  # TF-Agents refuses its own padding of numbers of Python
    [(kind, mode) for kind in KINDS for mode in MODES if kind != "numbers of Python" or mode == "none"],
)
def test_steps_of_this_kind_give_the_same_windows(peer: Any, kind: str, mode: str) -> None:
    for module, table in ((theirs, "theirs"), (ours, "ours")):
        steps = Steps()
        with closing(trajectory_observer(4, 1, mode)(module, peer, table)) as observer:
            play(observer, [KINDS[kind](step, module) for step in steps.episode(6) + steps.episode(2)])
    items = take(peer, "theirs")
    assert items
    assert_same(take(peer, "ours"), items)


@pytest.mark.parametrize("mode", MODES)
def test_arrays_that_the_environment_uses_again_are_copied(peer: Any, mode: str) -> None:
    script = Steps().episode(6)

    def play_in_place(observer: Any) -> None:
        camera = np.empty_like(script[0].observation["camera"])
        for step in script:
            camera[...] = step.observation["camera"]
            observer(step._replace(observation={**step.observation, "camera": camera}))
        observer.flush()

    for module, table in ((theirs, "theirs"), (ours, "ours")):
        with closing(trajectory_observer(4, 1, mode)(module, peer, table)) as observer:
            play_in_place(observer)
    items = take(peer, "theirs")
    assert items
    assert_same(take(peer, "ours"), items)


def test_a_padded_window_is_this_field_by_field(peer: Any) -> None:
    script = Steps().episode(3)
    with closing(ours.ReverbAddTrajectoryObserver(peer, "ours", 4, pad_end_of_episodes=True)) as observer:
        play(observer, script)
    (item,) = take(peer, "ours")
    window = item.window
    assert window.step_type.tolist() == [0, 1, 2, 2]
    assert window.next_step_type.tolist() == [1, 2, 0, 0]
    assert window.observation["number"].tolist() == [1, 2, 3, 0]
    assert window.observation["touch"].tolist() == [[False, True], [True, True], [False, True], [False, False]]
    assert window.reward.tolist() == [1, 2, 0, 0]
    assert window.discount.tolist() == [1, 0, 1, 0]
    assert (window.step_type.dtype, window.reward.dtype, window.observation["camera"].dtype) == ("i4", "f4", "u1")


@pytest.mark.parametrize("mode", MODES)
def test_strings_give_the_same_windows(peer: Any, mode: str) -> None:
    def with_strings(step: Any) -> Any:
        name = b"x" * int(step.observation["number"])
        strings = (np.array(name, object), np.array([name, b""], object))
        return step._replace(policy_info=strings)

    script = [with_strings(step) for step in Steps().episode(4) + Steps().episode(2)]
    found = []
    for module, table in ((theirs, "theirs"), (ours, "ours")):
        with closing(module.ReverbAddTrajectoryObserver(peer, table, 3, 1, 1, *MODES[mode])) as observer:
            play(observer, script)
        found.append([[column.tolist() for column in item.columns] for item in take(peer, table)])
    assert found[0]
    assert found[0] == found[1]


# Several tables


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make_observer", [trajectory_observer, sequence_observer])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (3, 2), (4, 1), (2, 3)])
def test_every_table_of_a_list_gets_every_window(
    peer: Any, make_observer: Any, length: int, stride: int, mode: str
) -> None:
    steps = Steps()
    script = [*steps.episode(6), *steps.episode(2), *steps.beginning(5), "flush", "drop and reset", *steps.episode(3)]
    make = make_observer(length, stride, mode)
    for module, tables in ((theirs, ("theirs", "theirs_too")), (ours, ("ours", "ours_too"))):
        with closing(make(module, peer, tables)) as observer:
            play(observer, script)
    expected = take(peer, "theirs")
    assert expected
    for table in ("theirs_too", "ours", "ours_too"):
        assert_same(take(peer, table), expected)


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
    for suffix, (length, stride, mode) in kinds.items():
        table = f"theirs{suffix}"
        with closing(theirs.ReverbAddTrajectoryObserver(peer, table, length, stride, 1, *MODES[mode])) as observer:
            play(observer, script)
        expected = take(peer, table)
        assert expected
        assert_same(take(peer, f"ours{suffix}"), expected)
