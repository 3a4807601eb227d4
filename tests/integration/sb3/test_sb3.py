"""Stable-Baselines3's replay buffer on a table: tensors of its shapes and dtypes, with the values that were added."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

import reverb_writer as rw

torch = pytest.importorskip("torch")
from reverb_writer import sb3  # noqa: E402

BOX = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)


@pytest.fixture
def server() -> Iterator[rw.LocalServer]:
    with rw.LocalServer([rw.TableConfig("replay", 1_000), rw.TableConfig("other", 1_000)]) as server:
        yield server


def add(buffer: sb3.ReplayBuffer, number: int, **more: Any) -> None:
    """Add the transitions number -> number + 1 of two environments; those of the second have 100 more."""
    obs = np.stack([np.full(3, number), np.full(3, number + 100)]).astype(np.float32)
    arguments = {"done": np.array([False, False]), "infos": [{}, {}], **more}
    buffer.add(obs, obs + 1, np.array([number % 2, 1]), np.array([number, 10 * number]), **arguments)


def test_samples_are_the_transitions_that_were_added(server: rw.LocalServer) -> None:
    with sb3.ReplayBuffer(server, BOX, gymnasium.spaces.Discrete(2), "cpu", n_envs=2) as buffer:
        for number in range(20):
            add(buffer, number, done=np.array([number == 19, False]))
        data = buffer.sample(256)
        assert buffer.size() == 40
    numbers = data.observations[:, 0]
    is_second = numbers >= 100
    assert set(numbers.tolist()) <= {*range(20), *range(100, 120)}
    assert len(set(numbers.tolist())) > 20  # of 40; 256 draws leave out 20 of them once in 10**30 times
    assert data.observations.shape == data.next_observations.shape == (256, 3)
    assert data.actions.shape == data.rewards.shape == data.dones.shape == (256, 1)
    assert (data.actions.dtype, data.rewards.dtype, data.dones.dtype) == (torch.int64, torch.float32, torch.float32)
    assert data.discounts is None  # algorithms of Stable-Baselines3 then discount by their own gamma
    torch.testing.assert_close(data.next_observations, data.observations + 1)
    torch.testing.assert_close(data.actions[:, 0], torch.where(is_second, 1, numbers.long() % 2))
    torch.testing.assert_close(data.rewards[:, 0], torch.where(is_second, 10 * (numbers - 100), numbers))
    torch.testing.assert_close(data.dones[:, 0], (numbers == 19).float())


@pytest.mark.parametrize(("handles", "expected"), [(True, [0.0, 1.0]), (False, [1.0, 1.0])])
def test_time_limit_is_no_end_unless_asked_for(server: rw.LocalServer, handles: bool, expected: list[float]) -> None:
    with sb3.ReplayBuffer(
        server, BOX, gymnasium.spaces.Discrete(2), n_envs=2, handle_timeout_termination=handles, table="other"
    ) as buffer:
        add(buffer, 0, done=np.array([True, True]), infos=[{"TimeLimit.truncated": True}, {}])
        data = buffer.sample(64)
    for done, observation in zip(data.dones[:, 0].tolist(), data.observations[:, 0].tolist(), strict=True):
        assert done == expected[int(observation >= 100)]


def test_dict_and_discrete_observations_and_float64_actions(server: rw.LocalServer) -> None:
    space = gymnasium.spaces.Dict(
        {"image": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8), "room": gymnasium.spaces.Discrete(9)}
    )
    actions = gymnasium.spaces.Box(-1, 1, (2, 3), np.float64)
    with sb3.ReplayBuffer(server, space, actions) as buffer:
        obs = {"image": np.full((1, 2, 2), 7), "room": np.array([3])}
        buffer.add(obs, obs, np.arange(6).reshape(1, 2, 3), [0.5], [True], [{}])
        data = buffer.sample(2)
    assert data.observations["image"].tolist() == [[[7, 7], [7, 7]]] * 2
    assert data.observations["image"].dtype == torch.uint8
    assert data.next_observations["room"].tolist() == [[3], [3]]
    assert data.actions.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert data.actions.dtype == torch.float32


def test_another_batch_size_and_a_normalizer_and_arrays_of_another_size_that_are_refused(
    server: rw.LocalServer,
) -> None:
    class Halves:
        """Normalizes as `VecNormalize` does, whose names these are."""

        def normalize_obs(self, obs: Any) -> Any:
            return obs / 2

        def normalize_reward(self, reward: Any) -> Any:
            return reward * 10.0

    with sb3.ReplayBuffer(server, BOX, gymnasium.spaces.Discrete(2), n_envs=2) as buffer:
        with pytest.raises(ValueError, match="cannot reshape array of size 4"):
            buffer.add(np.zeros((2, 2)), np.zeros((2, 2)), [0, 0], [0, 0], [False, False])
        add(buffer, 8)
        assert buffer.sample(3).rewards.shape == (3, 1)
        assert buffer.size() == 2
        data = buffer.sample(5, env=Halves())
    assert {*data.observations[:, 0].tolist()} <= {4.0, 54.0}
    assert {*data.next_observations[:, 0].tolist()} <= {4.5, 54.5}
    assert {*data.rewards[:, 0].tolist()} <= {80.0, 800.0}


def test_buffer_is_made_and_read_and_pickled_as_algorithms_do(
    server: rw.LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    """`DQN(..., replay_buffer_class=, replay_buffer_kwargs=, optimize_memory_usage=True)` and `CheckpointCallback`."""
    spaces = BOX, gymnasium.spaces.Discrete(2)
    options: Any = {"device": "cpu", "n_envs": 2, "optimize_memory_usage": True}
    with sb3.ReplayBuffer(1_000_000, *spaces, **options, replay=server.address, table="other") as buffer:
        add(buffer, 0)
        assert buffer.sample(8).observations.shape == (8, 3)
        assert (buffer.full, buffer.pos) == (False, 0)  # else the algorithm sets `buffer.dones`
        saved = [pickle.loads(pickle.dumps(buffer)) for _ in range(2)]  # noqa: S301  # of this test
    assert saved == [{"table": "other", "addresses": [server.address]}] * 2
    (line,) = (line for line in caplog.messages if "pickled" in line)
    assert "table `other`" in line
    assert server.address in line
    with pytest.raises(rw.errors.SpecError, match="replay_buffer_kwargs"):
        sb3.ReplayBuffer(1_000_000, *spaces, **options)
