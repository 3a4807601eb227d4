"""TF-Agents' observers, and ours of the same names, write the same items for the same calls.

Every episode length and every place of a reset is tried with all small numbers; Hypothesis then mixes the calls. The
exceptions, which are TF-Agents' faults, are in `test_tf_agents_faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer import tf_agents as ours

from .trajectories import (
    EPISODES,
    MODES,
    SEQUENCES,
    TRAJECTORIES,
    Script,
    Steps,
    play_both,
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


# Worked by hand from the descriptions: the comparison above is not one of two empty lists.


# What a step may be


def in_python(step: Any, _: Any) -> Any:
    info = {"log_prob": -1.0, "logits": step.policy_info["logits"]}
    return step._replace(action=(7, 0.5), policy_info=info, reward=3)


KINDS: dict[str, Callable[[Any, Any], Any]] = {  # of a step and a module
    "our own trajectory": lambda step, module: rw.Trajectory(**step._asdict()) if module is ours else step,
    "numbers of Python": in_python,
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
