"""The learning of the examples, in numbers worked out by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = str(Path(__file__).parents[3] / "examples")
NAMES = ["dqn_split", "apex_dqn"]


@pytest.fixture(autouse=True)
def examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are scripts beside each other, not a package."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest) -> Any:
    """Return an example that has the network: each has a copy, because each runs when it is copied alone."""
    pytest.importorskip("gymnasium")
    return importlib.import_module(request.param)


def test_gradient_is_the_slope_of_the_huber_loss_in_every_weight(example: Any) -> None:
    rng = np.random.default_rng(3)
    network = example.QNetwork(rng, sizes=(3, 5, 4, 2))
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


def test_adam_moves_each_weight_by_the_learning_rate_at_first_whatever_its_gradient(example: Any) -> None:
    weights = [np.array([1.0, 1.0]), np.array([[5.0]])]
    example.Adam(weights, learning_rate=0.25).descend(weights, [np.array([1e-2, -40.0]), np.array([[3.0]])])
    np.testing.assert_allclose(weights[0], [0.75, 1.25], rtol=1e-3)
    np.testing.assert_allclose(weights[1], [[4.75]], rtol=1e-3)
