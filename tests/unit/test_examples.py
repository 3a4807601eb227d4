"""The learning of the examples, in numbers worked out by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in ("learner", "q_network"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_gradient_is_the_slope_of_the_huber_loss_in_every_weight() -> None:
    from q_network import QNetwork

    rng = np.random.default_rng(3)
    network = QNetwork(rng, sizes=(3, 5, 4, 2))
    network.weights = [weight.astype(np.float64) for weight in network.weights]
    observations, actions = rng.normal(size=(6, 3)), rng.integers(2, size=6)
    targets = network(observations)[np.arange(6), actions] + np.array([0.3, -0.4, 2.0, -3.0, 0.9, 0.0])

    def loss() -> float:
        error = np.abs(network(observations)[np.arange(6), actions] - targets)
        return float(np.where(error < 1, error**2 / 2, error - 0.5).mean())

    step = 1e-6
    for weight, gradient in zip(network.weights, network.gradient(observations, actions, targets), strict=True):
        assert gradient.shape == weight.shape
        for index in np.ndindex(weight.shape):
            weight[index] += step
            above = loss()
            weight[index] -= 2 * step
            below = loss()
            weight[index] += step
            assert gradient[index] == pytest.approx((above - below) / (2 * step), abs=1e-7)


def test_adam_moves_each_weight_by_the_learning_rate_at_first_whatever_its_gradient() -> None:
    from q_network import Adam

    weights = [np.array([1.0, 1.0]), np.array([[5.0]])]
    Adam(weights, learning_rate=0.25).descend(weights, [np.array([1e-2, -40.0]), np.array([[3.0]])])
    np.testing.assert_allclose(weights[0], [0.75, 1.25], rtol=1e-3)
    np.testing.assert_allclose(weights[1], [[4.75]], rtol=1e-3)


@pytest.mark.parametrize(
    ("trace_decay", "expected"),
    [
        (0.0, [1 + 0.5 * 20, 2 + 0.5 * 30]),  # one step ahead: reward, and half the value that follows
        (1.0, [1 + 0.5 * (2 + 0.5 * 30), 2 + 0.5 * 30]),  # all rewards, and the value at the window's end
    ],
)
def test_returns_of_a_window_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, trace_decay: float, expected: list[float]
) -> None:
    import learner

    monkeypatch.setattr(learner, "DISCOUNT", 0.5)
    monkeypatch.setattr(learner, "TRACE_DECAY", trace_decay)
    returns = learner.lambda_returns(
        rewards=np.array([[1.0, 2.0, 99.0]]),  # the last step only observes
        terminated=np.array([[False, False, False]]),
        values=np.array([[10.0, 20.0, 30.0]]),
    )
    np.testing.assert_allclose(returns, [expected])


def test_a_terminated_episode_is_worth_no_more_than_its_last_reward() -> None:
    import learner

    returns = learner.lambda_returns(
        rewards=np.array([[1.0, 2.0, 0.0]]),
        terminated=np.array([[False, True, False]]),
        values=np.array([[10.0, 20.0, 30.0]]),
    )
    first = 1 + learner.DISCOUNT * ((1 - learner.TRACE_DECAY) * 20 + learner.TRACE_DECAY * 2)
    np.testing.assert_allclose(returns, [[first, 2.0]])


def test_a_truncated_episode_is_worth_its_last_reward_and_the_value_of_where_it_stopped() -> None:
    import learner

    returns = learner.lambda_returns(
        rewards=np.array([[2.0, 0.0]]),
        terminated=np.array([[False, False]]),  # cut off by the time limit: the last step is no terminal one
        values=np.array([[20.0, 30.0]]),
    )
    np.testing.assert_allclose(returns, [[2 + learner.DISCOUNT * 30]])
