"""One call for every kind of environment."""

from __future__ import annotations

import sys
from typing import Any

from reverb_writer.environments.n_step_transform import NStepTransform
from reverb_writer.errors import SpecError

__all__ = ["record"]


def record(env: Any, observer: Any, *, seeds: bool = False) -> Any:
    """Return an environment that passes its steps to an observer, and is otherwise the same.

    Args:
        env: a `gymnasium.Env`, a `gymnasium.vector.VectorEnv` or a `dm_env.Environment`.
        observer: called with each step, a dict (see `reverb_writer.environments.recorded_steps`): a
            `TrajectoryObserver` or any of its kind, an `NStepTransform`, or any function. For a vector environment a
            `VectorObserver` of as many environments, or what can be called like it. It stays the caller's to close,
            after the environment.
        seeds: whether steps also have `seed`, int64: that of the `reset` that began their episode, -1 for none.
            Gymnasium only.

    Returns:
        A `gymnasium.Wrapper`, `gymnasium.vector.VectorWrapper` or `dm_env.Environment`.

    Raises:
        SpecError: it is no environment, has spaces that cannot be written (says which part of them, and why), or does
            not go with the observer.

    Example:
        with rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20) as observer:
            env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
            env.reset()
            env.step(env.action_space.sample())
            env.close()
    """
    # An environment of a package that was never imported does not exist.
    gymnasium, dm_env = sys.modules.get("gymnasium"), sys.modules.get("dm_env")
    if gymnasium is not None and isinstance(env, gymnasium.vector.VectorEnv):
        if isinstance(observer, NStepTransform):
            raise SpecError("an `NStepTransform` takes steps of one environment: use one, and an observer, for each.")
        from reverb_writer.environments.vector_recorder import VectorRecorder  # noqa: PLC0415  # needs gymnasium

        return VectorRecorder(env, observer, seeds=seeds)
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        from reverb_writer.environments.recorder import Recorder  # noqa: PLC0415  # needs gymnasium

        return Recorder(env, observer, seeds=seeds)
    if dm_env is not None and isinstance(env, dm_env.Environment):
        if seeds:
            raise SpecError("`seeds` must be False for a dm_env.Environment, the resets of which take no seed.")
        from reverb_writer.environments.dm_env_recorder import RecordedEnvironment  # noqa: PLC0415  # needs dm_env

        return RecordedEnvironment(env, observer)
    kind = type(env).__name__
    raise SpecError(f"`env` must be a gymnasium.Env, a gymnasium.vector.VectorEnv or a dm_env.Environment, got {kind}.")
