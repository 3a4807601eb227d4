"""A mask in a storage: rows that are no training data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.rollouts import RolloutStorage

LIBRARIES = [None, "cpu"]


@pytest.fixture(params=LIBRARIES, ids=["numpy", "torch"])
def storage(request: pytest.FixtureRequest) -> RolloutStorage:
    """Two environments, five rows.

    Environment 0: the action of row 1 terminates its episode, and row 2 only resets it. Environment 1: row 3 is the
    boundary step of an episode that was truncated, and row 4 padding.
    """
    if request.param:
        pytest.importorskip("torch")
    made = RolloutStorage(2, 5, 1, None, 1, device=request.param, seed=0)
    for t in range(5):
        transition = made.Transition(
            observations=np.array([[t], [10 + t]], np.float32),
            actions=np.zeros((2, 1), np.float32),
            rewards=np.array([t + 1.0, 100.0]),
            dones=np.array([t == 1, False]),
            values=np.array([10.0 * t, 2.0]),
            mask=np.array([t != 2, t < 3]),
        )
        made.add_transitions(transition)
    return made


def numbers(array: Any) -> list[Any]:
    found: list[Any] = np.asarray(array)[..., 0].T.tolist()
    return found


def test_advantages_neither_use_masked_rows_nor_have_them(storage: RolloutStorage) -> None:
    storage.compute_returns(np.array([50.0, 7.0]), gamma=0.5, lam=1.0, normalize_advantages=False)
    first, second = numbers(storage.returns)
    # Row 1 terminates: 2. Row 0: 1 + 0.5 * 2. Row 4: 5 + 0.5 * 50, and row 3: 4 + 0.5 * 30.
    assert [first[t] for t in (0, 1, 3, 4)] == [2.0, 2.0, 19.0, 30.0]
    # Row 2 is followed by the value of the boundary step, 2: 100 + 0.5 * 2 = 101, then 100 + 101 / 2, and so on.
    assert second[:3] == [175.25, 150.5, 101.0]
    storage.compute_returns(np.array([50.0, 7.0]), gamma=0.5, lam=1.0)
    advantages = np.asarray(storage.advantages)[..., 0]
    real = np.array([[1, 1], [1, 1], [0, 1], [1, 0], [1, 0]], bool)
    assert (advantages[~real] == 0).all()
    np.testing.assert_allclose([advantages[real].mean(), advantages[real].std(ddof=1)], [0, 1], atol=1e-6)


def test_minibatches_of_rows_have_real_rows_only(storage: RolloutStorage) -> None:
    seen = [
        float(number)
        for batch in storage.mini_batch_generator(3, num_epochs=1)
        for number in np.asarray(batch.obs)[:, 0]
    ]
    assert sorted(seen) == [0, 1, 3, 4, 10, 11, 12]
    assert all(batch.is_real is None for batch in storage.mini_batch_generator(1, num_epochs=1))
    with pytest.raises(rw.errors.SpecError, match="`num_mini_batches` must be <= 7"):
        storage.mini_batch_generator(8)


def test_minibatches_of_environments_bring_the_mask(storage: RolloutStorage) -> None:
    (batch,) = storage.recurrent_mini_batch_generator(1, num_epochs=1)
    assert numbers(batch.is_real) == [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]
    (contiguous,) = storage.contiguous_mini_batch_generator(1, num_epochs=1)
    real = np.asarray(contiguous.batch.is_real)[:, 0] != 0
    assert sorted(np.asarray(contiguous.batch.obs)[real, 0].tolist()) == [0, 1, 3, 4, 10, 11, 12]
    # The row after a reset begins a trajectory.
    starts = np.asarray(contiguous.batch.obs)[np.asarray(contiguous.is_init), 0].tolist()
    assert {0.0, 3.0, 10.0} <= set(starts)


def test_statistics_are_of_real_rows(storage: RolloutStorage) -> None:
    """Trajectories of 2 and 2 rows, and of 3: 7 rows in 3; rewards 1, 2, 4, 5 and three times 100."""
    assert storage.get_statistics() == pytest.approx((7 / 3, 312 / 7))
