"""Returns, advantages and targets. One backward recursion makes nearly all of them: x_t = a_t + b_t x_{t+1}.

    function            a_t                                b_t                x is
    ------------------  ---------------------------------  -----------------  -----------------------------------------
    discounted_returns  r_t                                gamma d_t          the return
    lambda_returns      r_t + gamma d_t (1 - lam) v'_t     gamma d_t lam      the lambda-return, target of TD(lambda)
    gae                 r_t + gamma d_t v'_t - v_t         gamma d_t lam      the advantage; x + v is the lambda-return
    vtrace              rho_t (r_t + gamma d_t v'_t - v_t) gamma d_t lam c_t  the correction of v

v_t is the value of the observation of row t, and v'_t that of the observation that followed its action. d_t is 0 if the
action terminated the episode. At the end of a run of rows x_{t+1} is replaced by v'_t in the first two and by 0 in
the others: where the episode ended, where it was truncated, or where the rows are cut.

The first argument is a batch, `Transitions`, or rewards:

    advantages, returns = gae(batch, "extras/value", gamma=0.99, lam=0.95)              # with a leaf of values
    advantages, returns = gae(rw.to_transitions(batch), values, gamma=0.99, lam=0.95)   # values of all rows, [B, T]
    advantages, returns = gae(rewards, values, gamma=0.99, lam=0.95)                    # [B, T], [B, T + 1]

Arrays are batch-major: [B, T, ...]. With `time_axis=0` they are [T, ...] or [T, B, ...]. `Transitions` of slices are
[N - 1, ...]; their values are [N]. Where `Transitions.mask` is False, results are 0.

Arguments that the functions share:

    rewards       [B, T, ...] with T >= 1, or `Transitions`; or a `Batch` or its data, of which `rw.to_transitions`
                  makes them. Of a batch only the reward and the flags are needed
    values        [B, T + 1, ...], the values of the observations of all rows and of the one after the last. With
                  `next_values`: [B, T, ...]. Of a batch also the name of a leaf, such as "extras/value", which must
                  have the values of final observations, too; results are [B, T - 1] of rows [B, T]
    gamma         the agent's discount, a number in [0, 1]
    lam           a number in [0, 1]
    discounts     [B, T, ...] or None, d_t: 0, or False, where the action of the row terminated the episode, else mostly
                  1. All layouts store `discount` beside the action. Not with `Transitions`, which have it
    continues     [B, T, ...] or None, flags: False where the next row is not the next step of the same episode, because
                  the episode ended or the rows are cut. None if all rows are one run. Needs `next_values`. Not with
                  `Transitions`, which have it
    next_values   [B, T, ...] or None, v'_t of all rows. None to take those of the next rows from `values`
    time_axis     1, or 0

There is no argument for flags of ends. `terminated` stands on the boundary step in the steps that recorders write, and
on the row of the action in loops over transitions, and an array does not tell which. `to_transitions` knows the
row, and refuses what is ambiguous; docs/explanation/steps.md draws it. Boundary steps are no rows for these functions:
`values` that are not one longer than the rewards are refused.

If the final observations are not known, pass the values of the last observations in their place as `next_values`: the
approximation V(s_t) of legged-robot training, which writes `rewards += gamma * values * time_outs`.

Arrays by row may lack trailing axes of the rewards, or have size 1 there: discounts [B, T] and [B, T, 1] both suit
rewards [B, T, R]. All functions raise SpecError if a number is out of range or arguments do not go together, and
StructureError if shapes do not match or arrays are of different libraries.

Arguments are not changed. Results are new arrays in the shape and dtype of the rewards (float64 for integers), or in a
wider one if the values have it. All functions are pure, so any thread may call them. They take NumPy arrays, and with
array-api-compat installed those of any library that it supports, such as PyTorch's, on any device and with gradients.
"""

from __future__ import annotations

from reverb_writer.transitions.value_targets import (
    Advantages,
    VTrace,
    discounted_returns,
    gae,
    lambda_returns,
    n_step_returns,
    normalize,
    sequence_priorities,
    vtrace,
)

__all__ = [
    "Advantages",
    "VTrace",
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "normalize",
    "sequence_priorities",
    "vtrace",
]
