"""Returns and advantages equal those of TorchRL and RLax, wherever these are installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reverb_writer.transitions.returns import discounted_returns, gae, lambda_returns, n_step_returns, vtrace

T, B, GAMMA = 30, 4, 0.97

RNG = np.random.default_rng(0)
REWARDS, VALUES, FINALS = RNG.normal(size=(3, T, B))
RATIOS = RNG.lognormal(size=(T, B))
TERMINATED = RNG.random((T, B)) < 0.1
TRUNCATED = (RNG.random((T, B)) < 0.1) & ~TERMINATED
LAST = RNG.normal(size=B)
Floats = npt.NDArray[np.float64]


# The value of what follows each row, whether it is in the next row or not.
NEXT_VALUES = np.where(TRUNCATED, FINALS, np.concatenate([VALUES[1:], LAST[None]]))
ENDS: dict[str, Any] = {
    "discounts": ~TERMINATED,
    "continues": ~(TERMINATED | TRUNCATED),
    "next_values": NEXT_VALUES,
    "time_axis": 0,
}


def of_torchrl(name: str, *given: Any, **options: float) -> list[Floats]:
    """Call a function of TorchRL, which has arrays [B, T, 1] and takes ends apart as we do."""
    pytest.importorskip("torchrl")
    import torch
    from torchrl.objectives.value import functional

    arguments = [
        torch.as_tensor(one.T[..., None].copy()) if isinstance(one, np.ndarray) else one
        for one in (GAMMA, *given, NEXT_VALUES, REWARDS, TERMINATED | TRUNCATED, TERMINATED)
    ]
    tensors = {option: torch.tensor(number).double() for option, number in options.items()}
    found = getattr(functional, name)(*arguments, **tensors)
    return [x.numpy()[..., 0].T for x in (found if isinstance(found, tuple) else (found,))]


def assert_close(ours: Sequence[Floats], theirs: Sequence[Floats]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lambda_", [0.0, 0.8, 1.0])
def test_advantages_and_returns_are_those_of_torchrl(lambda_: float) -> None:
    ours = [*gae(REWARDS, VALUES, gamma=GAMMA, lambda_=lambda_, **ENDS)]
    ours += [lambda_returns(REWARDS, VALUES, gamma=GAMMA, lambda_=lambda_, **ENDS)]
    theirs = of_torchrl("generalized_advantage_estimate", lambda_, VALUES)
    theirs += of_torchrl("td_lambda_return_estimate", lambda_)
    if lambda_ == 1:
        ours += [discounted_returns(REWARDS, VALUES, gamma=GAMMA, **ENDS)]
        theirs += of_torchrl("td1_return_estimate")
    assert_close(ours, theirs)


@pytest.mark.parametrize(("max_rho", "max_c"), [(1.0, 1.0), (2.0, 0.5)])
def test_vtrace_is_that_of_torchrl(max_rho: float, max_c: float) -> None:
    ratios = np.log(RATIOS), np.zeros((T, B))
    theirs = of_torchrl("vtrace_advantage_estimate", *ratios, VALUES, rho_thresh=max_rho, c_thresh=max_c)
    ours = vtrace(REWARDS, VALUES, RATIOS, gamma=GAMMA, max_rho=max_rho, max_c=max_c, **ENDS)
    assert_close([ours.advantages, ours.values], theirs)


@pytest.mark.filterwarnings("ignore")  # of JAX and what it brings
@pytest.mark.parametrize("env", range(B))
def test_returns_are_those_of_rlax_whose_discounts_are_0_where_an_episode_terminates(env: int) -> None:
    rlax = pytest.importorskip("rlax")
    discounts = GAMMA * ~TERMINATED[:, env]
    rewards, values, ratios = REWARDS[:, env], VALUES[:, env], RATIOS[:, env]
    following = np.append(values[1:], LAST[env])
    common: dict[str, Any] = {"gamma": 1.0, "discounts": discounts, "time_axis": 0}
    arguments = rewards, np.append(values, LAST[env])
    advantages = rlax.truncated_generalized_advantage_estimation(rewards, discounts, 0.7, arguments[1])
    errors = rlax.vtrace(values, following, rewards, discounts, ratios, 0.7)
    n_steps = [rlax.n_step_bootstrapped_returns(rewards, discounts, following, n) for n in (1, 3, T + 5)]
    for ours, theirs in (
        *zip((n_step_returns(*arguments, n, **common) for n in (1, 3, T + 5)), n_steps, strict=True),
        (lambda_returns(*arguments, lambda_=0.7, **common), rlax.lambda_returns(rewards, discounts, following, 0.7)),
        (discounted_returns(*arguments, **common), rlax.discounted_returns(rewards, discounts, following)),
        (gae(*arguments, lambda_=0.7, **common).advantages, advantages),
        (vtrace(*arguments, ratios, lambda_=0.7, **common).values - values, errors),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
