"""The kinds of steps that a program writes one by one: from the arguments of the call, or from leaves of the step.

    step has           row of the step        where an episode ends
    -----------------  ---------------------  ---------------------------------------------------------------
    flags of its end   as its layout says     no row is added, unless a final observation is given beside an action
    no such flags      ACTION                 a boundary row follows; or LAST and ACTION without a final observation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer import rows
from reverb_writer.errors import StructureError
from reverb_writer.files.manifest import End, end_of
from reverb_writer.files.unwritten_kinds import kinds_by_rule
from reverb_writer.nests import fields_of, join_paths, named_leaves
from reverb_writer.steps import StepStructure

Kinds = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]


class StepEnd(NamedTuple):
    """The rows of one step of N environments."""

    kinds: Kinds  # [N] of the step's own row
    boundary: Kinds  # [N] of a boundary row after it; 0 for none
    zero_discount: Flags  # [N]

    @property
    def ended(self) -> Flags:
        """Whether the episode of each environment ends, [N]."""
        return rows.has(self.kinds | self.boundary, rows.LAST)  # type: ignore[no-any-return]


class StepKinds:
    """Finds the kinds of each step. Stateless, except for the layout, which the first step decides."""

    def __init__(self, structure: StepStructure, num_envs: int, last_row: rows.LastRow | None) -> None:
        """Find the layout of such steps; raises StructureError if it is ambiguous."""
        self._num_envs = num_envs
        self._layout = layout = rows.layout_of(structure.paths, last_row)
        if layout is not None and layout.last and layout.has_action is None:
            raise rows.ambiguous(layout)
        self._is_flagged = layout is not None and bool(layout.last)
        names = [] if layout is None else [layout.first, *layout.last, layout.terminal, layout.truncated]
        scalars = {path: index for index, path in enumerate(structure.paths) if structure.shapes[index] in ((), (1,))}
        self._indices = {path: scalars[path] for path in names if path is not None and path in scalars}
        self._discount = scalars.get("discount")
        self._has_observation = any(path.partition("/")[0] == "observation" for path in structure.paths)

    def of(
        self, leaves: Sequence[Any], given: Mapping[str, Flags], begins: Flags, zero_discount: Flags, *, has_final: bool
    ) -> StepEnd:
        """Return the kinds of a step, leaves [N, ...] or of one environment.

        Args:
            leaves: leaves in the order of the paths.
            given: `end_of_episode`, `terminated` and `truncated` [N], where the caller gave them.
            begins: [N], whether the step is the first of its episode.
            zero_discount: [N], whether the discount of the row before was 0.
            has_final: whether a final observation is given.

        Raises:
            StructureError: the step contradicts itself.
        """
        nothing, no_rows = np.zeros(self._num_envs, bool), np.zeros(self._num_envs, np.uint8)
        now_zero = nothing if self._discount is None else _flat(leaves[self._discount], self._num_envs) == 0
        kinds = self._shown(leaves, begins, zero_discount & ~begins)
        flagged = rows.has(kinds, rows.LAST)
        terminated, truncated = given.get("terminated", nothing), given.get("truncated", nothing)
        ends = given.get("end_of_episode", terminated | truncated | flagged)
        if self._is_flagged:
            self._check_flags(kinds, flagged, given)
            terminal = rows.has(kinds, rows.TERMINAL) | terminated
            adds = ends & rows.has(kinds, rows.ACTION) & has_final
        else:
            unknown = ends & ~terminated & ~truncated
            if (wrong := unknown & now_zero).any():
                raise StructureError(
                    f"{int(wrong.sum())} steps end an episode with `end_of_episode`, and their `discount` is 0. Pass "
                    "`terminated=` if the environment ended the episode, and `truncated=` if a limit ended it."
                )
            after_end = unknown & zero_discount & ~begins  # a boundary row, because the row before was the last action
            kinds = np.where(after_end, kinds & ~np.uint8(rows.ACTION), kinds)
            terminal = terminated | after_end
            adds = ends & ~after_end & (has_final | (terminated & self._has_observation))
        last = (rows.LAST | rows.TERMINAL * terminal).astype(np.uint8)
        own = np.where(adds, kinds & (rows.FIRST | rows.ACTION), kinds | np.where(ends, last, no_rows))
        return StepEnd(own.astype(np.uint8), np.where(adds, last, no_rows), now_zero)

    def _shown(self, leaves: Sequence[Any], begins: Flags, zero_discount: Flags) -> Kinds:
        """Return the kinds that the leaves show, each row alone."""
        layout, first = self._layout, rows.FIRST * begins.astype(np.uint8)
        if layout is None or not (layout.last or layout.first):
            return first | np.uint8(rows.ACTION)
        flags = {path: _flat(leaves[index], self._num_envs) for path, index in self._indices.items()}
        if self._discount is not None:
            flags["discount"] = _flat(leaves[self._discount], self._num_envs)
        every = np.ones(self._num_envs, bool)
        last_row: rows.LastRow = "action" if layout.has_action else "boundary"
        outcome = layout.shows_outcome and self._is_flagged
        kinds: Kinds = rows.kinds_of(flags, last_row=last_row, starts=every, outcome=outcome)
        if layout.first is None:
            kinds |= first
        if layout.terminal is None and layout.truncated is None and not layout.has_action and self._is_flagged:
            kinds |= rows.TERMINAL * (rows.has(kinds, rows.LAST) & zero_discount).astype(np.uint8)
        return kinds

    def _check_flags(self, kinds: Kinds, flagged: Flags, given: Mapping[str, Flags]) -> None:
        """Refuse arguments that differ from the leaves."""
        assert self._layout is not None  # noqa: S101  # because steps have flags
        names = join_paths(self._layout.last)
        for name in ("terminated", "truncated"):
            wrong = given.get(name, flagged) & ~flagged
            if wrong.any():
                raise StructureError(
                    f"`{name}` is given for {int(wrong.sum())} steps that {names} does not show as last rows. Leave "
                    f"out `{name}`, because these leaves end the episode; or leave out the leaves."
                )
        if "end_of_episode" in given and (flagged & ~given["end_of_episode"]).any():
            raise StructureError(f"`end_of_episode` is False, but {names} shows the last row of an episode. Leave it out.")
        terminal = rows.has(kinds, rows.TERMINAL)
        if self._layout.shows_outcome and (given.get("terminated", terminal) & ~terminal).any():
            raise StructureError("`terminated` is given, but the leaves of the step show another end. Leave it out.")


def kinds_of_episode(
    steps: Any, num_rows: int, terminated: bool | None, truncated: bool | None, last_row: rows.LastRow | None
) -> Kinds:
    """Return the kinds [T] of a whole trajectory that ends as the arguments say, or else as the leaves show.

    Raises:
        StructureError: the arguments differ from the leaves; or as for `rows.kinds_of`.
    """
    layout = rows.layout_of(named_leaves(steps, "`steps`")[0], last_row)
    is_given, ended = (terminated, truncated) != (None, None), bool(terminated or truncated)
    if is_given and (layout is None or not layout.last):
        kinds = np.full(num_rows, rows.ACTION, np.uint8)
        if ended:
            kinds[-1] = (last_row != "boundary") * rows.ACTION | rows.LAST | bool(terminated) * rows.TERMINAL
    else:
        kinds = kinds_by_rule(steps, num_rows, None, last_row)
    if is_given and layout is not None and layout.last:
        if not layout.shows_outcome and terminated:
            kinds[-1] |= rows.has(kinds[-1:], rows.LAST)[0] * np.uint8(rows.TERMINAL)
        expected = End.TERMINATED if terminated else End.TRUNCATED if truncated else End.CUT
        if (found := end_of(kinds)) is not expected:
            raise StructureError(
                f"`terminated` and `truncated` say that the trajectory is {expected.value}, but "
                f"{join_paths(layout.last)} shows that it is {found.value}. Leave out these arguments."
            )
    if layout is None or layout.first is None:
        kinds[0] |= rows.FIRST
    return kinds


def observation_of(structure: StepStructure, leaves: Sequence[Any]) -> Any:
    """Return the observation of a step."""
    return (fields_of(structure.pack(leaves)) or {})["observation"]


def _flat(leaf: Any, num_envs: int) -> Any:
    return np.asarray(leaf).reshape(num_envs)
