"""Mistakes that TF-Agents 0.19 finds late, or never, and ours where they are made: both behaviours, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import reverb
import tensorflow as tf
from tf_agents.replay_buffers import reverb_utils as theirs

from reverb_writer import tf_agents as ours
from reverb_writer.errors import SpecError, StructureError

from .serve import Table, serving
from .trajectories import Steps, labels, play, step, take

OBSERVERS = ["ReverbAddTrajectoryObserver", "ReverbTrajectorySequenceObserver", "ReverbAddEpisodeObserver"]


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


@pytest.mark.parametrize("name", OBSERVERS[:2])
def test_a_sequence_length_below_one_is_refused(peer: Any, name: str) -> None:
    with (
        closing(getattr(theirs, name)(peer, "theirs", 0)) as observer,
        pytest.raises(ValueError, match="None data references"),
    ):
        play(observer, Steps().beginning(2))
    for length in (0, -1, 2.5):
        with pytest.raises(SpecError, match="`sequence_length` must be"):
            getattr(ours, name)(peer, "ours", length)


@pytest.mark.parametrize("name", OBSERVERS[:2])
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
def signed() -> Iterator[str]:
    """The address of a server whose table asks for other steps: rewards of float64, velocities of two numbers."""
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *np.shape(leaf)], np.asarray(leaf).dtype), step(0))
    spec.observation["joints"]["velocity"] = tf.TensorSpec([None, 2], tf.float32)
    with serving([Table("signed", signature=spec._replace(reward=tf.TensorSpec([None], tf.float64)))]) as address:
        yield address


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
