"""The recorded steps of an environment: one per observation, including the terminal observation.

    key           at time t                                                   in an episode's last step
    ------------  ----------------------------------------------------------  -------------------------------
    observation   the observation                                             the final observation
    action        the action after the observation                            zeros
    reward        the action's reward                                         0
    discount      0 if the action led to a terminal state, otherwise the      0
                  environment's discount, mostly 1
    is_first      whether the step is the first of its episode                False
    is_last       False                                                       True
    terminated    False                                                       whether its state is terminal
    truncated     False                                                       whether a limit or the actor ended it
    extras        data of the policy that chose the action                    zeros

So an episode of E environment steps has E + 1 steps, and the observation after an action is in the next step.
`rw.to_transitions` and `rw.slices` read `terminated` and `truncated`; both may be set. `extras` is recorded with
`extras=fn`. Episodes that the actor ends, with `reset` or `close`, are truncated. A reset without a step after it
records nothing. docs/explanation/steps.md draws the three ends.

Source: RLDS (reward and discount beside the action that led to them, a last step without a transition); Gymnasium
(`terminated` and `truncated`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array, stored_dtype, zeros

Result = TypeVar("Result")


class _Episodes(NamedTuple):
    """The ongoing episodes, of one environment or of N; arrays are never changed in place."""

    observation: Any  # the last observation
    is_first: Any  # whether no step of the episode is written yet
    ends: tuple[Any, Any] | None = None  # `terminated`, `truncated` of episodes whose last step is not written yet
    zeros: Any = None  # action, reward and so on of a last step; None before an episode's first step


class Recording:
    """Makes the steps of episodes, and passes them to an observer: `first`, then `observe` after each step, or `end`.

    An interrupt may come before or after the observer has taken a step. `Recording` must know which; otherwise an
    episode might end with the observation before its last action. `num_steps` of this package's observers shows it; if
    another function raises, the step counts as not taken.

    Attributes:
        observer: function of a step; also called with `env_mask` if not all of N environments have one.
        state: state of the episodes; one assignment changes it.
        needs_reset: a bool, or [N]: whether an environment is in no episode, or may have taken a step that is not
            recorded.
    """

    def __init__(self, observer: Callable[..., Any], num_envs: int | None = None, mode: str = "Disabled") -> None:
        """Begin without episodes; `mode` is Gymnasium's name of the autoreset mode."""
        self.observer, self._num_envs, self._mode = observer, num_envs, mode
        self._false = np.zeros(() if num_envs is None else num_envs, bool)[()]
        self._true = ~self._false
        self._no_episodes = _Episodes(None, self._true)
        self.state = self._no_episodes
        self.needs_reset = self._true
        self._num_known: int | None = None  # number of the observer's steps after the last one of this recording
        self._open_call: tuple[int | None, Any] | None = None  # number of steps before a call, and the state after it

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
        mask = self._true if env_mask is None else env_mask
        self.end(mask)
        state = self.state
        if mask.all():
            self.state = self._no_episodes._replace(observation=observation)
        else:
            chosen = tree.map_structure(partial(_choose, mask), observation, state.observation)
            self.state = state._replace(observation=chosen)
        self.needs_reset = self.needs_reset & ~mask

    def observe(
        self, result: dict[str, Any], observation: Any, ends: tuple[Any, Any] | None, following: Any = None
    ) -> None:
        """Record an action, its result and the observation after it, and the last steps of finished episodes.

        `ends` are `terminated` and `truncated`, or None if no episode is over. `following` are the first observations
        of the next episodes (SAME_STEP).
        """
        self.needs_reset = self._true
        state = self.state
        zeros = state.zeros or tree.map_structure(_zeros, result)
        is_last = self._false
        if state.ends is not None:  # environments have reset themselves (NEXT_STEP): the action had no effect there
            is_last = state.ends[0] | state.ends[1]
            result = tree.map_structure(partial(_choose, is_last), zeros, result)
        self._write(
            self._step(result, is_last, *(state.ends or (is_last, is_last))),
            _Episodes(observation, is_last, ends, zeros),
            {},
        )
        over = self._false
        if ends is not None and self._mode != "NextStep":
            over = ends[0] | ends[1]
            self.end(over)
            if self._mode == "SameStep":
                self.state, over = self.state._replace(observation=following), self._false
        self.needs_reset = over

    def end(self, env_mask: Any = None) -> None:
        """Record the last step of episodes that have steps; unfinished episodes are truncated."""
        mask = self._true if env_mask is None else env_mask
        self.needs_reset = self.needs_reset | mask
        self._settle()
        state = self.state
        ending = mask & ~state.is_first
        if ending.any():
            terminated, truncated = state.ends or (self._false, self._false)
            step = self._step(state.zeros, self._true, terminated, truncated | ~terminated)
            self._write(step, self._without(ending), {} if self._num_envs is None else {"env_mask": ending})

    def _step(self, result: dict[str, Any], is_last: Any, terminated: Any, truncated: Any) -> dict[str, Any]:
        state = self.state
        return {
            "observation": state.observation,
            **result,
            "is_first": state.is_first,
            "is_last": is_last,
            "terminated": terminated,
            "truncated": truncated,
        }

    def _without(self, ended: Any) -> _Episodes:
        """Return the state after the last steps of these episodes."""
        state, ends = self.state, None
        if self._num_envs is None:
            return self._no_episodes
        if state.ends is not None:
            terminated, truncated = state.ends[0] & ~ended, state.ends[1] & ~ended
            ends = (terminated, truncated) if (terminated | truncated).any() else None
        return state._replace(is_first=state.is_first | ended, ends=ends)

    def _write(self, step: Any, after: _Episodes, options: dict[str, Any]) -> None:
        """Pass a step to the observer; `after` is the state after it."""
        num_taken = self._num_taken()
        if num_taken != self._num_known and not self.state.is_first.all():
            self.state = self._no_episodes
            raise SpecError(
                "the observer got steps from elsewhere in the middle of an episode of this environment. Make one "
                "observer per environment, or record a vector environment with `num_envs`."
            )
        self._open_call = num_taken, after
        try:
            self.observer(step, **options)
        except BaseException:
            self._settle()
            raise
        self.state = after
        self._num_known = self._num_taken()
        self._open_call = None

    def _settle(self) -> None:
        """Find out whether the observer took the step of an interrupted call."""
        if self._open_call is not None:
            num_before, after = self._open_call
            self._num_known = self._num_taken()
            if self._num_known != num_before:
                self.state = after
            self._open_call = None

    def _num_taken(self) -> int | None:
        return getattr(self.observer, "num_steps", None)


def extras_reader(read: Callable[[], Any] | None, num_envs: int | None = None) -> Callable[[], dict[str, Any]]:
    """Return a function that reads `extras`, the data of the policy that chose the action, as fields of a step.

    `read` returns a nest, with leaves [N, ...] for `num_envs` = N environments; its arrays are copied.
    """
    if read is None:
        return dict
    if not callable(read):
        raise SpecError(f"`extras` must be a function of no arguments that returns a nest, got {type(read).__name__}.")

    def fields() -> dict[str, Any]:
        nest = tree.map_structure(lambda leaf: host_array(leaf).copy(), read())
        for path, leaf in tree.flatten_with_path(nest) if num_envs is not None else ():
            if leaf.shape[:1] != (num_envs,):
                raise StructureError(
                    f"`extras`, leaf `{'/'.join(map(str, path))}` has shape {leaf.shape}, expected "
                    f"({num_envs}, ...): one row per environment."
                )
        return {"extras": nest}

    return fields


def _zeros(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return zeros(stored_dtype(array.dtype), array.shape)


def _choose(env_mask: Any, where: Any, elsewhere: Any) -> Any:
    """Return `where` in the environments of the mask, and `elsewhere` in the others."""
    chosen = elsewhere.copy()
    chosen[env_mask] = where[env_mask]
    return chosen
