"""Fold the steps of an environment into transitions over n steps, for an observer.

    gamma = 0.5, discounts 1, n = 3           one transition per line, in the order of the observer's calls

    observation   s0    s1    s2    s3   s4   from   to   reward                    discount
    reward           2     3     5     7      s0     s1   2                         1
                  |-----|                     s0     s2   2 + 3/2                   1/2
                  |-----------|               s0     s3   2 + 3/2 + 5/4             1/4
                  |-----------------|         s1     s4   3 + 5/2 + 7/4             1/4
                        |----------------|    s2     s4   5 + 7/2                   1/2     the episode is over:
                              |----------|    s3     s4   7                         1       all remaining ones
                                    |----|

The learner multiplies the value of `next_observation` by gamma times `discount`: the last gamma is not in `discount`.

Source: Acme, `NStepTransitionAdder`; docs/how-to/from-acme.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import env_flags
from reverb_writer.nests import fields_of, packer, structure_of
from reverb_writer.steps import MARKER_NAMES, StepStructure, boundary_steps

Array = npt.NDArray[Any]

_NEEDED = ("observation", "action", "reward", "discount")
_FOLDED = ("reward", "discount")


class _Ring:
    """Starts of transitions: the step with index i of an episode is in row i % n.

    Attributes:
        steps: leaves of the steps, [n, N, ...], without markers, rewards and discounts.
        rewards: discounted sums of rewards since each start, [n, N, ...] float64.
        discounts: products of discounts and gammas since each start, [n, N, ...] float64.
    """

    def __init__(self, fields: Mapping[str, Any], n: int, num_envs: int | None) -> None:
        """Make a ring for steps like `fields`."""
        self._structure = StepStructure(fields, batch_size=num_envs)
        self._is_single = num_envs is None
        self._pack = packer(structure_of({name: part for name, part in fields.items() if name not in _FOLDED}))
        dtypes, shapes = self._structure.dtypes, self._structure.shapes
        names = [path.partition("/")[0] for path in self._structure.paths]
        others = [number for number, name in enumerate(names) if name not in _FOLDED]
        rewards, discounts = ([number for number, name in enumerate(names) if name == wanted] for wanted in _FOLDED)
        self._pack_folded = packer(structure_of(fields["discount" if len(discounts) > 1 else "reward"]))
        # If only the rewards or only the discounts are a nest, the other leaf is repeated.
        if not tree.is_nested(fields["discount"]):
            discounts *= len(rewards)
        if not tree.is_nested(fields["reward"]):
            rewards *= len(discounts)
        try:
            pairs = zip(rewards, discounts, strict=True)
            totals = [np.broadcast_shapes(shapes[reward], shapes[discount]) for reward, discount in pairs]
        except ValueError:
            raise StructureError(
                f"{len(rewards)} rewards and {len(discounts)} discounts, expected as many of one as of the other, of "
                "shapes that broadcast against each other."
            ) from None
        self._at = others, rewards, discounts
        # Sums of rewards and products of discounts have fractions.
        floats = [dtype if dtype.kind == "f" else np.dtype(np.float32) for dtype in dtypes]
        self._folded_dtypes = [[floats[number] for number in at] for at in (rewards, discounts)]
        rows = (n, num_envs or 1)
        self.steps = [np.zeros((*rows, *shapes[number]), dtypes[number]) for number in others]
        self.rewards = [np.zeros((*rows, *shape)) for shape in totals]
        self.discounts = [np.zeros((*rows, *shapes[number])) for number in discounts]

    def split(self, fields: Mapping[str, Any], index: int) -> tuple[list[Array], list[Array], list[Array]]:
        """Return rows of `steps`, `rewards` and `discounts` for a step, leaves [N, ...], or [1, ...] if single."""
        leaves = self._structure.flatten(fields, index)
        arrays = [np.asarray(leaf, dtype) for leaf, dtype in zip(leaves, self._structure.dtypes, strict=True)]
        if self._is_single:
            arrays = [array[None] for array in arrays]
        others, *folded = self._at
        rewards, discounts = ([arrays[number].astype(np.float64) for number in at] for at in folded)
        rewards = [_widened(row, total.ndim - 1, 1) for row, total in zip(rewards, self.rewards, strict=True)]
        return [arrays[number] for number in others], rewards, discounts

    def transition(self, rows: Array, env_ids: Array) -> dict[str, Any]:
        """Return the steps of these starts with folded rewards and discounts, as float32 if they were integers."""
        leaves, rewards, discounts = (
            [leaf[rows, env_ids] for leaf in column] for column in (self.steps, self.rewards, self.discounts)
        )
        if self._is_single:
            leaves, rewards, discounts = ([leaf[0] for leaf in column] for column in (leaves, rewards, discounts))
        reward, discount = (
            self._pack_folded([leaf.astype(dtype) for leaf, dtype in zip(column, dtypes, strict=True)])
            for column, dtypes in zip((rewards, discounts), self._folded_dtypes, strict=True)
        )
        return {**self._pack(leaves), "reward": reward, "discount": discount}


class NStepTransform:
    """Fold steps into transitions over n steps, and pass the transitions to an observer.

    Steps are dicts from `reverb_writer.environments`, or any dicts or named tuples (such as `Trajectory`) with
    `observation`, `action`, `reward` and `discount`; reward and discount are results of the action. An episode's last
    step only supplies its observation. Transitions are dicts of `observation`, `action`, `reward`, `discount`,
    `next_observation` and the other fields of the first of the n steps, without markers. Not thread-safe.

    With `num_envs`, steps have leaves [N, ...], and each environment has its own episodes.

    Attributes:
        num_envs: N, number of environments; None for steps of one environment.

    Example:
        observer = rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=1)
        env = rw.environments.record(env, rw.environments.NStepTransform(observer, n_step=3, discount=0.99))
    """

    def __init__(self, observer: Any, n_step: int, discount: float, *, num_envs: int | None = None) -> None:
        """Begin with no episode.

        Args:
            observer: called with each transition and `end_of_episode`, such as a `TrajectoryObserver`. With
                `sequence_length=1` a transition is an item. With `num_envs`, it is also called with `env_mask`.
            n_step: n, maximum number of steps in a transition, >= 1; the first and last transitions of an episode have
                fewer.
            discount: gamma, in [0, 1].
            num_envs: N, number of environments that step together, >= 1; None for the observer's `num_envs`, if any.

        Raises:
            SpecError: a number is out of range.
        """
        self._observer = observer
        self._n, self._gamma = integer("n_step", n_step, minimum=1), check_fraction("discount", discount)
        num_envs = getattr(observer, "num_envs", None) if num_envs is None else num_envs
        self.num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._env_ids = np.arange(self.num_envs or 1)  # one environment is a row of leaves [1, ...]
        self.reset()

    def __repr__(self) -> str:
        return f"<NStepTransform of {self._n} steps to {self._observer!r}>"

    def reset(self) -> None:
        """Forget the ongoing episodes; transitions that the observer already has remain."""
        self._ring: _Ring | None = None
        self._counts = np.zeros(len(self._env_ids), np.int64)  # steps of each ongoing episode
        self._num_passed = 0

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Add a step, and pass on the transition that ends at it; at the end of an episode, all remaining ones.

        Args:
            step: a dict or a named tuple; copied.
            end_of_episode: whether the step is the last of its episode, [N] with `num_envs`; None to read `is_last` or
                `step_type`.
            env_mask: whether each environment has a step, [N] booleans; None for all. With `num_envs` only.

        Raises:
            StructureError: the step lacks a field, has different numbers of rewards and discounts, or does not fit the
                first step. Nothing changed.
            SpecError: `env_mask` without `num_envs`.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Nothing changed, except that the
                observer may have some of the transitions; a call with the same step passes on the others.
        """
        if self.num_envs is None and env_mask is not None:
            raise SpecError("`env_mask` is for several environments. Pass `num_envs` to `NStepTransform`.")
        fields = fields_of(step) or {}
        missing = [name for name in _NEEDED if name not in fields]
        if missing:
            raise StructureError(f"a step for n-step transitions has no {missing}; it needs {[*_NEEDED]}.")
        if end_of_episode is None:
            end_of_episode = boundary_steps(fields)
            if end_of_episode is None:
                raise StructureError("n-step transitions need `is_last` or `step_type` in steps, or `end_of_episode`.")
        ends = env_flags("end_of_episode", end_of_episode, self.num_envs)
        present = self._env_ids >= 0 if env_mask is None else env_flags("env_mask", env_mask, self.num_envs)
        acting, ending = present & ~ends, present & ends
        ring, new = self._ring, None
        if acting.any():  # a last step only supplies its observation
            step_fields = {name: value for name, value in fields.items() if name not in MARKER_NAMES}
            ring = ring or _Ring(step_fields, self._n, self.num_envs)
            new = ring.split(step_fields, int(self._counts.max()))
        if ring is None:  # no step precedes this last one
            return
        self._pass_on(ring, fields["observation"], present, ending)
        self._ring, self._num_passed = ring, 0
        if new is not None:
            self._push(ring, new, acting)
        self._counts[ending] = 0

    def _pass_on(self, ring: _Ring, observation: Any, present: Array, ending: Array) -> None:
        """Pass on the transition from each environment's oldest start, or from all starts where an episode ends."""
        held = np.minimum(self._counts, self._n)
        for index in range(self._num_passed, self._n):
            env_mask = (ending if index else present) & (held > index)
            if not env_mask.any():
                return
            rows = (self._counts - held + index) % self._n
            transition = {**ring.transition(rows, self._env_ids), "next_observation": observation}
            last = ending & (held == index + 1)
            if self.num_envs is None:
                self._observer(transition, end_of_episode=bool(last[0]))
            else:
                self._observer(transition, end_of_episode=last, env_mask=env_mask)
            self._num_passed = index + 1

    def _push(self, ring: _Ring, new: tuple[list[Array], list[Array], list[Array]], acting: Array) -> None:
        """Add a reward and a discount to all starts, and then a start; rows without a start are never read."""
        for total, so_far, reward, discount in zip(ring.rewards, ring.discounts, *new[1:], strict=True):
            weights = self._gamma * _widened(so_far, total.ndim, 2)
            np.add(total, weights * reward, out=total, where=_widened(acting, reward.ndim, 1))
            np.multiply(so_far, self._gamma * discount, out=so_far, where=_widened(acting, discount.ndim, 1))
        env_ids = self._env_ids[acting]
        rows = self._counts[env_ids] % self._n
        for column, added in zip((ring.steps, ring.rewards, ring.discounts), new, strict=True):
            for held, leaf in zip(column, added, strict=True):
                held[rows, env_ids] = leaf[env_ids]
        self._counts += acting


def _widened(array: Array, ndim: int, axis: int) -> Array:
    """Return an array with `ndim` axes; new ones are inserted at `axis`."""
    return array.reshape(*array.shape[:axis], *(1,) * (ndim - array.ndim), *array.shape[axis:])
