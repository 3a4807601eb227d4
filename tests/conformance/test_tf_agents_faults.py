"""TF-Agents' faults are not ours, and each argument that it refuses is refused."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import reverb
import tensorflow as tf
from reading import fifo
from server_process import StartServer
from tf_agents.replay_buffers import reverb_utils as theirs

from reverb_writer import tf_agents as ours
from reverb_writer.errors import SpecError, StructureError

from .trajectories import OBSERVERS, SIDES, Steps, assert_same, labels, play, step, take

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

SMALL = range(1, 5)
WINDOWED = OBSERVERS[:2]
NOT_ENOUGH = (
    "write_cached_steps is True, but not enough steps remain in the cache to write an item with sequence_length={}"
)


def windows(k: int, length: int, stride: int) -> list[str]:
    """Label the regular windows of `k` steps numbered from 1."""
    return [" ".join(map(str, range(end - length + 1, end + 1))) for end in range(length, k + 1, stride)]


# a and b: reset(write_cached_steps=True) without padding


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("flush", [[], ["flush"]])
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_a_an_aligned_last_window_is_never_written_twice(
    peer: Any, length: int, stride: int, flush: list[str], name: str
) -> None:
    for k in range(length, length + 3 * stride + 1, stride):
        script = [*Steps().beginning(k), *flush, "write and reset"]
        with closing(getattr(theirs, name)(peer, "theirs", length, stride)) as observer:
            play(observer, script)
        with closing(getattr(ours, name)(peer, "ours", length, stride)) as observer:
            play(observer, script)
        expected = windows(k, length, stride)
        assert labels(take(peer, "theirs")) == [*expected, expected[-1]]
        assert labels(take(peer, "ours")) == expected


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("flush", [[], ["flush"]])
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_b_a_last_window_off_the_stride_is_written_not_refused(
    peer: Any, length: int, stride: int, flush: list[str], name: str
) -> None:
    for k in (k for k in range(length, length + 2 * stride) if (k - length) % stride):
        steps = Steps()
        start, episode = steps.beginning(k), steps.episode(length)
        with closing(getattr(theirs, name)(peer, "theirs", length, stride)) as observer:
            play(observer, start)
            with pytest.raises(ValueError, match=NOT_ENOUGH.format(length)):
                observer.reset(write_cached_steps=True)
        with closing(getattr(ours, name)(peer, "ours", length, stride)) as observer:
            play(observer, [*start, *flush, "write and reset", *episode])
        assert labels(take(peer, "theirs")) == windows(k, length, stride)
        last = " ".join(map(str, range(k - length + 1, k + 1)))
        following = " ".join(map(str, range(k + 1, k + length + 1))) + "B"
        assert labels(take(peer, "ours")) == [*windows(k, length, stride), last, following]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("length", range(2, 6))
def test_b_too_few_steps_are_refused_and_the_episode_goes_on(peer: Any, length: int, name: str) -> None:
    for k in range(1, length):
        steps = Steps()
        start, rest = steps.beginning(k), steps.episode(length + 1)
        for module, table in SIDES:
            with closing(getattr(module, name)(peer, table, length)) as observer:
                play(observer, start)  # which flushes
                with pytest.raises(
                    ValueError, match=NOT_ENOUGH.format(length) + ", consider enabling pad_end_of_episodes"
                ):
                    observer.reset(write_cached_steps=True)
                play(observer, rest)
        assert_same(take(peer, "ours"), take(peer, "theirs"))


@pytest.mark.parametrize("name", WINDOWED)
def test_b_with_nothing_cached_nothing_is_written_or_refused(peer: Any, name: str) -> None:
    for module, table in SIDES:
        with closing(getattr(module, name)(peer, table, 3)) as observer:
            play(
                observer,
                ["write and reset", "write and reset", *Steps().beginning(3), "drop and reset", "write and reset"],
            )
        assert labels(take(peer, table)) == ["1 2 3"]


# c: what padding loses


@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_c_what_padding_drops_is_counted(peer: Any, length: int, stride: int) -> None:
    for n in range(1, length + 2 * stride + 1):
        script, dropped = Steps().episode(n), dict[str, int]()
        for module, table in SIDES:
            with closing(
                module.ReverbAddTrajectoryObserver(peer, table, length, stride, pad_end_of_episodes=True)
            ) as observer:
                play(observer, script)
                dropped = {} if module is theirs else observer.stats().dropped_steps
        items = take(peer, "theirs")
        assert_same(take(peer, "ours"), items)
        covered = {number for item in items for number in item.window.observation["number"].tolist()} - {0}
        assert sum(dropped.values()) == n - len(covered), dropped


# d: the episode observer after an overflow


def test_d_a_bypassed_episode_leaves_the_observer_usable(peer: Any) -> None:
    steps = Steps()
    overflow = steps.episode(4)
    with closing(theirs.ReverbAddEpisodeObserver(peer, "theirs", 3, bypass_partial_episodes=True)) as observer:
        play(observer, overflow)
        with pytest.raises(ValueError, match="trajectory must not be empty"):
            observer.reset(write_cached_steps=True)
    with closing(ours.ReverbAddEpisodeObserver(peer, "ours", 3, bypass_partial_episodes=True)) as observer:
        play(observer, [*overflow, "write and reset", *steps.episode(3)])
        assert observer.stats().dropped_steps == {"overflow": 4}
    assert labels(take(peer, "theirs")) == []
    assert labels(take(peer, "ours")) == ["5 6 7B"]


def play_on(observer: Any, script: list[Any]) -> list[int]:
    """Play, whatever is raised, and return the numbers of the steps that were refused."""
    refused = []
    for one in script:
        try:
            observer(one)
        except ValueError:
            refused.append(int(one.observation["number"]))
    observer.flush()
    return refused


@pytest.mark.parametrize(
    ("n", "their_items", "our_items", "num_dropped"),
    [
        # The refused step is the boundary step itself, so TF-Agents waits for the next one, and loses a good episode.
        (4, ["8 9B"], ["5 6 7B", "8 9B"], 4),
        # The refused step is in mid-episode: both go on with the next episode.
        (6, ["7 8 9B", "10 11B"], ["7 8 9B", "10 11B"], 6),
    ],
)
def test_d_after_a_refused_step_the_next_episode_is_written(
    peer: Any, n: int, their_items: list[str], our_items: list[str], num_dropped: int
) -> None:
    steps = Steps()
    script = steps.episode(n) + steps.episode(3) + steps.episode(2)
    with closing(theirs.ReverbAddEpisodeObserver(peer, "theirs", 3)) as observer:
        assert play_on(observer, script) == [4]
    with closing(ours.ReverbAddEpisodeObserver(peer, "ours", 3)) as observer:
        assert play_on(observer, script) == [4]
        assert observer.stats().dropped_steps == {"overflow": num_dropped}
    assert labels(take(peer, "theirs")) == their_items
    assert labels(take(peer, "ours")) == our_items


# Not faults of the list: TF-Agents writes what is no window of any step


@pytest.mark.parametrize("name", WINDOWED)
def test_an_opened_observer_has_nothing_to_write(peer: Any, name: str) -> None:
    script = [*Steps().beginning(2), "close", "open", "write and reset"]
    for module, table in SIDES:
        with closing(getattr(module, name)(peer, table, 3, pad_end_of_episodes=True)) as observer:
            play(observer, script)
    assert labels(take(peer, "theirs")) == ["P P P"]
    assert labels(take(peer, "ours")) == []


def test_an_opened_episode_observer_has_nothing_cached(peer: Any) -> None:
    steps = Steps()
    script = [*steps.beginning(2), "close", "open", *steps.episode(3)]
    with (
        closing(theirs.ReverbAddEpisodeObserver(peer, "theirs", 3)) as observer,
        pytest.raises(ValueError, match="exceeds"),
    ):
        play(observer, script)
    with closing(ours.ReverbAddEpisodeObserver(peer, "ours", 3)) as observer:
        play(observer, script)
    assert labels(take(peer, "ours")) == ["3 4 5B"]


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_unknown_table_is_refused_at_construction(peer: Any, name: str) -> None:
    observer = getattr(theirs, name)(peer, "nowhere", 3)
    with pytest.raises(RuntimeError, match="table nowhere was not found"):
        play(observer, Steps().episode(3))
    with pytest.raises(RuntimeError, match="table nowhere was not found"):
        observer.close()
    with pytest.raises(StructureError, match=r"`nowhere`.*ours.*theirs"):
        getattr(ours, name)(peer, ["ours", "nowhere"], 3)


def test_a_table_named_twice_is_refused(peer: Any) -> None:
    with closing(theirs.ReverbAddTrajectoryObserver(peer, ["theirs", "theirs"], 2)) as observer:
        play(observer, Steps().beginning(2))
    assert labels(take(peer, "theirs")) == ["1 2", "1 2"]
    with pytest.raises(SpecError, match="several different ones"):
        ours.ReverbAddTrajectoryObserver(peer, ["ours", "ours"], 2)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_sequence_length_below_one_is_refused(peer: Any, name: str) -> None:
    with (
        closing(getattr(theirs, name)(peer, "theirs", 0)) as observer,
        pytest.raises(ValueError, match="None data references"),
    ):
        play(observer, Steps().beginning(2))
    for length in (0, -1, 2.5):
        with pytest.raises(SpecError, match="`sequence_length` must be"):
            getattr(ours, name)(peer, "ours", length)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_stride_length_below_one_is_refused(peer: Any, name: str) -> None:
    with closing(getattr(theirs, name)(peer, "theirs", 2, 0)) as observer, pytest.raises(ZeroDivisionError):
        play(observer, Steps().beginning(2))
    with closing(getattr(theirs, name)(peer, "theirs", 2, -1)) as observer:
        play(observer, Steps().beginning(2))
    assert len(take(peer, "theirs")) == 1
    for stride in (0, -1, 1.5):
        with pytest.raises(SpecError, match="`stride_length` must be"):
            getattr(ours, name)(peer, "ours", 2, stride)


@pytest.fixture(scope="module")
def signed(start_reverb: StartServer) -> str:
    """The address of a server whose table asks for other steps: rewards of float64, velocities of two numbers."""
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *np.shape(leaf)], np.asarray(leaf).dtype), step(0))
    spec.observation["joints"]["velocity"] = tf.TensorSpec([None, 2], tf.float32)
    return start_reverb(fifo("signed", signature=spec._replace(reward=tf.TensorSpec([None], tf.float64)))).address


def test_a_step_that_does_not_fit_the_table_is_refused_by_leaf_path(signed: str) -> None:
    client = reverb.Client(signed)
    with closing(theirs.ReverbAddTrajectoryObserver(client, "signed", 2)) as observer:
        play(observer, Steps().beginning(2))
    assert client.server_info(timeout=60)["signed"].current_size == 1  # for the learner to find
    client.reset("signed")
    good = Steps().beginning(3)
    velocity, reward = np.zeros(2, np.float32), np.float64(1)
    with closing(ours.ReverbAddTrajectoryObserver(client, "signed", 2)) as observer:
        with pytest.raises(StructureError, match=r"`observation/joints/velocity`.*float32 \(3,\).*float32 \(2,\)"):
            observer(good[0])
        better = [
            move._replace(
                observation={**move.observation, "joints": {**move.observation["joints"], "velocity": velocity}}
            )
            for move in good
        ]
        with pytest.raises(StructureError, match=r"`reward`.*float32 \(\).*float64 \(\)"):
            observer(better[0])
        play(observer, [move._replace(reward=reward) for move in better])
    assert client.server_info(timeout=60)["signed"].current_size == 2
