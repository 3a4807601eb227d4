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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import env_flags, zeros
from reverb_writer.nests import fields_of, join_paths
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL, LastRow
from reverb_writer.rows.layouts import STEP_FIRST, STEP_LAST, ambiguous, layout_of
from reverb_writer.steps import MID, StepStructure

Kinds = npt.NDArray[np.uint8]
EnvIds = npt.NDArray[np.integer[Any]]

Ends: TypeAlias = tuple[Any, Any, Any, Any]
"""`end_of_episode`, `terminated`, `truncated` and `final_observation`, the arguments of a call about an end."""

ZERO_DISCOUNT = 32
"""A bit of the state only: the discount of the row before is 0."""

_LAST, _TERMINAL = np.uint8(LAST), np.uint8(TERMINAL)

START = LAST
"""The state before the first row of a stream."""


class Boundary(NamedTuple):
    """The boundary row of one environment, or the boundary rows of some environments."""

    leaves: Sequence[Any]  # [...], or [N, ...] of all environments
    kind: Any  # or [N]
    env_ids: EnvIds | None  # environments that have one; None for a single environment


class Row(NamedTuple):
    """The kind of a row, or of the rows of N environments; arrays are never changed in place."""

    kind: Any  # or [N]
    state: Any  # after the row, or [N]
    is_last: Any  # whether the windows of the episode end here, or [N]; None if no episode of N ends
    boundary: Boundary | None = None
    num_unknown: int = 0  # ends that do not show whether the environment ended the episode


_FOLLOWING = np.array([ACTION | FIRST if state & LAST else ACTION for state in range(2 * ZERO_DISCOUNT)], np.uint8)
"""The kind of a row with an action whose leaves do not show whether it is the first, by the state before."""


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
        is_state = self._last_row == "boundary" if not self.marks_ends else not self._has_action
        self._state_discount = self._discount if is_state else None
        told_by = {path for path in (*self._last, self._first, self._terminal, self._truncated) if path}
        self._is_told = bool(self._last or self._first)
        self._type_at = self._at["step_type"] if "step_type" in told_by else None
        keyed_by = {*told_by, self._discount} if self._is_told else {self._state_discount}
        self._flags_at = [self._at[path] for path in keyed_by if path not in (None, "step_type")]
        self._by_key: dict[int, Row] = {}  # rows of one environment, by the flags and the state before
        self._by_state: dict[tuple[int, bool], Row] = {}
        # The rows of one environment by the state before, if no leaf has a part in their kinds.
        self._following: list[Row] | None = None
        if self._num_envs is None and not self._is_told and self._state_discount is None:
            self._following = [Row(kind, kind, is_last=False) for kind in _FOLLOWING.tolist()]
        self._unchanged: Row | None = None  # a row of N environments whose state the next row repeats

    def known(self, kind: Any, is_last: Any, leaves: Sequence[Any]) -> Row:
        """Return the row of this kind."""
        state = self.state(kind, leaves)
        if self._num_envs is not None:
            return Row(kind, state, is_last)
        row = self._by_state.get((state, is_last))
        if row is None:
            check_bits(np.asarray(kind))
            row = self._by_state[state, is_last] = Row(kind, state, is_last)
        return row

    def plain(self, leaves: Sequence[Any], before: Any, env_ids: Any = ...) -> Row:
        """Return the row of which the caller says nothing; arguments and errors are those of `row`."""
        key: int = before
        if self._following is not None:
            return self._following[key]
        if self._num_envs is not None:
            return self._plain_envs(leaves, before, env_ids)
        if self._type_at is not None:
            value = leaves[self._type_at]
            number = value.item() if type(value) is np.ndarray else int(value)
            key = 3 * key + (number if STEP_FIRST <= number <= STEP_LAST else MID)
        for at in self._flags_at:
            key = 2 * key + (not leaves[at])
        row = self._by_key.get(key)
        if row is None:  # at most some hundred keys, because all of their parts have few values
            kind = self._told(leaves, before, env_ids) if self._is_told else int(_FOLLOWING[before])
            row = self._by_key[key] = self.known(kind, (kind & LAST) != 0, leaves)
        return row

    def _plain_envs(self, leaves: Sequence[Any], before: Any, env_ids: Any) -> Row:
        if self._is_told:
            kind = self._told(leaves, before, env_ids)
            is_last = (kind & LAST) != 0
            return Row(kind, self.state(kind, leaves), is_last if np.count_nonzero(is_last) else None)
        if self._unchanged is not None and before is self._unchanged.state:
            return self._unchanged
        kind = _FOLLOWING.take(before)
        row = Row(kind, self.state(kind, leaves), None)
        if row.state is kind and kind.tobytes() == before.tobytes():
            self._unchanged = row
        return row

    def row(
        self,
        leaves: Sequence[Any],
        before: Any,
        env_ids: EnvIds,
        ends: Ends,
    ) -> Row:
        """Return the kind of a row, and its boundary row if it has one. Errors change nothing.

        `before` is the state after the row before. With N environments, the flags of `ends` are results of
        `env_ends`, and only the environments in `env_ids` have a row; the kinds of the others have no meaning.
        """
        end_of_episode, terminated, truncated, final_observation = ends
        row = self.plain(leaves, before, env_ids)
        if self.marks_ends:
            if terminated is not None or truncated is not None:
                raise StructureError(
                    f"the steps mark their ends themselves, by {join_paths(self._last)}. Leave out `terminated` and "
                    "`truncated`; or leave these leaves out of the steps, and the observer writes the boundary row."
                )
            return row if end_of_episode is None else row._replace(is_last=self._flags(end_of_episode, env_ids))
        if end_of_episode is not None and not (terminated is None is truncated):
            raise SpecError("`end_of_episode` repeats `terminated` and `truncated`: leave it out.")
        if self._num_envs is None:
            has_end = terminated or truncated or end_of_episode
        else:
            has_end = self._any(terminated) or self._any(truncated) or self._any(end_of_episode)
        if not has_end:
            return row
        if end_of_episode is not None:
            return self._unmarked_end(leaves, row.kind, before, self._flags(end_of_episode, env_ids))
        is_terminal = self._flags(terminated, env_ids)
        is_last = is_terminal | self._flags(truncated, env_ids)
        return self._flagged_end(leaves, row, is_terminal, is_last, final_observation)

    def block(self, columns: Sequence[npt.NDArray[Any]], before: int) -> Kinds:
        """Return the kinds [T] of rows of one environment, columns [T, ...], that `extend` writes."""
        kinds = np.full(len(columns[0]), ACTION, np.uint8)
        if not self._is_told:
            kinds[0] = _FOLLOWING[before]
            return kinds
        for number in range(len(kinds)):
            row = self.plain([column[number] for column in columns], before)
            kinds[number], before = row.kind, row.state
        return kinds

    def state(self, kind: Any, leaves: Sequence[Any]) -> Any:
        """Return the state after a row."""
        if self._state_discount is None:
            return kind
        return kind | ZERO_DISCOUNT * (self._value(self._state_discount, leaves) == 0)

    # ------------------------------------------------------------------------------------------------ what is inside

    def _value(self, path: str, leaves: Sequence[Any]) -> Any:
        leaf = leaves[self._at[path]]
        if self._num_envs is not None:
            return np.asarray(leaf).reshape(self._num_envs)
        return leaf.item() if hasattr(leaf, "item") else np.asarray(leaf).item()  # TensorFlow's have no `item`

    def _any(self, given: Any) -> bool:
        """Return whether a flag of the caller is set, in any environment."""
        if self._num_envs is None or given is None:
            return bool(given)
        return bool(np.count_nonzero(given))

    def _flags(self, given: Any, env_ids: EnvIds) -> Any:
        """Return flags of the caller, False in environments without a row."""
        if given is None:
            return self._never
        if self._num_envs is None:
            return bool(given)
        return given if len(env_ids) == self._num_envs else given & np.isin(np.arange(self._num_envs), env_ids)

    def _begins(self, leaves: Sequence[Any], before: Any) -> Any:
        if self._first is None:
            return (before & LAST) != 0
        value = self._value(self._first, leaves)
        return value == STEP_FIRST if self._first == "step_type" else value != 0

    def _told(self, leaves: Sequence[Any], before: Any, env_ids: Any) -> Any:
        """Return the kind of a row whose own leaves say what it is."""
        if self._ambiguous is not None:
            raise ambiguous(self._ambiguous)
        is_last = self._never
        for path in self._last:
            value = self._value(path, leaves)
            is_last = is_last | (value == STEP_LAST if path == "step_type" else value != 0)
        if self._terminal is not None:
            is_terminal = self._value(self._terminal, leaves) != 0
            wrong = is_terminal > is_last
            if self._any(wrong) and (self._num_envs is None or wrong[env_ids].any()):
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

    def _flagged_end(
        self, leaves: Sequence[Any], row: Row, is_terminal: Any, is_last: Any, final_observation: Any
    ) -> Row:
        """Return the row of an end that `terminated` or `truncated` marks; `row` is the row without the end."""
        if not self._any(is_last):  # the flags are those of environments without a row
            return row
        has_boundary = is_terminal if final_observation is None else is_last
        kind, state, ends_here = row[:3]
        if has_boundary is not is_last:
            ends_here = is_last > has_boundary
            kind = kind | LAST * ends_here
            state = self.state(kind, leaves)
            if not self._any(has_boundary):
                return Row(kind, state, ends_here)
        final = self._final_leaves(leaves, final_observation)
        if self._num_envs is None:
            return Row(kind, state, ends_here, Boundary(final, LAST | TERMINAL * is_terminal, None))
        of_last = is_terminal * _TERMINAL | _LAST
        return Row(kind, state, ends_here, Boundary(final, of_last, has_boundary.nonzero()[0]))

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
        kind = kind | LAST * is_last | TERMINAL * is_terminal
        return Row(kind, self.state(kind, leaves), is_last, None, num_unknown)

    @functools.cached_property
    def _zeros(self) -> list[Any]:
        """The leaves of a boundary row without an observation; they are copied and not changed."""
        batch = () if self._num_envs is None else (self._num_envs,)
        types = zip(self._structure.dtypes, self._structure.shapes, strict=True)
        return [zeros(dtype, batch + shape) for dtype, shape in types]

    def _final_leaves(self, leaves: Sequence[Any], final_observation: Any) -> list[Any]:
        """Return the leaves of a boundary row: the final observation, and zeros elsewhere."""
        structure = self._structure
        if not self._of_observation:
            raise SpecError(
                "an end needs the final observation, and the steps have no leaf `observation`; found "
                f"{join_paths(structure.paths)}. Name the observation so, or write the boundary step yourself with "
                "`is_last` and `is_terminal`."
            )
        found = [*self._zeros]
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


def check_bits(kinds: npt.NDArray[Any]) -> None:
    """Raise StructureError if a caller's kinds have bits that no kind has: the ring and the state have own bits there.

    >>> check_bits(np.array([ACTION, LAST | TERMINAL], np.uint8))
    """
    if kinds.max(initial=0) > PADDING or kinds.min(initial=0) < 0:
        raise StructureError(f"`kinds` has {kinds.max()}, expected sums of the bits of `reverb_writer.rows`, up to 16.")


def env_ends(num_envs: int, end_of_episode: Any, terminated: Any, truncated: Any, final_observation: Any) -> Ends:
    """Return the arguments of a call with N environments: flags as arrays of bool [N], None where none are given.

    Raises:
        StructureError: flags have another shape; the error has their name.
    """
    return (
        None if end_of_episode is None else env_flags("end_of_episode", end_of_episode, num_envs),
        None if terminated is None else env_flags("terminated", terminated, num_envs),
        None if truncated is None else env_flags("truncated", truncated, num_envs),
        final_observation,
    )


def _follows_zero(before: Any) -> Any:
    """Return whether the row before has an action whose discount is 0."""
    return (before & (ZERO_DISCOUNT | LAST)) == ZERO_DISCOUNT
