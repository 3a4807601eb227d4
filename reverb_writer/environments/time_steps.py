"""Record dm_env time steps in an actor's own loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree

from reverb_writer.environments.recorded_steps import Recording, end_kind
from reverb_writer.errors import StructureError


class TimeStepRecorder:
    """Pass dm_env time steps and actions to an observer, as Acme's actors pass them to an adder.

    An episode that ends with discount 0 is terminated; with another discount, it is truncated. Reward and discount are
    recorded in the row of the action before them; see `reverb_writer.environments.recorded_steps`. Not thread-safe.

    Example:
        recorder = rw.environments.TimeStepRecorder(observer)
        recorder.observe_first(env.reset())
        recorder.observe(action, env.step(action))
    """

    def __init__(self, observer: Any) -> None:
        """Begin without an episode; `observer` is as for `record`, and the caller closes it."""
        self._recording = Recording(observer)

    def __repr__(self) -> str:
        return f"<TimeStepRecorder to {self._recording.observer!r}>"

    def observe_first(self, timestep: Any) -> None:
        """Begin an episode; an unfinished one is recorded as truncated, with its last observation.

        Args:
            timestep: a `dm_env.TimeStep`, or an object with its attributes, of type FIRST.

        Raises:
            StructureError: the time step is not the first of an episode.
        """
        begin(self._recording, timestep)

    def observe(self, action: Any, next_timestep: Any, extras: Any = ()) -> None:
        """Record an action and its result; if the result ends the episode, also the final observation.

        Args:
            action: nest of the action before `next_timestep`; copied, not checked.
            next_timestep: a `dm_env.TimeStep`, or an object with its attributes, of type MID or LAST; copied.
            extras: nest of further data of the action, such as its log-probability, of one structure in all steps.
                Recorded as `extras` unless it is empty; copied.

        Raises:
            StructureError: no episode has begun, or the time step is the first of an episode.
            StructureError, ReplayTimeoutError, ClosedError: as the observer raises. Written steps remain; the next
                `observe_first` ends their episode.
        """
        if self._recording.needs_reset:
            raise StructureError("call `observe_first` before `observe`: no episode is being recorded.")
        take(self._recording, action, next_timestep, extras)

    def end_episode(self) -> None:
        """Record an unfinished episode as truncated, as `observe_first` does."""
        self._recording.end()


def begin(recording: Recording, timestep: Any) -> None:
    """Begin an episode with its first time step."""
    if not timestep.first():
        raise StructureError(f"`observe_first` takes the first time step of an episode, got {timestep.step_type!r}.")
    recording.first(_copy(timestep.observation))


def take(recording: Recording, action: Any, timestep: Any, extras: Any) -> None:
    """Record an action and the time step after it."""
    if timestep.first():
        raise StructureError("`observe` takes the time step after an action, got the first time step of an episode.")
    result = {"action": action, "reward": timestep.reward, "discount": timestep.discount}
    if not (tree.is_nested(extras) and not tree.flatten(extras)):
        result["extras"] = extras
    ends = None
    if timestep.last():
        ends = end_kind(terminated=not any(np.any(leaf) for leaf in tree.flatten(timestep.discount)))
    recording.observe(_copy(result), _copy(timestep.observation), ends)


def _copy(nest: Any) -> Any:
    """Copy the arrays of a nest, because the environment or the policy may reuse them; numbers remain as they are."""
    return tree.map_structure(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, nest)
