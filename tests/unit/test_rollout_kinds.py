"""What the other storages add: labels, next observations, and the ring of states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rollouts import DEVICES, add, arrays_of, plain

from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.rollouts import ActionLabelRollout, ReplayBuffer, SarsaRolloutStorage

COUNT = np.arange(3, dtype=np.float32).reshape(3, 1, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_labels_go_with_their_rows_and_are_the_last_field(device: Any) -> None:
    make = arrays_of(device)
    storage = ActionLabelRollout(1, 2, (1,), None, (1,), device=device, buffer_dilation_ratio=1.5)
    for number in (0, 2):
        storage.clear()
        numbers = np.arange(number, number + 2, dtype=np.float32).reshape(2, 1, 1)
        add(storage, make, observations=numbers, action_labels=numbers * 10)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert storage.MiniBatch._fields[-1] == "action_labels"
    assert sorted(plain(batch.obs[:, 0])) == [1, 2, 3]
    assert plain(batch.action_labels) == plain(batch.obs * 10)
    (recurrent,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(recurrent.action_labels[:, 0, 0]) == [10, 20, 30]
    with pytest.raises(StructureError, match="this one lacks action_labels"):
        add(storage, make, observations=COUNT)


def test_a_label_that_finds_no_room_is_not_written() -> None:
    storage = ActionLabelRollout(1, 2, (1,), None, (1,), buffer_dilation_ratio=2.0)
    add(storage, action_labels=COUNT[:2] + 1)
    with pytest.raises(SpecError, match="the storage is full: 2 rows of 2"):
        add(storage, action_labels=COUNT[:1] + 9)
    assert plain(storage.action_labels[:, 0, 0]) == [1, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_next_observations_are_those_of_the_next_rows_and_of_the_last_transition(device: Any) -> None:
    make = arrays_of(device)
    storage = SarsaRolloutStorage(1, 3, (1,), None, (1,), device=device)
    add(storage, make, observations=COUNT, next_observations=COUNT + 1)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(batch.next_obs[..., 0]) == [[1], [2], [3]]
    assert batch.next_critic_obs is batch.next_obs
    assert storage.MiniBatch._fields[-2:] == ("next_obs", "next_critic_obs")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("final", "expected"), [(None, [1, 1, 3]), (COUNT * 0 + 9, [1, 9, 3])])
def test_what_follows_the_end_of_an_episode_is_of_that_episode(device: Any, final: Any, expected: list[float]) -> None:
    # Row 2 is the first one after the reset: the next observation of row 1 is never that.
    make = arrays_of(device)
    storage = SarsaRolloutStorage(1, 3, (1,), (1,), (1,), device=device)
    dones = np.array([[0], [1], [0]])
    finals = {} if final is None else {"final_observations": final, "final_critic_observations": -final}
    critic = {"critic_observations": -COUNT, "next_critic_observations": -COUNT - 1}
    add(storage, make, observations=COUNT, next_observations=COUNT + 1, dones=dones, **critic, **finals)
    (batch,) = storage.mini_batch_generator(1, 1)
    rows = np.argsort(np.asarray(batch.obs[:, 0]))
    assert plain(batch.next_obs[rows, 0]) == expected
    assert plain(batch.next_critic_obs[rows, 0]) == [-x for x in expected]
    (padded,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(padded.next_obs[..., 0].T) == [[*expected[:2], 0], [3, 0, 0]]


def test_the_newest_row_needs_its_next_observation() -> None:
    storage = SarsaRolloutStorage(1, 3, (1,), None, (1,))
    add(storage, observations=COUNT[:2])
    with pytest.raises(IncompleteError, match="the newest transition needs `next_observations`"):
        storage.mini_batch_generator(1)
    add(storage, observations=COUNT[2:], next_observations=COUNT[2:] + 1)
    assert plain(storage.next_observations[:, 0, 0]) == [1, 2, 3]


@pytest.mark.parametrize("device", DEVICES)
def test_a_newest_row_where_all_episodes_end_needs_no_next_observation(device: Any) -> None:
    make = arrays_of(device)
    storage = SarsaRolloutStorage(2, 1, (1,), None, (1,), device=device)
    finals = np.array([[[7.0], [8.0]]], np.float32)
    add(storage, make, observations=finals * 0, dones=np.ones((1, 2)), final_observations=finals)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(batch.next_obs) == plain(finals)


def test_a_newest_row_where_one_episode_goes_on_needs_its_next_observation() -> None:
    storage = SarsaRolloutStorage(2, 1, (1,), None, (1,))
    finals = np.array([[[7.0], [8.0]]], np.float32)
    add(storage, observations=finals * 0, dones=np.array([[1, 0]]), final_observations=finals)
    with pytest.raises(IncompleteError, match="the newest transition needs `next_observations`"):
        storage.mini_batch_generator(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("size", "inserts", "expected", "step"),
    [
        (5, [3, 3], [5, 1, 2, 3, 4], 1),
        (5, [3, 3, 2], [5, 6, 7, 3, 4], 3),
        (4, [4, 1], [4, 1, 2, 3], 1),
        (4, [6], [4, 5, 2, 3], 2),
        (4, [9], [8, 5, 6, 7], 1),  # instinct_rl's buffer refuses as many
    ],
)
def test_new_states_take_the_place_of_the_oldest(
    device: Any, size: int, inserts: list[int], expected: list[int], step: int
) -> None:
    make = arrays_of(device)
    buffer = ReplayBuffer(1, size, device)
    numbers = iter(range(100))
    for count in inserts:
        states = make(np.array([[next(numbers)] for _ in range(count)], np.float32))
        buffer.insert(states, states + 0.5)
    assert (plain(buffer.states[:, 0]), buffer.step, buffer.num_samples) == (expected, step, size)
    assert plain(buffer.next_states - buffer.states) == [[0.5]] * size


@pytest.mark.parametrize("device", DEVICES)
def test_states_are_sampled_with_what_followed_them_and_only_such_as_there_are(device: Any) -> None:
    make = arrays_of(device)
    buffer = ReplayBuffer({"a": (2,), "b": ()}, 100, device, seed=0)
    states = {"a": make(np.arange(6.0).reshape(3, 2) + 1), "b": make(np.array([7.0, 8, 9]))}
    buffer.insert(states, {name: -leaf for name, leaf in states.items()})
    drawn = [*buffer.feed_forward_generator(5, 40)]
    assert [tuple(now["a"].shape) for now, _ in drawn] == [(40, 2)] * 5
    for now, following in drawn:
        assert plain(following["a"]) == plain(-now["a"])
        assert {*plain(now["b"])} == {7.0, 8.0, 9.0}


def test_what_a_ring_cannot_do_is_refused_before_anything_changes() -> None:
    buffer = ReplayBuffer(2, 4)
    with pytest.raises(IncompleteError, match="the buffer is empty"):
        buffer.feed_forward_generator(1, 1)
    for states, next_states in ((np.ones((3, 2)), np.ones((2, 2))), (np.ones((3, 1)), np.ones((3, 2))), (1.0, 1.0)):
        with pytest.raises(StructureError):
            buffer.insert(states, next_states)
    assert (buffer.num_samples, buffer.states.any()) == (0, False)
    with pytest.raises(SpecError, match=r"`buffer_size` must be >= 1, got 0."):
        ReplayBuffer(2, 0)
