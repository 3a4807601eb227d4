"""The fields of transitions found in steps of any form: observation, action, reward, done, truncated.

A boundary step at the end of a trajectory (TF-Agents, RLDS) only holds the final observation: n steps are n - 1
transitions. Without a boundary step each step is a transition; the final observation is known only if it was stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.files.manifest import Manifest
from reverb_writer.nests import fields_of, map_present, shapes_text
from reverb_writer.slices.markers import read_markers

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
    # Otherwise the markers of `slices.markers`, and the end flags of the manifest.
    "done": ("dones",),
    "truncated": ("timeout", "timeouts", "time_outs"),
    # Otherwise the next step's observation.
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
        reward: the reward of the action.
        done: bool, whether the transition is the last of its trajectory.
        truncated: bool, whether a limit and not the environment ended the trajectory, so that its final state has
            a value.
        next_observation: observation after the action, in the same trajectory. After the last step it is the final
            observation; if none was stored, the last observation is repeated.
        next_privileged_observation: the critic's own observation after the action, or None.
        is_first: bool, whether the transition is the first delivered one of its trajectory.
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


def names_of_fields(given: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the possible names of each field: the given name, or the usual names."""
    if unknown := set(given) - set(_NAMES):
        raise SpecError(f"`fields` has {', '.join(sorted(unknown))}, expected some of {', '.join(_NAMES)}.")
    names = {field: (given[field],) if field in given else usual for field, usual in _NAMES.items()}
    for field in ("observation", "privileged_observation"):
        if field in given and f"next_{field}" not in given:
            names[f"next_{field}"] = ()  # the usual name belongs to another observation
    return names


def read_transitions(steps: Any, manifest: Manifest, names: Mapping[str, tuple[str, ...]]) -> TransitionBatch:
    """Return the transitions of a trajectory, fields [T, ...], views where possible, without `is_first` and `mask`.

    A reward [T, 1] becomes [T].
    """
    named = fields_of(steps) or {}
    found = {field: next((named[name] for name in names[field] if name in named), None) for field in names}
    for field in ("observation", "action", "reward"):
        if found[field] is None:
            there = ", ".join(map(str, named)) or "no names"
            raise StructureError(f"steps have {there}, but no `{field}`. Name it: fields={{{field!r}: ...}}.")
    for field in ("observation", "privileged_observation"):
        before, after = found[field], found[f"next_{field}"]
        if before is None:
            found[f"next_{field}"] = None
        elif after is None:  # not stored: take the next step's observation
            if not manifest.boundary_step:  # nothing follows the last step
                before = tree.map_structure(lambda leaf: np.concatenate([leaf, leaf[-1:]]), before)
            found[field], found[f"next_{field}"] = before, tree.map_structure(lambda leaf: leaf[1:], before)
        elif _form(after) != _form(before):
            raise StructureError(
                f"`next_{field}` is {shapes_text(after)}, expected {shapes_text(before)} as `{field}`. If it is "
                "something else, rename it."
            )
    found["reward"] = _flat(found["reward"])
    found["done"], found["truncated"] = _ends(steps, found["done"], found["truncated"], manifest)
    num_transitions = manifest.num_transitions
    rows = {field: map_present(lambda leaf: leaf[:num_transitions], nest) for field, nest in found.items()}
    return TransitionBatch(**rows, is_first=None, mask=None)


class Cursor:
    """The position in one trajectory, whose `transitions`, fields [T, ...], are in memory."""

    def __init__(self, transitions: TransitionBatch, start: int) -> None:
        """Begin at transition number `start`; a shorter trajectory begins at 0."""
        num_transitions = len(transitions.reward)
        start = start if start < num_transitions else 0
        self.num_left = num_transitions - start
        is_first, mask = np.arange(num_transitions) == start, np.ones(num_transitions, bool)
        self.transitions = transitions._replace(is_first=is_first, mask=mask)
        self._columns: list[Array | None] = tree.flatten(self.transitions)

    def fill(self, targets: Sequence[Array | None], at: int, env: int, room: int) -> int:
        """Copy transitions into rows `at` to `at + room` of column `env`, leaves [T, N, ...]; return their number."""
        length = min(room, self.num_left)
        start = len(self.transitions.reward) - self.num_left
        for target, column in zip(targets, self._columns, strict=True):
            if target is not None and column is not None:
                target[at : at + length, env] = column[start : start + length]
        self.num_left -= length  # one assignment, which an interrupt cannot divide
        return length


def _ends(steps: Any, stored: Any, limits: Any, manifest: Manifest) -> tuple[Flags, Flags]:
    """Return `done` and `truncated` of the steps: stored values, and the manifest's at the end."""
    done, truncated = np.zeros((2, manifest.num_steps), bool)
    is_recorded = False
    if not manifest.boundary_step:
        markers = read_markers(steps)
        ends = markers.ends if stored is None else _flat(stored) != 0
        limits = markers.truncated if limits is None else _flat(limits) != 0
        is_recorded = ends is not None
        done[:] = ends if is_recorded else False
        truncated[:] = False if limits is None else limits
    last = manifest.num_transitions - 1
    if last >= 0:
        if manifest.terminated is None and manifest.truncated is None:
            truncated[last] |= is_recorded and not done[last]  # the recording stopped before the episode did
        else:
            truncated[last] |= bool(manifest.truncated) and not manifest.terminated
        done[last] = True
    return done, truncated


def _form(nest: Any) -> list[tuple[Any, ...]]:
    return [(path, leaf.dtype, leaf.shape) for path, leaf in tree.flatten_with_path(nest)]


def _flat(column: Any) -> Array:
    array = np.asarray(column)
    return array[:, 0] if array.ndim > 1 and array.shape[1:] == (1,) else array
