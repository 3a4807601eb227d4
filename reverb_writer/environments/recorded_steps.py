"""The recorded rows of an environment: one per observation, including the final observation of an episode.

    leaf          in the row of an action             in the last row of an episode
    ------------  ----------------------------------  ---------------------------------------
    observation   the observation before the action   the final observation
    action        the action                          zeros
    reward        the action's reward                 0
    discount      the environment's discount          0
    extras        data of the policy, or of `info`    zeros, or the results of `final_extras`

`discount` is a leaf only where the environment has discounts of its own (dm_env), and `extras` only with `extras=`.
So an episode of E environment steps has E + 1 rows, and the observation after an action is in the next row. The kind of
each row (`reverb_writer.rows`) shows the first and the last row of an episode, and its end: a last row has no ACTION,
and is TERMINAL if the environment ended the episode. Episodes that the actor ends, with `reset` or `close`, are
truncated. A reset without a step after it records nothing. docs/explanation/steps.md draws the three ends.

An observer with `write_row` gets rows and kinds. Another function gets rows with flags instead of kinds:

    discount      0 if the action led to a terminal state, otherwise the environment's discount, mostly 1
    is_first, is_last, terminated, truncated      see `reverb_writer.rows.FLAGS`

Source: RLDS (a reward beside the action that led to it, a last step without a transition).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tree

from reverb_writer.errors import SpecError
from reverb_writer.leaves import stored_dtype, zeros
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL, has
from reverb_writer.rows.kinds import FLAGS

Result = TypeVar("Result")

_FIRST, _ACTION, _LAST, _TERMINAL = map(np.uint8, (FIRST, ACTION, LAST, TERMINAL))
_ZERO, _ONE = np.float32(0), np.float32(1)


class _Episodes(NamedTuple):
    """The ongoing episodes, of one environment or of N; arrays are never changed in place.

    Flags and kinds of one environment are numbers of Python, because most of the time of a step would be NumPy's.
    """

    observation: Any  # the last observation
    is_first: Any  # whether no row of the episode is written yet
    ends: Any = None  # kinds of last rows that are not written yet, 0 elsewhere; None if there is no such row
    zeros: Any = None  # action, reward and so on of a last row; None before an episode's first row


class Recording:
    """Makes the rows of episodes, and passes them to an observer: `first`, then `observe` after each step, or `end`.

    An interrupt may come before or after the observer has taken a row. `Recording` must know which; otherwise an
    episode might end with the observation before its last action. `num_steps` of this package's observers shows it; if
    another function raises, the row counts as not taken.

    Attributes:
        observer: an object with `write_row(row, kinds, env_mask=None)`, or a function of a row with flags, also called
            with `env_mask` if not all of N environments have one.
        state: state of the episodes; one assignment changes it.
        needs_reset: a bool, or [N]: whether an environment is in no episode, or may have taken a step that is not
            recorded.
    """

    def __init__(
        self,
        observer: Any,
        num_envs: int | None = None,
        mode: str = "Disabled",
        final_fields: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Begin without episodes.

        Args:
            observer: see the attribute.
            num_envs: N, number of environments; None for one environment without a dimension N.
            mode: Gymnasium's name of the autoreset mode.
            final_fields: function of final observations and fields of zeros, which returns the fields of last rows.
        """
        self.observer, self._num_envs, self._mode, self._final_fields = observer, num_envs, mode, final_fields
        self._write_row = getattr(observer, "write_row", None)
        self._false: Any = False if num_envs is None else np.zeros(num_envs, bool)
        self._true: Any = True if num_envs is None else ~self._false
        # Rows of actions alone, which most calls write.
        self._actions: Any = ACTION if num_envs is None else np.full(num_envs, ACTION, np.uint8)
        self._action_flags = flags(np.uint8(ACTION) if num_envs is None else self._actions)
        self._no_episodes = _Episodes(None, self._true)
        self.state = self._no_episodes
        self.needs_reset: Any = self._true
        self._num_known: int | None = None  # number of the observer's rows after the last one of this recording
        self._open_call: tuple[int | None, Any] | None = None  # number of rows before a call, and the state after it

    def call(self, method: Callable[..., Result], *args: Any, env_mask: Any = None, **kwargs: Any) -> Result:
        """Call a method that moves the environments of `env_mask`, or all; return its result.

        They need a reset until `first` or `observe` has recorded the result, because an interrupt may come before.
        """
        before = self.needs_reset
        self.needs_reset = self._true if env_mask is None else before | env_mask
        try:
            return method(*args, **kwargs)
        except Exception:
            self.needs_reset = before
            raise

    def first(self, observation: Any, *, env_mask: Any = None) -> None:
        """Begin episodes, in the environments of `env_mask` or in all; record unfinished ones as truncated."""
        self.end(env_mask)
        if env_mask is None or env_mask.all():
            self.state = self._no_episodes._replace(observation=observation)
            self.needs_reset = self._false
            return
        chosen = tree.map_structure(functools.partial(_choose, env_mask), observation, self.state.observation)
        self.state = self.state._replace(observation=chosen)
        self.needs_reset = self.needs_reset & ~env_mask

    def observe(self, result: dict[str, Any], observation: Any, ends: Any = None, following: Any = None) -> None:
        """Record an action, its result and the observation after it, and the last rows of finished episodes.

        `ends` is the kind of the last row of an episode that is over, or the result of `end_kinds`; None if no episode
        is over. `following` are the first observations of the next episodes (SAME_STEP).
        """
        self.needs_reset = self._true
        state = self.state
        if self._write_row is None and "discount" not in result:
            result = {**result, "discount": self._discount(ends)}
        fields = state.zeros or tree.map_structure(_zeros, result)
        if self._num_envs is None:
            kind = ACTION | FIRST if state.is_first else ACTION
            self._write(result, kind, _Episodes(observation, False, ends, fields))
            if ends is not None:
                self.end()
            self.needs_reset = ends is not None
            return
        kinds, is_last = self._actions, self._false
        if state.is_first is not self._false:
            kinds = state.is_first * _FIRST | _ACTION
        if state.ends is not None:  # environments have reset themselves (NEXT_STEP): the action had no effect there
            is_last = state.ends != 0
            kinds = _choose(is_last, state.ends, kinds)
            result = tree.map_structure(functools.partial(_choose, is_last), self._last_fields(fields), result)
        self._write(result, kinds, _Episodes(observation, is_last, ends, fields))
        over = self._false
        if ends is not None and self._mode != "NextStep":
            over = ends != 0
            self.end(over)
            if self._mode == "SameStep":
                self.state, over = self.state._replace(observation=following), self._false
        self.needs_reset = over

    def _discount(self, ends: Any) -> Any:
        """Return the discount of an action for functions of a row: 0 if it led to a terminal state, otherwise 1."""
        if self._num_envs is None:
            return _ZERO if ends is not None and ends & TERMINAL else _ONE
        return np.ones(self._num_envs, np.float32) if ends is None else (~has(ends, TERMINAL)).astype(np.float32)

    def end(self, env_mask: Any = None) -> None:
        """Record the last row of episodes that have rows; unfinished episodes are truncated."""
        mask = self._true if env_mask is None else env_mask
        self.needs_reset = self.needs_reset | mask
        self._settle()
        state = self.state
        if self._num_envs is None:
            if not state.is_first:
                self._write(self._last_fields(state.zeros), (state.ends or 0) | LAST, self._no_episodes)
            return
        ending = mask & ~state.is_first
        if ending.any():
            kinds = (self._false if state.ends is None else state.ends) | _LAST
            self._write(self._last_fields(state.zeros), kinds, self._without(ending), ending)

    def _last_fields(self, fields: Any) -> Any:
        """Return all fields of last rows but the observation; `fields` are zeros."""
        return fields if self._final_fields is None else self._final_fields(self.state.observation, fields)

    def _without(self, ended: Any) -> _Episodes:
        """Return the state after the last rows of these episodes."""
        state = self.state
        ends = state.ends
        if ends is not None:
            ends = ends * ~ended
            ends = ends if ends.any() else None
        return state._replace(is_first=state.is_first | ended, ends=ends)

    def _write(self, fields: dict[str, Any], kinds: Any, after: _Episodes, env_mask: Any = None) -> None:
        """Pass a row to the observer; `after` is the state after it."""
        num_taken = self._num_taken()
        if num_taken != self._num_known and not np.all(self.state.is_first):
            self.state = self._no_episodes
            raise SpecError(
                "the observer got steps from elsewhere in the middle of an episode of this environment. Make one "
                "observer per environment, or record a vector environment with `num_envs`."
            )
        row = {"observation": self.state.observation, **fields}
        self._open_call = num_taken, after
        try:
            if self._write_row is not None:
                self._write_row(row, kinds, env_mask)
            elif env_mask is None:
                self.observer({**row, **self._flags(kinds)})
            else:
                self.observer({**row, **self._flags(kinds)}, env_mask=env_mask)
        except BaseException:
            self._settle()
            raise
        self.state = after
        self._num_known = self._num_taken()
        self._open_call = None

    def _flags(self, kinds: Any) -> dict[str, Any]:
        """Return kinds as leaves of flags."""
        if kinds is self._actions:
            return self._action_flags
        return flags(np.uint8(kinds) if self._num_envs is None else kinds)

    def _settle(self) -> None:
        """Find out whether the observer took the row of an interrupted call."""
        if self._open_call is not None:
            num_before, after = self._open_call
            self._num_known = self._num_taken()
            if self._num_known != num_before:
                self.state = after
            self._open_call = None

    def _num_taken(self) -> int | None:
        return getattr(self.observer, "num_steps", None)


def end_kinds(terminated: Any, truncated: Any) -> Any:
    """Return the kinds of the last rows of episodes that are over, and 0 elsewhere, [N]; None if no episode is over.

    >>> end_kinds(np.array([True, False, False]), np.array([True, True, False])).tolist()
    [12, 4, 0]
    """
    is_over = terminated | truncated
    return is_over * _LAST | terminated * _TERMINAL if np.count_nonzero(is_over) else None


def end_kind(*, terminated: Any) -> int:
    """Return the kind of the last row of an episode of one environment."""
    return LAST | TERMINAL if terminated else LAST


def flags(kinds: Any) -> dict[str, Any]:
    """Return the kinds of rows as leaves of flags."""
    return {name: flag(kinds) for name, flag in FLAGS.items()}


def _zeros(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return zeros(stored_dtype(array.dtype), array.shape)


def _choose(env_mask: Any, where: Any, elsewhere: Any) -> Any:
    """Return `where` in the environments of the mask, and `elsewhere` in the others."""
    chosen = elsewhere.copy()
    chosen[env_mask] = where[env_mask]
    return chosen
