"""Fold the steps of an environment into transitions over n steps, for an observer.

    gamma = 0.5, discounts 1, n = 3           each line is a transition; they are passed on in this order

    observation   s0    s1    s2    s3   s4   from   to   reward                    discount
    reward           2     3     5     7      s0     s1   2                         1
                  |-----|                     s0     s2   2 + 3/2                   1/2
                  |-----------|               s0     s3   2 + 3/2 + 5/4             1/4
                  |-----------------|         s1     s4   3 + 5/2 + 7/4             1/4
                        |----------------|    s2     s4   5 + 7/2                   1/2     the episode is over:
                              |----------|    s3     s4   7                         1       all that remain
                                    |----|

The learner multiplies the value of `next_observation` by gamma times `discount`: the last gamma is not in `discount`.

Source: Acme, `NStepTransitionAdder`; docs/compatibility.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.errors import StructureError
from reverb_writer.leaves import stored_dtype
from reverb_writer.nests import named_leaves
from reverb_writer.steps import BOUNDARY_MARKS

Array = npt.NDArray[Any]

_NEEDED = ("observation", "action", "reward", "discount")
_MARKERS = frozenset({"step_type", "next_step_type", "is_first", "is_last", "is_terminal", "terminated", "truncated"})


def _as_step(step: Any) -> dict[str, Any]:
    """Return the fields of a step."""
    fields = step._asdict() if hasattr(step, "_asdict") else step
    missing = [name for name in _NEEDED if not isinstance(fields, Mapping) or name not in fields]
    if missing:
        raise StructureError(f"a step for n-step transitions has no {missing}; it needs {[*_NEEDED]}.")
    return dict(fields)


def _is_boundary(fields: Mapping[str, Any]) -> Any:
    """Return whether a step is the last of its episode, as it says: a flag, or [N] flags."""
    for name, last in BOUNDARY_MARKS:
        if name in fields:
            return np.asarray(fields[name]) == last
    raise StructureError("a step for n-step transitions needs `is_last` or `step_type`, or pass `end_of_episode`.")


def _without_markers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that go with a transition."""
    return {name: value for name, value in fields.items() if name not in _MARKERS}


class _Ring(NamedTuple):
    """Starts of transitions: the step with index i of an episode is in row i % n."""

    steps: Any  # leaves [n, N, ...] of the steps without markers
    rewards: Array  # [n, N, ...] float64, the rewards since each start, discounted
    discounts: Array  # [n, N, ...] float64, their discounts


class _VectorNStep:
    """Fold the steps of N environments; see `NStepTransform`.

    The starts of transitions lie in a ring of n rows for each environment, all in arrays [n, N, ...]: a call folds the
    steps of all environments at once.
    """

    def __init__(self, observer: Any, n: int, gamma: float, num_envs: int) -> None:
        """Begin with no episodes."""
        self._observer, self._n, self._gamma, self._num_envs = observer, n, gamma, num_envs
        self._env_ids = np.arange(num_envs)
        self._ring: _Ring | None = None
        self._counts = np.zeros(num_envs, np.int64)  # steps of each ongoing episode
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Add a step of some environments, and pass on the transitions to its observations."""
        fields = _as_step(step)
        ends = self._flags("end_of_episode", _is_boundary(fields) if end_of_episode is None else end_of_episode)
        present = self._flags("env_mask", True if env_mask is None else env_mask)
        fields = {name: tree.map_structure(np.asarray, value) for name, value in fields.items()}
        ring = self._ring or self._new_ring(fields)
        self._pass_on(ring, fields["observation"], present, present & ends)
        self._ring, self._num_passed = ring, 0
        self._push(ring, fields, present & ~ends)
        self._counts[present & ends] = 0

    def reset(self) -> None:
        """Forget all episodes; transitions that were passed on stay."""
        self._counts[:], self._num_passed = 0, 0

    def _pass_on(self, ring: _Ring, observation: Any, present: Array, ending: Array) -> None:
        """Pass on the oldest start of each environment, and all starts of those whose episode ends."""
        held = np.minimum(self._counts, self._n)
        rounds = [present & (held > 0), *(ending & (held > index) for index in range(1, self._n))]
        rounds = [env_mask for env_mask in rounds if env_mask.any()]
        for index in range(self._num_passed, len(rounds)):
            rows = (self._counts - held + index) % self._n
            chosen = tree.map_structure(lambda leaf, at=rows: leaf[at, self._env_ids], ring.steps)
            transition = {
                **chosen,
                "reward": ring.rewards[rows, self._env_ids].astype(chosen["reward"].dtype),
                "discount": ring.discounts[rows, self._env_ids].astype(chosen["discount"].dtype),
                "next_observation": observation,
            }
            last = ending & (held == index + 1)
            self._observer(transition, end_of_episode=last, env_mask=rounds[index])
            self._num_passed = index + 1

    def _push(self, ring: _Ring, fields: Mapping[str, Any], acting: Array) -> None:
        """Add a reward and a discount to all starts, and a start; rows that hold none become what is never read."""
        reward, discount = (fields[name].astype(np.float64) for name in ("reward", "discount"))
        is_acting = acting.reshape((-1, *(1,) * (reward.ndim - 1)))
        weights = self._gamma * ring.discounts
        weights = weights.reshape((*weights.shape, *(1,) * (reward.ndim - discount.ndim)))
        np.add(ring.rewards, weights * reward, out=ring.rewards, where=is_acting)
        is_acting = acting.reshape((-1, *(1,) * (discount.ndim - 1)))
        np.multiply(ring.discounts, self._gamma * discount, out=ring.discounts, where=is_acting)
        rows, env_ids = (self._counts % self._n)[acting], self._env_ids[acting]
        new = _Ring(_without_markers(fields), reward, discount)
        for held, leaf in zip(tree.flatten(ring), tree.flatten(new), strict=True):
            held[rows, env_ids] = leaf[acting]
        self._counts[acting] += 1

    def _new_ring(self, fields: Mapping[str, Any]) -> _Ring:
        """Return a ring for steps like this one."""
        reward, discount = fields["reward"], fields["discount"]
        if tree.is_nested(reward) or discount.shape not in (reward.shape, reward.shape[:1]):
            raise StructureError("`reward` must be an array [N, ...], and `discount` [N] or of the reward's shape.")
        for path, leaf in zip(*named_leaves(dict(fields), "a step"), strict=True):
            if leaf.shape[:1] != (self._num_envs,):
                raise StructureError(f"leaf `{path}`: shape {leaf.shape}, expected ({self._num_envs}, ...).")

        def zeros(leaf: Array, dtype: Any = None) -> Array:
            return np.zeros((self._n, *leaf.shape), stored_dtype(leaf.dtype) if dtype is None else dtype)

        steps = tree.map_structure(zeros, _without_markers(fields))
        return _Ring(steps, zeros(reward, np.float64), zeros(discount, np.float64))

    def _flags(self, name: str, flags: Any) -> Array:
        array = np.asarray(flags, bool)
        if array.shape not in ((), (self._num_envs,)):
            raise StructureError(f"`{name}` has shape {array.shape}, expected ({self._num_envs},): one an environment.")
        return np.broadcast_to(array, self._num_envs)


class _Start(NamedTuple):
    """The first step of transitions, with the rewards and discounts so far: a number or an array for each leaf."""

    step: Mapping[str, Any]
    rewards: list[Any]
    discounts: list[Any]


class _SingleNStep:
    """Fold the steps of one environment; see `NStepTransform`. Rewards and discounts may be nests."""

    def __init__(self, observer: Any, n: int, gamma: float) -> None:
        """Begin with no episode."""
        self._observer, self._n, self._gamma = observer, n, gamma
        self._starts: list[_Start] = []
        self._before: Mapping[str, Any] | None = None
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: bool | None = None, env_mask: None = None) -> None:
        """Add a step, and pass on the transition to its observation; at the end of an episode, all that remain."""
        if env_mask is not None:
            raise StructureError(
                "`env_mask` is for steps of several environments. Pass `num_envs` to `NStepTransform`."
            )
        fields = _as_step(step)
        is_last = bool(_is_boundary(fields) if end_of_episode is None else end_of_episode)
        starts = self._starts
        if self._before is not None:
            rewards, discounts = _leaves(self._before)
            starts = [
                _Start(
                    start.step,
                    [
                        total + self._gamma * so_far * reward
                        for total, so_far, reward in zip(start.rewards, start.discounts, rewards, strict=True)
                    ],
                    [
                        self._gamma * so_far * discount
                        for so_far, discount in zip(start.discounts, discounts, strict=True)
                    ],
                )
                for start in starts[max(0, len(starts) + 1 - self._n) :]
            ]
            starts.append(_Start(self._before, [r + 0 * d for r, d in zip(rewards, discounts, strict=True)], discounts))
            transitions = [_transition(start, fields) for start in (starts if is_last else starts[:1])]
            for index in range(self._num_passed, len(transitions)):
                self._observer(transitions[index], end_of_episode=is_last and index == len(transitions) - 1)
                self._num_passed = index + 1
        self._num_passed = 0
        self._starts = [] if is_last else starts
        self._before = None if is_last else fields

    def reset(self) -> None:
        """Forget the episode; transitions that were passed on stay."""
        self._starts, self._before, self._num_passed = [], None, 0


def _leaves(step: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return rewards and discounts as floats or arrays; if only one of them is a nest, the other is repeated."""
    rewards, discounts = ([*map(_as_float, tree.flatten(step[name]))] for name in ("reward", "discount"))
    if not tree.is_nested(step["discount"]):
        discounts *= len(rewards)
    if not tree.is_nested(step["reward"]):
        rewards *= len(discounts)
    if len(rewards) != len(discounts):
        raise StructureError(
            f"{len(rewards)} rewards and {len(discounts)} discounts, expected as many of one as of the other."
        )
    return rewards, discounts


def _as_float(leaf: Any) -> Any:
    array = np.asarray(leaf, np.float64)
    return array if array.ndim else float(array)


def _transition(start: _Start, end: Mapping[str, Any]) -> dict[str, Any]:
    step = start.step
    nest = step["discount"] if tree.is_nested(step["discount"]) else step["reward"]
    return {
        **_without_markers(step),
        "reward": _packed(start.rewards, step["reward"], nest),
        "discount": _packed(start.discounts, step["discount"], nest),
        "next_observation": end["observation"],
    }


def _packed(values: list[Any], like: Any, nest: Any) -> Any:
    """Put values into `nest`, in the dtypes of the leaves of `like`."""
    dtypes = [np.asarray(leaf).dtype for leaf in tree.flatten(like)]
    dtypes *= len(values) if len(dtypes) < len(values) else 1
    return tree.unflatten_as(nest, [np.asarray(value, dtype)[()] for value, dtype in zip(values, dtypes, strict=True)])


class NStepTransform:
    """Fold steps into transitions over n of them, and pass those on to an observer.

    Takes steps as `reverb_writer.environments` records them, or any dict or named tuple (such as `Trajectory`) with
    `observation`, `action`, `reward` and `discount`, where reward and discount are results of the action, and only the
    observation of an episode's last step counts. Passes on dicts of `observation`, `action`, `reward`, `discount`,
    `next_observation` and the other fields of the first of the n steps, without markers. Used from one thread at a
    time.

    In front of a `TrajectoryObserver`, steps have leaves [N, ...], and each environment has its own episodes.

    Attributes:
        num_envs: N, or None for steps of one environment.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=1)
        env = rw.environments.record(env, rw.environments.NStepTransform(observer, n_step=3, discount=0.99))
    """

    def __init__(self, observer: Any, n_step: int, discount: float, *, num_envs: int | None = None) -> None:
        """Begin with no episode.

        Args:
            observer: called with each transition and `end_of_episode`, such as a `TrajectoryObserver`. With
                `sequence_length=1` a transition is an item. With `num_envs`, it is also called with `env_mask`.
            n_step: n, maximum of steps in a transition, >= 1; the first and the last transitions of an episode have
                fewer.
            discount: gamma, in [0, 1].
            num_envs: N, environments that step together, >= 1; None for the observer's `num_envs`, if it has one.

        Raises:
            SpecError: a number out of range.
        """
        n, gamma = integer("n_step", n_step, minimum=1), check_fraction("discount", discount)
        num_envs = getattr(observer, "num_envs", None) if num_envs is None else num_envs
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._observer, self._n = observer, n
        self._fold = (
            _SingleNStep(observer, n, gamma)
            if self.num_envs is None
            else _VectorNStep(observer, n, gamma, self.num_envs)
        )

    def __repr__(self) -> str:
        return f"<NStepTransform of {self._n} steps to {self._observer!r}>"

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Add a step, and pass on the transition to its observation; at the end of an episode, all that remain.

        Args:
            step: a dict or a named tuple; kept without copying while a transition of one environment needs it.
            end_of_episode: whether it is the last of its episode, with `num_envs` [N] booleans; None to read `is_last`
                or `step_type`.
            env_mask: [N] booleans, which environments have a step here; None for all. With `num_envs` only.

        Raises:
            StructureError: it lacks a field, or has different numbers of rewards and discounts. Nothing changed.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Nothing changed, except that some
                of the transitions may have been passed on; a call with the same step passes on the others.
        """
        self._fold(step, end_of_episode=end_of_episode, env_mask=env_mask)

    def reset(self) -> None:
        """Forget the episode, or those of all environments; transitions that were passed on stay."""
        self._fold.reset()
