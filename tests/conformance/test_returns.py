"""Returns and advantages equal those of TF-Agents, whose discounts are 0 where an episode terminates."""

from __future__ import annotations

import numpy as np
import pytest
from tf_agents.utils import value_ops

from reverb_writer.returns import discounted_returns, gae

RNG = np.random.default_rng(0)
REWARDS, VALUES = RNG.normal(size=(2, 30, 4)).astype(np.float32)
DISCOUNTS = (0.97 * (RNG.random((30, 4)) > 0.1)).astype(np.float32)
LAST = RNG.normal(size=4).astype(np.float32)
FOLLOWED = np.concatenate([VALUES, LAST[None]])


def test_discounted_returns_are_those_of_tf_agents() -> None:
    theirs = value_ops.discounted_return(REWARDS, DISCOUNTS, LAST)
    ours = discounted_returns(REWARDS, FOLLOWED, gamma=1.0, discounts=DISCOUNTS, time_axis=0)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_advantages_are_those_of_tf_agents(lam: float) -> None:
    theirs = value_ops.generalized_advantage_estimation(VALUES, LAST, DISCOUNTS, REWARDS, td_lambda=lam)
    ours = gae(REWARDS, FOLLOWED, gamma=1.0, lam=lam, discounts=DISCOUNTS, time_axis=0).advantages
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
