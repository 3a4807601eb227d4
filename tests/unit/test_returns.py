"""Returns worked by hand; and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.returns import (
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    n_step_transitions,
    normalize,
    sequence_priorities,
    vtrace,
)

# T = 3, gamma = 0.9, lambda = 0.8, the value of the observation after the last row is 2.
REWARDS, VALUES, LAST, GAMMA, LAM = np.ones(3), np.full(3, 0.5), 2.0, 0.9, 0.8


def test_gae_stops_where_an_episode_terminates() -> None:
    advantages, returns = gae(REWARDS, VALUES, LAST, gamma=GAMMA, lam=LAM, terminated=[0, 1, 0])
    np.testing.assert_allclose(advantages, [1.31, 0.5, 2.3])
    np.testing.assert_allclose(returns, [1.81, 1.0, 2.8])
    np.testing.assert_allclose(normalize(advantages), [-0.06656, -0.96506, 1.03162], atol=1e-5)


def test_gae_with_the_last_observations_values_is_the_approximation_at_time_outs() -> None:
    advantages, returns = gae(REWARDS, VALUES, LAST, gamma=GAMMA, lam=LAM, truncated=[0, 1, 0], final_values=VALUES)
    np.testing.assert_allclose(advantages, [1.634, 0.95, 2.3])
    np.testing.assert_allclose(returns, [2.134, 1.45, 2.8])
    np.testing.assert_allclose(normalize(advantages), [0.00889, -1.00441, 0.99553], atol=1e-5)


def test_gae_bootstraps_from_the_final_observation_at_a_time_out() -> None:
    # Row 1: 1 + 0.9 * 3 - 0.5 = 3.2. Row 0: 1 + 0.9 * 0.5 - 0.5 + 0.72 * 3.2 = 3.254. Row 2 is of the next episode.
    final_values = np.array([np.nan, 3.0, np.nan])
    advantages, _ = gae(REWARDS, VALUES, LAST, gamma=GAMMA, lam=LAM, truncated=[0, 1, 0], final_values=final_values)
    np.testing.assert_allclose(advantages, [3.254, 3.2, 2.3])


def test_termination_counts_where_a_row_is_truncated_too() -> None:
    terminated = gae(REWARDS, VALUES, LAST, gamma=GAMMA, lam=LAM, terminated=[0, 1, 0])
    both = gae(
        REWARDS, VALUES, LAST, gamma=GAMMA, lam=LAM, terminated=[0, 1, 0], truncated=[0, 1, 0], final_values=[9, 9, 9]
    )
    np.testing.assert_array_equal(both.advantages, terminated.advantages)


def test_discounted_returns_of_a_discount_a_row() -> None:
    # dm_env: the discount is 0 where the episode terminates. 1 + 0.5 * (2 + 0 * ...) = 2.
    np.testing.assert_allclose(discounted_returns([1.0, 2.0, 3.0], [0.5, 0.0, 0.5], 4.0), [2.0, 2.0, 5.0])


def test_discounted_returns_bootstrap_from_the_final_observation_at_a_time_out() -> None:
    found = discounted_returns([1.0, 1.0, 1.0], 0.5, 4.0, truncated=[0, 1, 0], final_values=[0, 8.0, 0])
    np.testing.assert_allclose(found, [3.5, 5.0, 3.0])


def test_lambda_returns_mix_the_n_step_returns_with_geometric_weights() -> None:
    rewards, values, last = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0]), 7.0
    one, two, three = (n_step_returns(rewards, values, last, n, gamma=0.5)[0] for n in (1, 2, 3))
    assert (one, two, three) == (3.5, 3.5, 3.625)  # 1 + 5/2, 1 + 2/2 + 6/4, 1 + 2/2 + 3/4 + 7/8
    # (1 - lambda) (G1 + lambda G2) + lambda^2 G3, with lambda = 1/2
    assert lambda_returns(rewards, values, last, gamma=0.5, lam=0.5)[0] == 0.5 * (3.5 + 0.5 * 3.5) + 0.25 * 3.625


def test_n_step_returns_end_with_the_episode() -> None:
    # Row 0 looks two steps on, row 1 is the last one and terminates, row 2 has one row left.
    found = n_step_returns([1.0, 1.0, 1.0], [8.0, 8.0, 8.0], 4.0, 2, gamma=0.5, terminated=[0, 1, 0])
    np.testing.assert_allclose(found, [1.5, 1.0, 3.0])


def acme_items(
    rewards: list[float], discounts: list[float], n: int, gamma: float
) -> list[tuple[int, int, float, float]]:
    """List first row, row to bootstrap from, reward and discount as Acme's adder writes them, in its order."""
    folds = {k: n_step_transitions(rewards, discounts, k, gamma=gamma) for k in range(1, n + 1)}
    total = len(rewards)
    ends = [(max(0, end - n), end) for end in range(1, total + 1)]
    ends += [(start, total) for start in range(max(0, total - n) + 1, total)]
    return [(a, b, folds[b - a].rewards[a], folds[b - a].discounts[a]) for a, b in ends]


@pytest.mark.parametrize(
    ("rewards", "discounts", "n", "gamma", "expected"),
    [
        (
            [1, 1, 1],
            [0.5, 0.5, 0],
            3,
            0.4,
            [(0, 1, 1, 0.5), (0, 2, 1.2, 0.1), (0, 3, 1.24, 0), (1, 3, 1.2, 0), (2, 3, 1, 0)],
        ),
        ([1, 1], [1, 0], 4, 1.0, [(0, 1, 1, 1), (0, 2, 2, 0), (1, 2, 1, 0)]),
        (
            [2, 3, 5, 7],
            [1, 1, 1, 0],
            3,
            0.5,
            [(0, 1, 2, 1), (0, 2, 3.5, 0.5), (0, 3, 4.75, 0.25), (1, 4, 7.25, 0), (2, 4, 8.5, 0), (3, 4, 7, 0)],
        ),
    ],
)
def test_n_step_transitions_are_those_of_acme(
    rewards: list[float], discounts: list[float], n: int, gamma: float, expected: list[tuple[int, int, float, float]]
) -> None:
    np.testing.assert_allclose(acme_items(rewards, discounts, n, gamma), expected)


def test_vtrace_on_policy_is_the_lambda_return() -> None:
    values, advantages = vtrace(REWARDS, VALUES, LAST, np.ones(3), gamma=GAMMA, lam=LAM, terminated=[0, 1, 0])
    np.testing.assert_allclose(values, [1.81, 1.0, 2.8])
    np.testing.assert_allclose(advantages, [1 + 0.9 * 1.0 - 0.5, 0.5, 2.3])


def test_vtrace_clips_its_two_ratios_apart() -> None:
    # Errors: 1 + 0.5 * 2 - 2 = 0, 1 + 0.5 * 4 - 2 = 1. Ratio 4 of row 1: rho is 2, so v1 = 2 + 2 * 1 = 4. Row 0 with
    # ratio 3: c is 1.5, so v0 = 2 + 2 * 0 + 0.5 * 1.5 * 2 = 3.5. Advantages: 2 (1 + 0.5 * 4 - 2), 2 (1 + 0.5 * 4 - 2).
    values, advantages = vtrace([1, 1], [2, 2], 4.0, [3.0, 4.0], gamma=0.5, max_rho=2.0, max_c=1.5)
    np.testing.assert_allclose(values, [3.5, 4.0])
    np.testing.assert_allclose(advantages, [2.0, 2.0])


def test_flags_lack_trailing_axes_or_have_them_as_one() -> None:
    rewards = np.arange(24.0).reshape(4, 2, 3)
    terminated = np.array([[0, 1], [0, 0], [1, 0], [0, 0]], np.uint8)
    found = [discounted_returns(rewards, 0.5, terminated=flags) for flags in (terminated, terminated[..., None])]
    np.testing.assert_array_equal(found[0], found[1])
    for env, reward in np.ndindex(2, 3):
        expected = discounted_returns(rewards[:, env, reward], 0.5, terminated=terminated[:, env])
        np.testing.assert_array_equal(found[0][:, env, reward], expected)


@pytest.mark.parametrize("shape", [(5,), (5, 4)])
def test_results_have_the_dtype_of_the_rewards(shape: tuple[int, ...]) -> None:
    ones = np.ones(shape, np.float32)
    last = np.ones(shape[1:], np.float32)
    ends: dict[str, Any] = {"terminated": ones > 1, "truncated": ones > 1, "final_values": ones}
    results = [
        discounted_returns(ones, 0.9, **ends),
        *gae(ones, ones, last, gamma=0.9, lam=0.8, **ends),
        lambda_returns(ones, ones, last, gamma=0.9, lam=0.8, **ends),
        n_step_returns(ones, ones, last, 3, gamma=0.9, **ends),
        *n_step_transitions(ones, ones, 3, gamma=0.9),
        *vtrace(ones, ones, last, ones, gamma=0.9, **ends),
        normalize(ones),
    ]
    assert {result.dtype for result in results} == {np.dtype(np.float32)}
    assert {result.shape for result in results} == {shape}
    assert discounted_returns(np.ones(shape, int), 0.5).dtype == np.float64


def test_arguments_are_left_as_they_are() -> None:
    rewards, values, flags = np.ones(3), np.full(3, 0.5), np.array([0, 1, 0])
    for array in (rewards, values, flags):
        array.flags.writeable = False
    gae(rewards, values, LAST, gamma=GAMMA, lam=LAM, truncated=flags, final_values=values)


def test_sequence_priorities_mix_greatest_and_mean_error_of_the_steps_that_count() -> None:
    errors = np.array([[1.0, -3.0, 100.0], [0.0, 0.0, 0.0], [5.0, 5.0, 5.0]])
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    found = sequence_priorities(errors, mask, max_weight=0.9, axis=1)
    np.testing.assert_allclose(found, [0.9 * 3 + 0.1 * 2, 0.0, 0.0])
    np.testing.assert_allclose(sequence_priorities(errors.T, mask.T), found)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gamma": 1.5}, SpecError, r"`gamma` must be in \[0, 1\], got 1.5."),
        ({"lam": -0.1}, SpecError, r"`lam` must be in \[0, 1\], got -0.1."),
        ({"truncated": [0, 1, 0]}, SpecError, "`truncated` needs `final_values`"),
        ({"rewards": []}, StructureError, r"`rewards` must be \[T, ...\] with T >= 1, got shape \(0,\)."),
        ({"rewards": 1.0}, StructureError, r"`rewards` must be \[T, ...\] with T >= 1, got shape \(\)."),
        ({"values": [1.0]}, StructureError, r"`values`: shape \(1,\) does not match rewards \(3,\): expected \(3,\)"),
        ({"terminated": [[0, 1, 0]]}, StructureError, r"`terminated`: shape \(1, 3\)"),
        ({"last_value": [1.0, 2.0]}, StructureError, r"`last_value`: shape \(2,\) .* expected \(\)"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"rewards": REWARDS, "values": VALUES, "last_value": LAST, "gamma": GAMMA, "lam": LAM}
    with pytest.raises(error, match=message):
        gae(**{**good, **arguments})


RECORDED = {  # three actions and the boundary step; the last action terminated the episode
    "rewards": np.array([1.0, 1.0, 1.0, 0.0]),
    "values": np.array([10.0, 10.0, 10.0, 10.0]),
    "last_value": 0.0,
}


def test_flags_on_boundary_steps_are_refused_where_discounts_give_them_away() -> None:
    late, discounts = np.array([0, 0, 0, 1]), np.array([1.0, 1.0, 0.0, 0.0])
    message = "`terminated` is set on 1 rows that follow a row with a discount of 0: .* one row before"
    for boundary_discount in (0.0, 1.0):  # ours, and TF-Agents'
        discounts[3] = boundary_discount
        with pytest.raises(StructureError, match=message):
            gae(**RECORDED, gamma=discounts, lam=0.0, terminated=late)
        with pytest.raises(StructureError, match=message):
            n_step_returns(**RECORDED, n=2, gamma=discounts, terminated=late)
    right = np.append(late[1:], 0)
    assert gae(**RECORDED, gamma=discounts, lam=0.0, terminated=right).advantages[:3].tolist() == [1, 1, -9]
    # Nothing is told by discounts that are 0 everywhere.
    assert gae(**RECORDED, gamma=discounts * 0, lam=0.0, terminated=late).advantages[:3].tolist() == [-9, -9, -9]


def test_a_lone_element_is_normalized_to_zero() -> None:
    assert normalize([7.0]).tolist() == [0.0]


def test_further_bad_arguments_are_named() -> None:
    with pytest.raises(SpecError, match=r"`n` must be >= 1, got 0."):
        n_step_transitions([1.0], [1.0], 0, gamma=0.9)
    with pytest.raises(SpecError, match=r"`max_rho` must be > 0, got 0."):
        vtrace([1.0], [1.0], 1.0, [1.0], gamma=0.9, max_rho=0)
    with pytest.raises(StructureError, match=r"elements to be normalized, got shape \(0,\)"):
        normalize([])
    with pytest.raises(StructureError, match=r"steps along axis 0, and `mask` \(2,\) the same shape"):
        sequence_priorities([1.0, 2.0, 3.0], [True, False])


def test_arrays_of_pytorch_are_taken_with_their_gradients() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    values = torch.full((3,), 0.5, requires_grad=True)
    ends = {"truncated": torch.tensor([0, 1, 0]), "final_values": torch.tensor([0.0, 3.0, 0.0])}
    advantages, returns = gae(torch.ones(3), values, 2.0, gamma=GAMMA, lam=LAM, **ends)
    assert (advantages.dtype, returns.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(advantages.detach(), torch.tensor([3.254, 3.2, 2.3]))
    advantages[0].backward()
    # dA_0/dv_0 = -1, dA_0/dv_1 = gamma - gamma lambda; row 2 is of another episode.
    torch.testing.assert_close(values.grad, torch.tensor([-1.0, 0.9 - 0.72, 0.0]))
    errors = torch.tensor([[1.0, -3.0], [0.0, 5.0]])
    torch.testing.assert_close(sequence_priorities(errors, axis=1, max_weight=0.5), torch.tensor([2.5, 3.75]))
    torch.testing.assert_close(normalize(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))
    with pytest.raises(StructureError, match="arrays must be of one library"):
        gae(torch.ones(3), np.ones(3), 2.0, gamma=GAMMA, lam=LAM)
