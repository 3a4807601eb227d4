"""Returns, advantages and targets. One backward recursion makes nearly all of them: x_t = a_t + b_t x_{t+1}.

    function            a_t                              b_t            x is
    ------------------  -------------------------------  -------------  -----------------------------------------
    discounted_returns  r_t                              gamma          the return
    lambda_returns      r_t + gamma (1 - lam) v'_t       gamma lam      the lambda-return, the target of TD(lambda)
    gae                 r_t + gamma v'_t - v_t           gamma lam      the advantage; x + v is the lambda-return
    vtrace              rho_t (r_t + gamma v'_t - v_t)   gamma lam c_t  the correction of v

v'_t is the value of what follows row t. Where an episode ends, x_{t+1} is replaced by v'_t in the first two and by 0 in
the others, and v'_t depends on how it ends:

    row t                            v'_t
    -------------------------------  ----------------------------------------------------------------------------
    terminated                       0: nothing follows
    truncated (and not terminated)   final_values[t], the value of the final observation, which an environment that
                                     resets itself does not show in row t + 1
    the last row of all              last_value
    any other                        values[t + 1]

`terminated` and `truncated` belong on the row of the action that ended the episode. What `environments.record`,
`Episode.steps`, RLDS and TF-Agents write has them one row later, on the boundary step, which holds the final
observation and no action: move them up by a row, and leave that step out of the training data (docs/contiguous.md).
Otherwise the return of the last action would include the value of the final observation. Discounts by row reveal this
mistake, and it is then refused; flags alone do not tell on which row they belong.

If the final observations are not known, pass `final_values=values`: the approximation V(s_t) of legged-robot training,
which writes `rewards += gamma * values * time_outs`. `truncated` without `final_values` is refused.

Arguments that the functions share:

    rewards       [T, ...] with T >= 1, mostly [T] or [T, B]
    values        [T, ...], the value of the observation in each row
    last_value    [...] or a number, the value of the observation after the last row
    gamma         the discount: a number in [0, 1], or [T, ...]
    lam           a number in [0, 1]
    terminated, truncated, final_values
                  [T, ...] or None, as in the table above; flags are booleans, or numbers that are not 0 where set

Arrays by row may lack trailing axes of the rewards, or have size 1 there: flags [T, B] and [T, B, 1] both suit rewards
[T, B, R]. All functions raise SpecError if a number is out of range or `truncated` comes without `final_values`, and
StructureError if shapes do not match or arrays are of different libraries.

Arguments are not changed. Results are new arrays in the dtype of the rewards (float64 for integers), or in a wider one
if the values have it. All functions are pure, so any thread may call them. They take NumPy arrays, and with
array-api-compat installed those of any library that it supports, such as PyTorch's, on any device and with gradients.
"""

from __future__ import annotations

from reverb_writer.returns.n_step import NStepTransitions, n_step_returns, n_step_transitions
from reverb_writer.returns.td_priorities import sequence_priorities
from reverb_writer.returns.value_targets import (
    Advantages,
    VTrace,
    discounted_returns,
    gae,
    lambda_returns,
    normalize,
    vtrace,
)

__all__ = [
    "Advantages",
    "NStepTransitions",
    "VTrace",
    "discounted_returns",
    "gae",
    "lambda_returns",
    "n_step_returns",
    "n_step_transitions",
    "normalize",
    "sequence_priorities",
    "vtrace",
]
