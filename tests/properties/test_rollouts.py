"""Whatever the rollout is: each row is used once an epoch, and wrapped queues are in the order of time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from rollouts import add, plain

from reverb_writer.returns import gae
from reverb_writer.rollouts import (
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    split_and_pad_trajectories,
    unpad_trajectories,
)

Floats = npt.NDArray[np.float32]


class Steps(NamedTuple):
    """Rows [T, B], and the numbers that tell them apart."""

    dones: npt.NDArray[np.bool_]
    rewards: Floats
    values: Floats

    @property
    def numbers(self) -> Floats:
        return np.arange(self.dones.size, dtype=np.float32).reshape(self.dones.shape)

    def storage(self, **options: Any) -> RolloutStorage:
        num_rows, num_envs = self.dones.shape
        storage = RolloutStorage(num_envs, num_rows, (1,), None, (1,), **options)
        add(storage, observations=self.numbers, actions=self.numbers, **self._asdict())
        return storage


@st.composite
def steps(draw: st.DrawFn, min_rows: int = 1) -> Steps:
    shape = draw(st.integers(min_rows, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    often = draw(st.sampled_from([0.0, 0.3, 1.0]))
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    return Steps(rng.random(shape) < often, rewards, values)


@given(steps(), st.data())
def test_each_row_is_in_each_epoch_once(of: Steps, data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, of.dones.size))
    epochs = [[*of.storage().mini_batch_generator(num_parts, 1)] for _ in range(2)]
    for epoch in epochs:
        assert len(epoch) == num_parts
        assert max(len(part.obs) for part in epoch) - min(len(part.obs) for part in epoch) <= 1
        found = np.concatenate([part.obs[:, 0] for part in epoch])
        assert sorted(found.tolist()) == of.numbers.ravel().tolist()
        assert all((part.obs == part.actions).all() for part in epoch)


@given(steps(), st.booleans(), st.data())
def test_padded_trajectories_are_whole(of: Steps, shuffle: bool, data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, of.dones.shape[1]))
    found = []
    for part in of.storage(seed=5).recurrent_mini_batch_generator(num_parts, 1, shuffle=shuffle):
        assert (part.obs[~part.masks] == 0).all()
        np.testing.assert_array_equal(unpad_trajectories(part.obs, part.masks), part.actions)
        lengths = part.masks.sum(axis=0)
        assert (part.masks == (np.arange(len(part.masks))[:, None] < lengths)).all()
        found += part.obs[..., 0][part.masks].tolist()
    assert sorted(found) == of.numbers.ravel().tolist()


@given(steps())
def test_splitting_and_putting_together_is_the_identity(of: Steps) -> None:
    padded, masks = split_and_pad_trajectories({"a": of.rewards, "b": of.numbers}, of.dones)
    found = unpad_trajectories(padded, masks)
    np.testing.assert_array_equal(found["a"], of.rewards)
    np.testing.assert_array_equal(found["b"], of.numbers)
    # A column goes on until its environment is done.
    ends = np.cumsum(masks.sum(axis=0)) - 1
    in_order = of.dones.T.ravel().copy()
    in_order[of.dones.shape[0] - 1 :: of.dones.shape[0]] = True
    np.testing.assert_array_equal(np.flatnonzero(in_order), ends)


@given(steps(min_rows=3), st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.2]), st.integers(1, 3))
def test_a_queue_holds_the_newest_rows_and_their_returns_in_the_order_of_time(
    of: Steps, ratio: float, rollout: int
) -> None:
    num_rows, num_envs = of.dones.shape
    storage = QueueRolloutStorage(num_envs, rollout, (1,), None, (1,), buffer_dilation_ratio=ratio)
    for first in range(0, num_rows, rollout):
        part = slice(first, first + rollout)
        storage.clear()
        add(storage, observations=of.numbers[part], **{name: rows[part] for name, rows in of._asdict().items()})
    held = min(num_rows, int(ratio * rollout))
    newest = Steps(of.dones[-held:], of.rewards[-held:], of.values[-held:])
    last = np.ones(num_envs, np.float32)
    values = np.concatenate([newest.values, last[None]])
    expected = gae(newest.rewards, values, gamma=0.9, lam=0.8, discounts=~newest.dones, time_axis=0)
    storage.compute_returns(last, 0.9, 0.8, normalize_advantages=False)
    before = sorted(zip(plain(storage.observations.ravel()), plain(storage.returns.ravel()), strict=True))
    storage.untie_buffer_loop()
    after = sorted(zip(plain(storage.observations.ravel()), plain(storage.returns.ravel()), strict=True))
    assert before == after
    np.testing.assert_array_equal(storage.observations[:held, :, 0], of.numbers[-held:])
    np.testing.assert_allclose(storage.returns[:held, :, 0], expected.returns, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(storage.advantages[:held, :, 0], expected.advantages, rtol=1e-5, atol=1e-5)


@given(steps())
def test_next_observations_never_cross_the_end_of_an_episode(of: Steps) -> None:
    num_rows, num_envs = of.dones.shape
    storage = SarsaRolloutStorage(num_envs, num_rows, (1,), None, (1,))
    add(storage, observations=of.numbers, next_observations=of.numbers + num_envs, dones=of.dones)
    expected = np.where(of.dones, of.numbers, of.numbers + num_envs)
    np.testing.assert_array_equal(storage.next_observations[..., 0], expected)
