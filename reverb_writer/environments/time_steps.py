"""Record dm_env time steps from an actor's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.environments.recorded_steps import FALSE, TRUE, Recording, recorded_step
from reverb_writer.errors import StructureError


class _Episode(NamedTuple):
    """The episode under way."""

    observation: Any = None  # the last one
    num_steps: int = 0
    zeros: Any = None  # action, reward and further data of its last step
    ends: tuple[Any, Any] | None = None  # terminated and truncated, before its last step is written


class TimeStepRecorder:
    """Pass dm_env time steps and actions to an observer, as Acme's actors pass them to an adder.

    An episode that ends with discount 0 is terminated, with any other discount truncated. Reward and discount are
    recorded in the same step as the action that they follow; see `reverb_writer.environments.recorded_steps`. Used from
    one thread at a time.

    Example:
        recorder = rw.environments.TimeStepRecorder(observer)
        recorder.observe_first(env.reset())
        recorder.observe(action, env.step(action))
    """

    def __init__(self, observer: Callable[[Any], Any]) -> None:
        """Begin with no episode.

        Args:
            observer: called with each step; the caller closes it.
        """
        self._recording = Recording(observer, _Episode())
        self._is_open = False

    def __repr__(self) -> str:
        recording = self._recording
        return f"<TimeStepRecorder to {recording.observer!r}: step {recording.state.num_steps} of an episode>"

    def observe_first(self, timestep: Any) -> None:
        """Begin an episode. An episode that was not over is recorded as truncated, with its last observation.

        Args:
            timestep: a `dm_env.TimeStep`, or an object with its attributes, of type FIRST.

        Raises:
            StructureError: it is not the first of an episode.
        """
        if not timestep.first():
            raise StructureError(f"`observe_first` takes the first time step of an episode, got {_type(timestep)}.")
        self.end_episode()
        self._recording.state = _Episode(_copy(timestep.observation))
        self._is_open = True

    def observe(self, action: Any, next_timestep: Any, extras: Any = ()) -> None:
        """Record an action and its result; if the result ends the episode, also the final observation.

        Args:
            action: nest; taken on the observation before `next_timestep`, which is not checked; copied.
            next_timestep: a `dm_env.TimeStep`, or an object with its attributes, of type MID or LAST; copied.
            extras: nest of further data of the action, such as its log-probability; of one structure in all steps.
                Recorded as `extras` unless it is empty; copied.

        Raises:
            StructureError: no episode has begun, or the time step is the first of one.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Steps that were written stay
                written; the next `observe_first` ends their episode.
        """
        if not self._is_open:
            raise StructureError("call `observe_first` before `observe`: no episode is being recorded.")
        if next_timestep.first():
            raise StructureError(
                "`observe` takes the time step after an action, got the first time step of an episode."
            )
        result = {
            "action": _copy(action),
            "reward": _copy(next_timestep.reward),
            "discount": _copy(next_timestep.discount),
        }
        if not (tree.is_nested(extras) and not tree.flatten(extras)):
            result["extras"] = _copy(extras)
        self._is_open = False
        episode = self._recording.state
        ends = None
        if next_timestep.last():
            terminated = np.bool_(not any(np.any(leaf) for leaf in tree.flatten(next_timestep.discount)))
            ends = terminated, np.bool_(not terminated)
        zeros = episode.zeros or tree.map_structure(lambda leaf: np.zeros_like(np.asarray(leaf))[()], result)
        after = _Episode(_copy(next_timestep.observation), episode.num_steps + 1, zeros, ends)
        is_first = FALSE if episode.num_steps else TRUE
        self._recording.write(recorded_step(episode.observation, **result, is_first=is_first), after)
        if ends is None:
            self._is_open = True
        else:
            self.end_episode()

    def end_episode(self) -> None:
        """Record the end of an episode that was not over, as `observe_first` does."""
        self._is_open = False
        self._recording.settle()
        episode = self._recording.state
        if not episode.num_steps:
            return
        terminated, truncated = episode.ends or (FALSE, TRUE)
        step = recorded_step(
            episode.observation, **episode.zeros, is_last=TRUE, terminated=terminated, truncated=truncated
        )
        self._recording.write(step, _Episode())


def _copy(nest: Any) -> Any:
    """Copy the arrays of a nest, which the environment or the policy may reuse; numbers stay numbers of Python."""
    return tree.map_structure(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, nest)


def _type(timestep: Any) -> str:
    return "a last one" if timestep.last() else "one in its middle"
