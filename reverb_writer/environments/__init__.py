"""Wrappers that pass every step of an environment to an observer, including final observations.

    env = rw.environments.record(env, observer)     gymnasium.Env, gymnasium.vector.VectorEnv, dm_env.Environment

An observer is one of this package's, with `num_envs` for several environments, or any function of a row.
`reverb_writer.environments.recorded_steps` lists the leaves of a row.
"""

from __future__ import annotations

from reverb_writer.environments.recording import record
from reverb_writer.environments.time_steps import TimeStepRecorder

__all__ = ["TimeStepRecorder", "record"]
