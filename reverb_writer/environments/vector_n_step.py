"""Fold the steps of N environments that step together into transitions over n steps.

The starts of transitions lie in a ring of n rows for each environment, all in arrays [n, N, ...]: a call folds the
steps of all environments at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.environments.n_step_fields import as_step, is_boundary, without_markers
from reverb_writer.errors import StructureError
from reverb_writer.leaves import stored_dtype
from reverb_writer.nests import named_leaves

Array = npt.NDArray[Any]


class _Ring(NamedTuple):
    """Starts of transitions: the step with index i of an episode is in row i % n.

    Attributes:
        steps: leaves [n, N, ...] of the steps without markers.
        rewards: [n, N, ...] float64, the rewards since each start, discounted.
        discounts: [n, N, ...] float64, their discounts.
    """

    steps: Any
    rewards: Array
    discounts: Array


class VectorNStep:
    """Fold the steps of N environments; see `NStepTransform`."""

    def __init__(self, observer: Any, n: int, gamma: float, num_envs: int) -> None:
        """Begin with no episodes."""
        self._observer, self._n, self._gamma, self._num_envs = observer, n, gamma, num_envs
        self._env_ids = np.arange(num_envs)
        self._ring: _Ring | None = None
        self._counts = np.zeros(num_envs, np.int64)  # steps of each ongoing episode
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Add a step of some environments, and pass on the transitions to its observations."""
        fields = as_step(step)
        ends = self._flags("end_of_episode", is_boundary(fields) if end_of_episode is None else end_of_episode)
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
        new = _Ring(without_markers(fields), reward, discount)
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

        steps = tree.map_structure(zeros, without_markers(fields))
        return _Ring(steps, zeros(reward, np.float64), zeros(discount, np.float64))

    def _flags(self, name: str, flags: Any) -> Array:
        array = np.asarray(flags, bool)
        if array.shape not in ((), (self._num_envs,)):
            raise StructureError(f"`{name}` has shape {array.shape}, expected ({self._num_envs},): one an environment.")
        return np.broadcast_to(array, self._num_envs)
