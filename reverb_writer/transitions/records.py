"""Transitions as named tuples of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tree

from reverb_writer.arrays import Array, pinned
from reverb_writer.errors import StructureError
from reverb_writer.nests import map_present, shapes_text


class Transitions(NamedTuple):
    """Transitions: after `observation`, `action` gave `reward` and led to `next_observation`.

    Leaves are [B, T - 1, ...], or [N - 1, ...] for slices; [B, T, ...] or [N, ...] where `to_transitions` says so. Its
    `repr` shows shapes instead of numbers. A target of values is `reward + gamma * discount * value(next_observation)`.

    Attributes:
        observation: nest.
        action: nest, taken on the observation.
        reward: reward of the action; a nest if the steps have a nest.
        discount: 0 where the environment terminated with this action, otherwise 1, times the stored discount if the
            steps have one. So it is 1 at truncations and cuts. 0 where `mask` is False.
        next_observation: nest like `observation`.
        mask: bool [B, T - 1] or [N - 1], True for transitions. False where the first row of a pair is a boundary row
            or padding, or the two rows belong to different episodes or slices; the other leaves have no meaning there.
        continues: bool [B, T - 1] or [N - 1], True where the next transition of the row follows this one in the same
            episode.
        extras: the other fields of the step in which the action was taken, by name, such as `policy_info` or `seed`,
            without flags. The fields of a field `extras` are among them, such as `log_prob`.
    """

    observation: Any
    action: Any
    reward: Any
    discount: Any
    next_observation: Any
    mask: Array
    continues: Array
    extras: Mapping[str, Any]

    def __repr__(self) -> str:
        """Return the fields with shapes instead of numbers."""
        return shapes_text(self)

    def first(self) -> NStepTransitions:
        """Return the first transition of each window, leaves [B, ...]; views where the library has views.

        Raises:
            StructureError: the transitions are from slices, or are already the first ones.

        >>> import numpy as np
        >>> from reverb_writer.transitions import to_transitions
        >>> steps = {"observation": np.array([[0, 1, 2], [5, 6, 7]]), "action": np.zeros((2, 3))}
        >>> steps |= {"reward": np.ones((2, 3)), "discount": np.ones((2, 3))}
        >>> to_transitions(steps).first().next_observation.tolist()
        [1, 6]
        """
        if self.mask.ndim != 2:  # noqa: PLR2004  # B and T
            raise StructureError(
                f"`first` is for transitions [B, T - 1], got {tuple(self.mask.shape)}. For slices, choose "
                "the rows `batch.slices.first_rows`."
            )
        shape = tuple(self.mask.shape)

        def first(leaf: Any) -> Any:
            return leaf[:, 0] if has_rows(leaf, shape) else leaf

        found = NStepTransitions(*map_present(first, tuple(self)))
        return found._replace(continues=found.mask & ~found.mask)


class NStepTransitions(Transitions):
    """The result of `n_step`, `first` and `dataset.transitions`: `Transitions` that have one target each.

    They do not continue each other, so `continues` is False, and functions of runs of rows refuse them.

    Attributes:
        batch: the `Batch` of the transitions, from `dataset.transitions`: its `info` has keys and weights. Otherwise,
            and after `_replace`, None.
    """

    batch: Any = None

    def pin_memory(self) -> NStepTransitions:
        """Return the transitions with their tensors pinned, for `DataLoader(pin_memory=True)`; `batch` remains."""
        found = NStepTransitions(*map_present(pinned, tuple(self)))
        found.batch = self.batch
        return found


def check_one_target(transitions: Transitions) -> None:
    """Refuse transitions whose reward or discount is a nest."""
    if tree.is_nested(transitions.reward) or tree.is_nested(transitions.discount):
        raise StructureError(
            "`reward` or `discount` is a nest. Choose one of its leaves first: `transitions._replace(reward=...)`."
        )


def has_rows(nest: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the shapes of all leaves begin with this one."""
    if hasattr(nest, "shape"):
        return tuple(nest.shape[: len(shape)]) == shape
    return all(tuple(getattr(leaf, "shape", ()))[: len(shape)] == shape for leaf in tree.flatten(nest))
