"""Episodes and vectors: the items of TF-Agents' observers, whatever the calls."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tf_agents.replay_buffers import reverb_utils as theirs

import reverb_writer as rw
from reverb_writer import tf_agents as ours

from .trajectories import Item, Script, Steps, assert_same, labels, play, take

SIDES = [(theirs, "theirs"), (ours, "ours")]


def episodes(peer: Any, script: Script, max_sequence_length: int, *, bypass: bool = False) -> list[str]:
    """Play the script to an observer of each side, compare the items leaf by leaf, and return their labels."""
    for module, table in SIDES:
        with closing(module.ReverbAddEpisodeObserver(peer, table, max_sequence_length, 1.5, bypass)) as observer:
            play(observer, script)
    items = take(peer, "theirs")
    assert_same(take(peer, "ours"), items)
    return labels(items)


def test_episodes_up_to_the_maximum_are_an_item_each(peer: Any) -> None:
    steps = Steps()
    script = [move for n in range(1, 6) for move in steps.episode(n)]
    assert episodes(peer, script, 5) == ["1B", "2 3B", "4 5 6B", "7 8 9 10B", "11 12 13 14 15B"]


MOVES = st.one_of(
    st.tuples(st.just("episode"), st.integers(1, 7)),
    st.tuples(st.just("beginning"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["flush", "drop and reset", "write and reset", "reopen"]), st.just(0)),
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(MOVES))
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
    episodes(peer, script, most, bypass=True)


def test_priorities_change_with_the_next_item(peer: Any) -> None:
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
    for module, tables in ((theirs, ["theirs", "theirs_too"]), (ours, ["ours", "ours_too"])):
        steps = Steps()
        with closing(module.ReverbAddEpisodeObserver(peer, tables, 5)) as observer:
            play(observer, steps.episode(3) + steps.episode(5))
    expected = take(peer, "theirs")
    assert labels(expected) == ["1 2 3B", "4 5 6 7 8B"]
    for table in ("theirs_too", "ours", "ours_too"):
        assert_same(take(peer, table), expected)


@pytest.mark.parametrize("max_sequence_length", [0, -1])
def test_a_maximum_below_one_is_refused(peer: Any, max_sequence_length: int) -> None:
    for module, table in SIDES:
        with pytest.raises(ValueError, match="max_sequence_length"):
            module.ReverbAddEpisodeObserver(peer, table, max_sequence_length)


pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

MODES = {"drop": (False, False), "pad": (True, False), "tile": (True, True)}
ENV = 1000


def streams(lengths: list[list[int]]) -> list[list[Any]]:
    """Make one stream of episodes an environment, all as long as the shortest one."""
    envs = []
    for env_id, episodes in enumerate(lengths):
        steps = Steps(first=ENV * env_id + 1)
        envs.append([step for n in episodes for step in steps.episode(n)])
    num_steps = min(map(len, envs))
    return [env_id[:num_steps] for env_id in envs]


def by_env(items: list[Item]) -> dict[int, list[Item]]:
    envs: dict[int, list[Item]] = {}
    for item in items:
        envs.setdefault(int(item.window.observation["number"].max()) // ENV, []).append(item)
    return envs


def expected_items(peer: Any, envs: list[list[Any]], *arguments: Any) -> dict[int, list[Item]]:
    for env_id in envs:
        with closing(theirs.ReverbAddTrajectoryObserver(peer, "theirs", *arguments)) as observer:
            play(observer, env_id)
    return by_env(take(peer, "theirs"))


def assert_same_envs(items: list[Item], expected: dict[int, list[Item]]) -> None:
    found = by_env(items)
    assert found.keys() == expected.keys()
    for env_id, env_items in found.items():
        assert_same(env_items, expected[env_id])


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    mode=st.sampled_from(list(MODES)),
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    chunk_length=st.none() | st.integers(1, 9),
)
def test_each_env_gives_the_windows_of_an_observer_of_its_own(
    peer: Any, numbers: tuple[int, int], mode: str, lengths: list[list[int]], chunk_length: int | None
) -> None:
    envs = streams(lengths)
    expected = expected_items(peer, envs, *numbers, 1.0, *MODES[mode])
    observer = rw.TrajectoryObserver(
        peer, "ours", *numbers, num_envs=len(envs), end_of_episode=mode, chunk_length=chunk_length
    )
    with closing(observer):
        for steps in zip(*envs, strict=True):
            observer(tree.map_structure(lambda *leaves: np.stack(leaves), *steps))
    assert_same_envs(take(peer, "ours"), expected)
