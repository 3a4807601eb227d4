"""Every return equals its definition as a sum over the rows that follow, in O(T^2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer.transitions.returns import (
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    sequence_priorities,
    vtrace,
)

Floats = npt.NDArray[np.float64]


class Rollout(NamedTuple):
    """One env of T rows, and the numbers that go with them."""

    rewards: Floats
    values: Floats
    last_value: float
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    final_values: Floats
    ratios: Floats
    gamma: float
    lambda_: float

    @property
    def ends(self) -> dict[str, Any]:
        return {
            "gamma": self.gamma,
            "discounts": ~self.terminated,
            "continues": ~(self.terminated | self.truncated),
            "next_values": np.array([self.next_value(t) for t in range(len(self.rewards))]),
            "time_axis": 0,
        }

    def episode_end(self, t: int) -> int:
        """Return the last row of the episode of row t, or of all rows."""
        done = self.terminated | self.truncated
        return next((k for k in range(t, len(done)) if done[k]), len(done) - 1)

    def next_value(self, t: int) -> float:
        """Return what follows row t, by the definition."""
        if self.terminated[t]:
            return 0.0
        if self.truncated[t]:
            return float(self.final_values[t])
        return self.last_value if t == len(self.rewards) - 1 else float(self.values[t + 1])

    def n_step(self, t: int, n: int) -> float:
        """Return the n-step return of row t, cut short where its episode ends."""
        stop = min(t + n - 1, self.episode_end(t))
        total = sum(self.gamma ** (k - t) * float(self.rewards[k]) for k in range(t, stop + 1))
        return total + self.gamma ** (stop + 1 - t) * self.next_value(stop)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    size = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    often = draw(st.sampled_from([0.0, 0.2, 0.6]))
    fractions = st.sampled_from([0.0, 0.3, 0.9, 1.0])
    return Rollout(
        rewards=rng.normal(size=size),
        values=rng.normal(size=size),
        last_value=float(rng.normal()),
        terminated=rng.random(size) < often,
        truncated=rng.random(size) < often,
        final_values=rng.normal(size=size),
        ratios=rng.lognormal(size=size),
        gamma=draw(fractions),
        lambda_=draw(fractions),
    )


@given(rollouts())
def test_discounted_returns_are_the_sum_up_to_the_end_and_what_follows_it(r: Rollout) -> None:
    expected = [r.n_step(t, len(r.rewards)) for t in range(len(r.rewards))]
    found = discounted_returns(r.rewards, r.values, **r.ends)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(rollouts(), st.integers(1, 15))
def test_n_step_returns_are_the_sum_of_n_rewards_and_what_follows_them(r: Rollout, n: int) -> None:
    expected = [r.n_step(t, n) for t in range(len(r.rewards))]
    found = n_step_returns(r.rewards, r.values, n, **r.ends)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(rollouts())
def test_lambda_returns_are_the_weighted_sum_of_all_n_step_returns(r: Rollout) -> None:
    expected = []
    for t in range(len(r.rewards)):
        rows = r.episode_end(t) - t + 1  # longer returns are all the same
        parts = [(1 - r.lambda_) * r.lambda_ ** (n - 1) * r.n_step(t, n) for n in range(1, rows)]
        expected.append(sum(parts) + r.lambda_ ** (rows - 1) * r.n_step(t, rows))
    found = lambda_returns(r.rewards, r.values, lambda_=r.lambda_, **r.ends)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(rollouts())
def test_gae_is_the_discounted_sum_of_errors_within_the_episode(r: Rollout) -> None:
    size = len(r.rewards)
    errors = [r.rewards[t] + r.gamma * r.next_value(t) - r.values[t] for t in range(size)]
    weight = r.gamma * r.lambda_
    expected = [sum(weight ** (k - t) * errors[k] for k in range(t, r.episode_end(t) + 1)) for t in range(size)]
    advantages, returns = gae(r.rewards, r.values, lambda_=r.lambda_, **r.ends)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    mixed = lambda_returns(r.rewards, r.values, lambda_=r.lambda_, **r.ends)
    np.testing.assert_allclose(returns, mixed, atol=1e-12)


@given(rollouts(), st.sampled_from([0.5, 1.0, 2.0, np.inf]), st.sampled_from([0.5, 1.0, np.inf]))
def test_vtrace_is_the_sum_of_weighted_errors_of_impala(r: Rollout, max_rho: float, max_c: float) -> None:
    size = len(r.rewards)
    rho, c = np.minimum(r.ratios, max_rho), r.lambda_ * np.minimum(r.ratios, max_c)
    errors = [rho[t] * (r.rewards[t] + r.gamma * r.next_value(t) - r.values[t]) for t in range(size)]
    targets = np.array(
        [
            r.values[t] + sum(r.gamma ** (k - t) * np.prod(c[t:k]) * errors[k] for k in range(t, r.episode_end(t) + 1))
            for t in range(size)
        ]
    )
    moved = r._replace(values=targets)  # so that what follows a row is worth the target
    advantages = [rho[t] * (r.rewards[t] + r.gamma * moved.next_value(t) - r.values[t]) for t in range(size)]
    found = vtrace(r.rewards, r.values, r.ratios, lambda_=r.lambda_, max_rho=max_rho, max_c=max_c, **r.ends)
    np.testing.assert_allclose(found.values, targets, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.advantages, advantages, rtol=1e-9, atol=1e-9)


@given(rollouts(), st.integers(1, 15))
def test_n_step_transitions_fold_rewards_and_discounts(r: Rollout, n: int) -> None:
    size = len(r.rewards)
    discounts = np.where(r.terminated, 0.0, r.final_values)
    is_end = r.terminated | r.truncated | (np.arange(size) == size - 1)
    rows = np.arange(size)
    single = rw.Transitions(rows, rows, r.rewards, discounts, rows + 1, rows >= 0, ~is_end, {})
    found = rw.n_step(single, n, r.gamma)
    for t in range(size):
        m = min(n, r.episode_end(t) + 1 - t)
        rewards = [r.gamma**i * np.prod(discounts[t : t + i]) * r.rewards[t + i] for i in range(m)]
        np.testing.assert_allclose(found.reward[t], sum(rewards), atol=1e-9)
        np.testing.assert_allclose(found.discount[t], r.gamma ** (m - 1) * np.prod(discounts[t : t + m]), atol=1e-9)
        assert found.next_observation[t] == t + m


@given(st.lists(rollouts(), min_size=2, max_size=4))
def test_lanes_have_nothing_to_do_with_each_other(envs: list[Rollout]) -> None:
    size = min(len(env.rewards) for env in envs)
    columns_of = ("rewards", "values", "terminated", "truncated")
    parts = [env._replace(**{name: getattr(env, name)[:size] for name in columns_of}) for env in envs]
    alone = [gae(env.rewards, env.values, lambda_=0.8, **{**env.ends, "gamma": 0.9}) for env in parts]
    ends = [env.ends for env in parts]
    columns = {name: np.stack([end[name] for end in ends]) for name in ("discounts", "continues", "next_values")}
    rewards, values = (np.stack([getattr(env, name) for env in parts]) for name in ("rewards", "values"))
    together = gae(rewards, values, gamma=0.9, lambda_=0.8, **columns)
    np.testing.assert_allclose(together.advantages, [one.advantages for one in alone], atol=1e-12)
    # Time first is the same, turned.
    turned = {name: column.T for name, column in columns.items()}
    again = gae(rewards.T, values.T, gamma=0.9, lambda_=0.8, time_axis=0, **turned)
    np.testing.assert_array_equal(again.advantages.T, together.advantages)


@given(rollouts(), st.sampled_from([0.0, 0.4, 1.0]))
def test_sequence_priorities_lie_between_mean_and_greatest_error(r: Rollout, max_weight: float) -> None:
    errors = np.abs(r.rewards[~r.terminated])
    expected = max_weight * errors.max() + (1 - max_weight) * errors.mean() if errors.size else 0.0
    found = sequence_priorities(r.rewards[None], ~r.terminated[None], max_weight=max_weight)
    assert found == pytest.approx([expected])
