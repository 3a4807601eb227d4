"""Returns worked by hand; and arguments that are refused."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.transitions.returns import (
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    normalize,
    sequence_priorities,
    vtrace,
)

# B = 1, T = 3, gamma = 0.9, lambda = 0.8, the value of the observation after the last row is 2.
REWARDS, GAMMA, LAM = np.ones((1, 3)), 0.9, 0.8
VALUES = np.array([[0.5, 0.5, 0.5, 2.0]])
# The second action ends the episode; the third is of the next one.
TERMINATED: dict[str, Any] = {"discounts": [[1, 0, 1]]}


def test_nothing_follows_a_termination_whatever_its_value_is() -> None:
    terminated = gae(REWARDS, VALUES, gamma=GAMMA, lambda_=LAM, **TERMINATED)
    cut: dict[str, Any] = {"continues": [[1, 0, 1]], "next_values": [[0.5, np.nan, 2.0]]}
    both = gae(REWARDS, VALUES[:, :3], gamma=GAMMA, lambda_=LAM, **TERMINATED, **cut)
    np.testing.assert_array_equal(both.advantages, terminated.advantages)


@pytest.mark.parametrize("dtype", [bool, int, float])
def test_discounts_of_0_and_1_may_be_flags_or_numbers(dtype: type) -> None:
    # Row 2: 1 + 0.9 * 2. Row 1: 1, nothing follows. Row 0: 1 + 0.9 * 1; the lambda-return is that of `gae` above.
    how: dict[str, Any] = {"gamma": GAMMA, "discounts": np.array([[1, 0, 1]], dtype)}
    np.testing.assert_allclose(discounted_returns(REWARDS, VALUES, **how), [[1.9, 1.0, 2.8]])
    np.testing.assert_allclose(n_step_returns(REWARDS, VALUES, 2, **how), [[1.9, 1.0, 2.8]])
    np.testing.assert_allclose(lambda_returns(REWARDS, VALUES, lambda_=LAM, **how), [[1.81, 1.0, 2.8]])
    np.testing.assert_allclose(gae(REWARDS, VALUES, lambda_=LAM, **how).advantages, [[1.31, 0.5, 2.3]])
    np.testing.assert_allclose(vtrace(REWARDS, VALUES, REWARDS, lambda_=LAM, **how).values, [[1.81, 1.0, 2.8]])


@pytest.mark.parametrize("discounts", [None, [[1, 1, 1]]])
def test_nothing_follows_with_a_gamma_of_0_whatever_its_value_is(discounts: Any) -> None:
    advantages, returns = gae(REWARDS, [[0.5, 0.5, 0.5, np.inf]], gamma=0.0, lambda_=LAM, discounts=discounts)
    assert advantages.tolist() == [[0.5, 0.5, 0.5]]
    assert returns.tolist() == [[1.0, 1.0, 1.0]]


def test_discounts_lack_trailing_axes_or_have_them_as_one() -> None:
    rewards = np.arange(24.0).reshape(2, 4, 3)
    discounts = np.array([[1, 1, 0, 1], [0, 1, 1, 1]], np.uint8)
    found = [discounted_returns(rewards, gamma=0.5, discounts=flags) for flags in (discounts, discounts[..., None])]
    np.testing.assert_array_equal(found[0], found[1])
    for row, reward in np.ndindex(2, 3):
        expected = discounted_returns(rewards[row, :, reward], gamma=0.5, discounts=discounts[row], time_axis=0)
        np.testing.assert_array_equal(found[0][row, :, reward], expected)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 2)])
def test_results_have_the_dtype_of_the_rewards(shape: tuple[int, ...]) -> None:
    ones = np.ones(shape, np.float32)
    ends: dict[str, Any] = {"discounts": ones > 1, "continues": ones > 1, "next_values": ones}
    results = [
        discounted_returns(ones, gamma=0.9, **ends),
        *gae(ones, ones, gamma=0.9, lambda_=0.8, **ends),
        lambda_returns(ones, ones, gamma=0.9, lambda_=0.8, **ends),
        n_step_returns(ones, ones, 3, gamma=0.9, **ends),
        *vtrace(ones, ones, ones, gamma=0.9, **ends),
        normalize(ones),
        normalize(ones, ones[..., 0] > 0) if len(shape) > 2 else normalize(ones, ones > 0),
    ]
    assert {result.dtype for result in results} == {np.dtype(np.float32)}
    assert {result.shape for result in results} == {shape}
    assert discounted_returns(np.ones(shape, int), gamma=0.5).dtype == np.float64


def test_arguments_are_left_as_they_are() -> None:
    rewards, values, flags = np.ones((1, 3)), np.full((1, 3), 0.5), np.array([[1, 0, 1]])
    for array in (rewards, values, flags):
        array.flags.writeable = False
    gae(rewards, values, gamma=GAMMA, lambda_=LAM, continues=flags, next_values=values)


def test_masked_elements_are_not_normalized() -> None:
    found = normalize([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]], [[1, 1, 0], [1, 0, 0]])
    np.testing.assert_allclose(found, [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], atol=1e-6)
    assert normalize([[7.0, 9.0]], [[1, 0]]).tolist() == [[0.0, 0.0]]
    assert normalize([[7.0, 9.0]], [[0, 0]]).tolist() == [[0.0, 0.0]]
    assert normalize([7.0]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gamma": 1.5}, SpecError, r"`gamma` must be in \[0, 1\], got 1.5."),
        ({"lambda_": -0.1}, SpecError, r"`lambda_` must be in \[0, 1\], got -0.1."),
        ({"time_axis": 2}, SpecError, r"`time_axis` must be 1 for .*, got 2."),
        ({"continues": [[1, 0, 1]]}, SpecError, "`continues` needs `next_values`"),
        ({"rewards": np.ones((1, 0))}, StructureError, r"must be \[B, T, ...\] with T >= 1, got shape \(1, 0\)"),
        ({"rewards": [1.0]}, StructureError, r"got shape \(1,\). Time is axis 1: .* 0 for \[T, ...\]"),
        ({"rewards": 1.0, "time_axis": 0}, StructureError, r"must be \[T, ...\] with T >= 1, got shape \(\)"),
        ({"values": [[1.0]]}, StructureError, r"`values`: shape \(1, 1\) .* \(1, 3\): expected \(1, 4\)"),
        # Three actions and their boundary step: four values, not five.
        (
            {"rewards": np.ones((1, 4)), "values": np.ones((1, 4))},
            StructureError,
            r"`values` belong to T \+ 1 observations",
        ),
        ({"values": [1.0]}, StructureError, r"`values`: shape \(1,\) does not match"),
        ({"discounts": [[[0, 1, 0]]]}, StructureError, r"`discounts`: shape \(1, 1, 3\)"),
        ({"discounts": [[0, 1, 0]] * 2}, StructureError, r"`discounts`: shape \(2, 3\)"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"rewards": REWARDS, "values": VALUES, "gamma": GAMMA, "lambda_": LAM}
    with pytest.raises(error, match=message):
        gae(**{**good, **arguments})


def test_no_function_takes_flags_whose_row_is_not_known() -> None:
    functions: list[Any] = [discounted_returns, lambda_returns, n_step_returns, gae, vtrace, normalize]
    for function in functions:
        assert not {*inspect.signature(function).parameters} & {"terminated", "truncated", "done", "is_last"}


def test_further_bad_arguments_are_named() -> None:
    with pytest.raises(SpecError, match=r"`n` must be >= 1, got 0."):
        n_step_returns(REWARDS, VALUES, 0, gamma=0.9)
    with pytest.raises(SpecError, match=r"`max_rho` must be > 0, got 0."):
        vtrace([[1.0]], [[1.0, 1.0]], [[1.0]], gamma=0.9, max_rho=0)
    with pytest.raises(StructureError, match=r"elements to be normalized, got shape \(0,\)"):
        normalize([])
    with pytest.raises(StructureError, match=r"`mask` must have the shape of `x`, \(2,\), got \(3,\)"):
        normalize([1.0, 2.0], [1, 1, 0])
    with pytest.raises(StructureError, match=r"shape of `td_errors`, \(1, 3\), got \(1, 2\)"):
        sequence_priorities([[1.0, 2.0, 3.0]], [[True, False]])
    with pytest.raises(StructureError, match=r"`td_errors` must be \[B, T, ...\] .* got shape \(3,\)"):
        sequence_priorities([1.0, 2.0, 3.0])


def test_arrays_of_pytorch_are_taken_with_their_gradients() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    values = torch.full((1, 3), 0.5, requires_grad=True)
    following = torch.cat([values[:, 1:2], torch.tensor([[3.0, 2.0]])], dim=1)
    ends = {"continues": torch.tensor([[1, 0, 1]]), "next_values": following}
    advantages, returns = gae(torch.ones(1, 3), values, gamma=GAMMA, lambda_=LAM, **ends)
    assert (advantages.dtype, returns.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(advantages.detach(), torch.tensor([[3.254, 3.2, 2.3]]))
    advantages[0, 0].backward()
    # dA_0/dv_0 = -1, dA_0/dv_1 = gamma - gamma lambda; row 2 is of another episode.
    torch.testing.assert_close(values.grad, torch.tensor([[-1.0, 0.9 - 0.72, 0.0]]))
    errors = torch.tensor([[1.0, -3.0], [0.0, 5.0]])
    torch.testing.assert_close(sequence_priorities(errors, max_weight=0.5), torch.tensor([2.5, 3.75]))
    torch.testing.assert_close(normalize(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([-1.0, 0.0, 1.0]))
    masked = normalize(torch.tensor([[1.0, 2.0, 99.0, 3.0]]), torch.tensor([[1, 1, 0, 1]]))
    torch.testing.assert_close(masked, torch.tensor([[-1.0, 0.0, 0.0, 1.0]]))
    with pytest.raises(StructureError, match=r"of one library .*, got Tensor, ndarray\. .*as_torch"):
        gae(torch.ones(1, 3), np.ones((1, 4)), gamma=GAMMA, lambda_=LAM)
