"""The fields of transitions found in the rows of a trajectory: observation, action, reward, done, truncated.

    rows         kinds            transitions                            next observation
    -----------  ---------------  -------------------------------------  ------------------------------------------
    0 1 2 3 B    3 2 2 2 12       0 1 2 3, and 3 is terminal             of the next row; B is a boundary row
    0 1 2 3      3 2 2 14         0 1 2 3, and 3 is terminal             of row 3: its own, which has no value
    0 1 2 3      3 2 2 2, or 6    0 1 2, and 2 is truncated              of the next row; row 3 is left out

Row 3 of the last trajectory is left out because no row holds the observation after it, unless each row has a
`next_observation` of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.nests import fields_of, map_present, shapes_text
from reverb_writer.rows.kinds import pairs

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

_OBSERVATION = ("observation", "observations", "obs")
_PRIVILEGED = (
    *("privileged_observation", "privileged_observations"),
    *("critic_observation", "critic_observations", "critic_obs"),
)
_NAMES: Final = {
    "observation": _OBSERVATION,
    "privileged_observation": _PRIVILEGED,
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    # Otherwise the next row's observation.
    "next_observation": tuple(f"next_{name}" for name in _OBSERVATION),
    "next_privileged_observation": tuple(f"next_{name}" for name in _PRIVILEGED),
}
"""The usual names of each field; the first one that a step has is used."""


class TransitionBatch(NamedTuple):
    """One transition of N environments, leaves [N, ...], or T of each, leaves [T, N, ...].

    Attributes:
        observation: observation before the action, an array or a nest as stored.
        privileged_observation: the critic's own observation before the action, or None.
        action: the action taken.
        reward: the reward of the action, an array or a nest as stored.
        done: bool, whether the transition is the last one of its episode in the file.
        truncated: bool, whether the transition is done although the environment did not end the episode: a limit ended
            it, or the recording stopped. Its final state has a value.
        next_observation: observation after the action, in the same episode. Where the environment ended the episode and
            no final observation was stored, the last observation is repeated.
        next_privileged_observation: the critic's own observation after the action, or None.
        is_first: bool, whether the transition is the first delivered one of its trajectory or episode.
        mask: bool, False for an environment without a trajectory; its other fields are zeros.
    """

    observation: Any
    privileged_observation: Any
    action: Any
    reward: Any
    done: Any
    truncated: Any
    next_observation: Any
    next_privileged_observation: Any
    is_first: Any
    mask: Any

    @property
    def is_terminal(self) -> Any:
        """Whether the environment ended the episode with this transition, so that its next state has no value."""
        return self.done & ~self.truncated


def names_of_fields(given: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the possible names of each field: the given name, or the usual names."""
    if unknown := set(given) - set(_NAMES):
        raise SpecError(f"`fields` has {', '.join(sorted(unknown))}, expected some of {', '.join(_NAMES)}.")
    names = {field: (given[field],) if field in given else usual for field, usual in _NAMES.items()}
    for field in ("observation", "privileged_observation"):
        if field in given and f"next_{field}" not in given:
            names[f"next_{field}"] = ()  # the usual name belongs to another observation
    return names


def read_transitions(
    steps: Any, kinds: Array, names: Mapping[str, tuple[str, ...]], *, repeats_last: bool = False
) -> tuple[TransitionBatch, Array]:
    """Return the transitions of a trajectory, and the kinds of the rows whose actions are none.

    Args:
        steps: the rows, leaves [T, ...].
        kinds: their kinds, uint8 [T].
        names: the possible names of each field.
        repeats_last: whether each action without a next observation is a transition whose next observation is its own.

    Returns:
        Fields [n, ...], views where possible. `mask` is True everywhere. A reward [n, 1] becomes [n].
    """
    named = fields_of(steps) or {}
    found = {field: next((named[name] for name in names[field] if name in named), None) for field in names}
    for field in ("observation", "action", "reward"):
        if found[field] is None:
            there = ", ".join(map(str, named)) or "no names"
            raise StructureError(f"steps have {there}, but no `{field}`. Name it: fields={{{field!r}: ...}}.")
    has_next = found["next_observation"] is not None
    is_action = rows.has(kinds, rows.ACTION)
    is_transition, is_terminal, _ = pairs(kinds, last_row="action")
    is_followed = is_transition & ~rows.has(kinds, rows.LAST)
    chosen = is_action if has_next or repeats_last else is_transition
    at = np.flatnonzero(chosen)
    own, following = _indices(at), _indices(at + is_followed[at])
    for field in ("observation", "privileged_observation"):
        before, after = found[field], found[f"next_{field}"]
        if before is None:
            found[f"next_{field}"] = None
        elif after is None:  # not stored: take the next row's observation
            found[f"next_{field}"] = map_present(lambda leaf: leaf[following], before)
        elif _form(after) != _form(before):
            raise StructureError(
                f"`next_{field}` is {shapes_text(after)}, expected {shapes_text(before)} as `{field}`. If it is "
                "something else, rename it."
            )
        else:
            found[f"next_{field}"] = map_present(lambda leaf: leaf[own], after)
    for field in ("observation", "privileged_observation", "action", "reward"):
        found[field] = map_present(lambda leaf: leaf[own], found[field])
    found["reward"] = map_present(_flat, found["reward"])
    goes_on = is_followed[at[:-1]] & (at[1:] == at[:-1] + 1)
    done, is_first = np.ones(len(at), bool), np.ones(len(at), bool)
    done[:-1], is_first[1:] = ~goes_on, ~goes_on
    truncated = done & ~is_terminal[at]
    transitions = TransitionBatch(**found, done=done, truncated=truncated, is_first=is_first, mask=done | True)
    return transitions, kinds[is_action & ~chosen]


class Cursor:
    """The position in one trajectory, whose `transitions`, fields [T, ...], are in memory."""

    def __init__(self, transitions: TransitionBatch, start: int) -> None:
        """Begin at transition number `start`; a shorter trajectory begins at 0."""
        num_transitions = len(transitions.done)
        start = start if start < num_transitions else 0
        self.num_left = num_transitions - start
        is_first = transitions.is_first | (np.arange(num_transitions) == start)
        self.transitions = transitions._replace(is_first=is_first)
        self._columns: list[Array | None] = tree.flatten(self.transitions)

    def fill(self, targets: Sequence[Array | None], at: int, env: int, room: int) -> int:
        """Copy transitions into rows `at` to `at + room` of column `env`, leaves [T, N, ...]; return their number."""
        length = min(room, self.num_left)
        start = len(self.transitions.done) - self.num_left
        into: Any = slice(at, at + length)
        of: Any = slice(start, start + length)
        if length == 1:  # numbers index faster than slices
            into, of = at, start
        for target, column in zip(targets, self._columns, strict=True):
            if target is not None and column is not None:
                target[into, env] = column[of]
        self.num_left -= length  # one assignment, which an interrupt cannot divide
        return length


def _indices(at: Array) -> Array | slice:
    """Return the numbers of rows, or a slice if the rows are neighbours, because a slice makes views."""
    if len(at) and at[-1] - at[0] + 1 == len(at) and (at[1:] > at[:-1]).all():
        return slice(int(at[0]), int(at[-1]) + 1)
    return at


def _form(nest: Any) -> list[tuple[Any, ...]]:
    return [(path, leaf.dtype, leaf.shape) for path, leaf in tree.flatten_with_path(nest)]


def _flat(column: Any) -> Array:
    array = np.asarray(column)
    return array[:, 0] if array.ndim > 1 and array.shape[1:] == (1,) else array
