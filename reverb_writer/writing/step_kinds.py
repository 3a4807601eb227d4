"""The kind of each row that an observer writes, and the boundary row after an end.

The kind comes from the caller, or from the step's own leaves:

    caller                                        kind of the row           boundary row
    --------------------------------------------  ------------------------  -----------------------------
    terminated=True                               ACTION                    LAST | TERMINAL
    truncated=True, final_observation=...         ACTION                    LAST
    truncated=True                                ACTION | LAST             -
    end_of_episode=True, no flags in the steps    ACTION | LAST             -, because the end is unknown
    leaves of one of the layouts of `rows`        as the leaves say         -
    `write_row`, `extend` with kinds              as the caller says        -

The first row of an episode is FIRST: the row after LAST, or the row whose own leaf says so. The state between two rows
is the kind of the row before, so a step that an interrupt kept out changes nothing.

Flags and kinds are Python numbers for one environment, and arrays [N] for N. The same operators serve both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import env_flags, zeros
from reverb_writer.nests import fields_of, join_paths
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL, LastRow
from reverb_writer.rows.layouts import STEP_FIRST, STEP_LAST, ambiguous, layout_of
from reverb_writer.steps import StepStructure

Kinds = npt.NDArray[np.uint8]
EnvIds = npt.NDArray[np.integer[Any]]

ZERO_DISCOUNT = 32
"""A bit of the state only: the discount of the row before is 0."""

_MAX_KNOWN = 256

START = LAST
"""The state before the first row of a stream."""


class Boundary(NamedTuple):
    """The boundary row of one environment, or the boundary rows of some environments."""

    leaves: Sequence[Any]  # [...], or [N, ...] of all environments
    kind: Any  # or [N]
    env_ids: EnvIds | None  # environments that have one; None for a single environment


class Row(NamedTuple):
    """The kind of a row, or of the rows of N environments."""

    kind: Any  # or [N]
    is_last: Any  # whether the windows of the episode end here, or [N]
    boundary: Boundary | None = None
    num_unknown: int = 0  # ends that do not show whether the environment ended the episode


class StepKinds:
    """The rule of one observer, decided once from the structure of the steps. Not thread-safe.

    Attributes:
        marks_ends: whether a leaf of the steps marks the ends of episodes.
    """

    def __init__(self, structure: StepStructure, last_row: LastRow | None) -> None:
        """Find the leaves that say what a row is.

        Raises:
            StructureError: a flag that marks ends is no scalar.
        """
        self._structure, self._last_row, self._num_envs = structure, last_row, structure.batch_size
        self._any: Any = bool if self._num_envs is None else np.any
        self._never: Any = False if self._num_envs is None else np.zeros(self._num_envs, bool)
        types = dict(zip(structure.paths, zip(structure.dtypes, structure.shapes, strict=True), strict=True))
        scalars = [path for path, (dtype, shape) in types.items() if shape in ((), (1,)) and dtype.kind in "biuf"]
        for name in {"is_last", "step_type"} & types.keys() - set(scalars):
            dtype, shape = types[name]
            raise StructureError(
                f"first step, leaf `{name}`: {dtype} {shape}, expected an integer or a boolean, shape (): it marks the "
                "end of an episode. Remove a batch dimension, or rename the leaf."
            )
        layout = layout_of(scalars, last_row)
        self._ambiguous = layout if layout is not None and layout.last and layout.has_action is None else None
        self._last = layout.last if layout else ()
        self.marks_ends = bool(self._last)
        self._first = layout.first if layout else None
        self._terminal = layout.terminal if layout else None
        self._truncated = layout.truncated if layout and layout.last != (layout.truncated,) else None
        shows_outcome = self.marks_ends and (self._terminal or self._truncated)
        self._discount = layout.discount if layout and not shows_outcome else None
        self._has_action = bool(layout and layout.has_action)
        self._at = {path: index for index, path in enumerate(structure.paths)}
        self._of_observation = [at for path, at in self._at.items() if path.split("/")[0] == "observation"]
        self._observation: StepStructure | None = None
        self._told_by = [self._at[path] for path in (*self._last, self._first, self._terminal, self._truncated) if path]
        self._known: dict[Any, int] = {}  # kinds of rows, by the state before and the flags

    def plain(self, leaves: Sequence[Any], before: int) -> int:
        """Return the kind of a row of one environment of which the caller says nothing; errors as in `row`."""
        if not self.marks_ends and self._first is None:
            return ACTION | FIRST if before & LAST else ACTION
        try:
            key = before, *[leaves[at] for at in self._told_by]
            return self._known[key]
        except (KeyError, TypeError):  # an array cannot be a key
            pass
        if self._ambiguous is not None:
            raise ambiguous(self._ambiguous)
        kind: int = self._told(leaves, before) if self.marks_ends else ACTION | FIRST * self._begins(leaves, before)
        if not (self._has_action and self._discount is not None) and len(self._known) < _MAX_KNOWN:
            with contextlib.suppress(TypeError):
                self._known[key] = kind
        return kind

    def row(
        self,
        leaves: Sequence[Any],
        before: Any,
        env_ids: EnvIds,
        *,
        end_of_episode: Any,
        terminated: Any,
        truncated: Any,
        final_observation: Any,
    ) -> Row:
        """Return the kind of a row, and its boundary row if it has one. Errors change nothing.

        `before` is the state after the row before. With N environments, only those in `env_ids` have a row; the kinds
        of the others have no meaning.
        """
        if self._ambiguous is not None:
            raise ambiguous(self._ambiguous)
        if self.marks_ends:
            if terminated is not None or truncated is not None:
                raise StructureError(
                    f"the steps mark their ends themselves, by {join_paths(self._last)}. Leave out `terminated` and "
                    "`truncated`; or leave these leaves out of the steps, and the observer writes the boundary row."
                )
            kind = self._told(leaves, before, env_ids)
            own_end = end_of_episode is None
            return Row(kind, (kind & LAST) != 0 if own_end else self._flags("end_of_episode", end_of_episode, env_ids))
        kind = ACTION | FIRST * self._begins(leaves, before)
        if terminated is None and truncated is None:
            is_last = self._flags("end_of_episode", end_of_episode, env_ids)
            return self._unmarked_end(leaves, kind, before, is_last) if self._any(is_last) else Row(kind, is_last)
        if end_of_episode is not None:
            raise SpecError("`end_of_episode` repeats `terminated` and `truncated`: leave it out.")
        is_terminal = self._flags("terminated", terminated, env_ids)
        is_last = is_terminal | self._flags("truncated", truncated, env_ids)
        if not self._any(is_last):
            return Row(kind, is_last)
        has_boundary = is_terminal if final_observation is None else is_last
        ends_here = is_last > has_boundary
        kind = kind | LAST * ends_here
        if not self._any(has_boundary):
            return Row(kind, ends_here)
        of_envs = None if self._num_envs is None else has_boundary.nonzero()[0]
        final = self._final_leaves(leaves, final_observation)
        return Row(kind, ends_here, Boundary(final, LAST | TERMINAL * is_terminal, of_envs))

    def block(self, columns: Sequence[npt.NDArray[Any]], before: int) -> Kinds:
        """Return the kinds [T] of rows of one environment, columns [T, ...], that `extend` writes."""
        kinds = np.full(len(columns[0]), ACTION, np.uint8)
        if not self.marks_ends and self._first is None:
            kinds[0] |= FIRST * self._begins((), before)
            return kinds
        for number in range(len(kinds)):
            leaves = [column[number] for column in columns]
            kinds[number] = kind = self.plain(leaves, before)
            before = self.state(kind, leaves)
        return kinds

    def state(self, kind: Any, leaves: Sequence[Any]) -> Any:
        """Return the state after a row."""
        if self._discount is None:
            return kind
        if self._num_envs is None:
            return kind if leaves[self._at[self._discount]] else kind | ZERO_DISCOUNT
        return kind | ZERO_DISCOUNT * (self._value(self._discount, leaves) == 0)

    # ------------------------------------------------------------------------------------------------ what is inside

    def _value(self, path: str, leaves: Sequence[Any]) -> Any:
        leaf = leaves[self._at[path]]
        if self._num_envs is not None:
            return np.asarray(leaf).reshape(self._num_envs)
        return leaf.item() if hasattr(leaf, "item") else np.asarray(leaf).item()  # TensorFlow's have no `item`

    def _flags(self, name: str, given: Any, env_ids: EnvIds) -> Any:
        """Return flags of the caller, False in environments without a row."""
        if given is None:
            return self._never
        if self._num_envs is None:
            return bool(given)
        flags = env_flags(name, given, self._num_envs)
        return flags if len(env_ids) == self._num_envs else flags & np.isin(np.arange(self._num_envs), env_ids)

    def _begins(self, leaves: Sequence[Any], before: Any) -> Any:
        if self._first is None:
            return (before & LAST) != 0
        value = self._value(self._first, leaves)
        return value == STEP_FIRST if self._first == "step_type" else value != 0

    def _told(self, leaves: Sequence[Any], before: Any, env_ids: Any = ...) -> Any:
        """Return the kind of a row whose own leaves say what it is."""
        is_last = self._never
        for path in self._last:
            value = self._value(path, leaves)
            is_last = is_last | (value == STEP_LAST if path == "step_type" else value != 0)
        if self._terminal is not None:
            is_terminal = self._value(self._terminal, leaves) != 0
            if self._any(is_terminal > is_last) and (self._num_envs is None or (is_terminal > is_last)[env_ids].any()):
                raise StructureError(
                    f"`{self._terminal}` is set on a row that {join_paths(self._last)} does not show as a last row. "
                    "Set both on the same row: the row of the final observation, or the row of the last action "
                    "(`last_row='action'`)."
                )
        elif self._truncated is not None:
            is_terminal = self._value(self._truncated, leaves) == 0
        elif self._discount is not None and self._has_action:
            is_terminal = self._value(self._discount, leaves) == 0
        else:
            is_terminal = _follows_zero(before)
        kind = (LAST | ACTION * self._has_action) * is_last | ACTION * (is_last ^ True)
        return kind | TERMINAL * (is_last & is_terminal) | FIRST * self._begins(leaves, before)

    def _unmarked_end(self, leaves: Sequence[Any], kind: Any, before: Any, is_last: Any) -> Row:
        """Return the row of an end that `end_of_episode` alone marks."""
        num_unknown = int(np.sum(is_last)) if self._discount is None or self._last_row is None else 0
        if self._last_row == "boundary":
            is_terminal = is_last & _follows_zero(before)
            kind = kind ^ (ACTION * is_last)
        else:
            is_zero = self._never if self._discount is None else self._value(self._discount, leaves) == 0
            is_terminal = is_last & is_zero
            if self._last_row is None and self._any(is_terminal):
                raise StructureError(
                    "`end_of_episode=True` beside `discount` 0: the environment ended this episode, and the end does "
                    "not say so. Write `observer(step, terminated=terminated, truncated=truncated, "
                    "final_observation=next_observation)`. If the steps end with a row of their own for the final "
                    "observation, pass `last_row='boundary'` to the observer, and `last_row='action'` if they do not."
                )
        return Row(kind | LAST * is_last | TERMINAL * is_terminal, is_last, None, num_unknown)

    def _final_leaves(self, leaves: Sequence[Any], final_observation: Any) -> list[Any]:
        """Return the leaves of a boundary row: the final observation, and zeros elsewhere."""
        structure = self._structure
        if not self._of_observation:
            raise SpecError(
                "an end needs the final observation, and the steps have no leaf `observation`; found "
                f"{join_paths(structure.paths)}. Name the observation so, or write the boundary step yourself with "
                "`is_last` and `is_terminal`."
            )
        batch = () if self._num_envs is None else (self._num_envs,)
        found = [zeros(dtype, batch + shape) for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)]
        final = [leaves[at] for at in self._of_observation]
        if final_observation is not None:
            if self._observation is None:
                specs = structure.pack(list(map(ArraySpec, structure.shapes, structure.dtypes)))
                nest = (fields_of(specs) or {})["observation"]
                self._observation = StepStructure(nest, batch_size=self._num_envs, is_spec=True)
            final = list(self._observation.flatten(final_observation, "`final_observation`"))
        for at, leaf in zip(self._of_observation, final, strict=True):
            found[at] = leaf
        return found


def _follows_zero(before: Any) -> Any:
    """Return whether the row before has an action whose discount is 0."""
    return (before & (ZERO_DISCOUNT | LAST)) == ZERO_DISCOUNT
