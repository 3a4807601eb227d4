"""Wrappers that pass every step of an environment to an observer, including terminal observations.

    env = rw.environments.record(env, observer)     gymnasium.Env, gymnasium.vector.VectorEnv, dm_env.Environment

An observer is one of this package's, with `num_envs` for a vector environment, or any function of a step.
`reverb_writer.environments.recorded_steps` lists the fields of a step.
"""

from __future__ import annotations

from reverb_writer.environments.n_step_transform import NStepTransform
from reverb_writer.environments.recording import record
from reverb_writer.environments.time_steps import TimeStepRecorder

__all__ = ["NStepTransform", "TimeStepRecorder", "record"]
