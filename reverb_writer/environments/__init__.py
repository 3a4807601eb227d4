"""Environments that record themselves: each reset and step becomes steps of an observer, the terminal observation too.

    env = rw.environments.record(env, observer)     gymnasium.Env, gymnasium.vector.VectorEnv, dm_env.Environment

An observer is a `TrajectoryObserver` or any of its kind, for a vector environment a `VectorObserver`; or anything that
is called with a step. What a step holds is drawn in `reverb_writer.environments.recorded_steps`.

Neither gymnasium nor dm_env is loaded unless an environment of theirs is given.
"""

from __future__ import annotations

from reverb_writer.environments.n_step_transform import NStepTransform
from reverb_writer.environments.recording import record
from reverb_writer.environments.time_steps import TimeStepRecorder

__all__ = ["NStepTransform", "TimeStepRecorder", "record"]
