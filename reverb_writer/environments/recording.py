"""`record`: pass the steps of an environment to an observer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from reverb_writer.errors import SpecError
from reverb_writer.lazy import needs


def record(
    env: Any,
    observer: Any,
    *,
    extras: Callable[..., Any] | None = None,
    final_extras: Callable[[Any], Any] | None = None,
) -> Any:
    """Return an environment that passes its steps to an observer, and otherwise behaves like `env`.

    Args:
        env: a `gymnasium.Env`, a `gymnasium.vector.VectorEnv` or a `dm_env.Environment`; or a simulator, a
            `gymnasium.Env` with `num_envs`, batched spaces and `final_obs` in its infos, such as Isaac Lab's.
        observer: gets each row, a dict (see `reverb_writer.environments.recorded_steps`): a `TrajectoryObserver` or
            another observer, which also gets the kind of the row, or any function, which gets flags in the row. For
            several environments: a `TrajectoryObserver` whose `num_envs` is their number, or a function with the same
            arguments. The caller closes it after the environment.
        extras: function that returns data of the action, such as the policy's log-probability, value, hidden state
            before the action, version of its weights: a nest of one structure in all steps, with leaves [N, ...] for N
            environments. A function of no arguments is called before each step. A function of one argument is called
            after each step with the `info` that the step returned. Tensors may have gradients. Recorded as `extras`;
            zeros in an episode's last row, which has no action. None to record none.
        final_extras: function of an episode's final observation, as it is recorded, which returns extras of the last
            row, such as {"value": critic(observation)}. Leaves of a dict that it leaves out are zeros. For N
            environments, observations and results are [N, ...]; only rows of episodes that are over count. None for
            zeros.

    Returns:
        A `gymnasium.Wrapper`, `gymnasium.vector.VectorWrapper` or `dm_env.Environment`, used from one thread at a time.
        `reset` and `close` record unfinished episodes as truncated, with their last observation.

        `step` raises StructureError if an action does not fit the dtype and shape of its space; nothing has changed.
        Bounds are not checked. It raises StructureError if an observation does not fit its space, or a float32 cannot
        hold the reward, and SpecError if the observer got steps of another environment in the middle of an episode.
        Errors of `extras`, `final_extras` and of the observer propagate: written rows remain, and the next `reset` ends
        their episodes. Until then, before the first `reset`, and after an interrupt, `step` raises
        `gymnasium.error.ResetNeeded`, or in dm_env StructureError, because a step would be missing.

    Raises:
        SpecError: `env` is not an environment; or a space cannot be written (the error has part and reason); or
            `extras` or `final_extras` is not such a function; or the observer takes steps of another number of
            environments.
        MissingExtraError: the installed version of Gymnasium is too old.

    Example:
        with rw.TrajectoryObserver("localhost:8000", "replay", sequence_length=20) as observer:
            env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
            env.reset()
            env.step(env.action_space.sample())
            env.close()
    """
    # A package that was never imported has no environments.
    gymnasium, dm_env = sys.modules.get("gymnasium"), sys.modules.get("dm_env")
    is_vector = gymnasium is not None and isinstance(env, gymnasium.vector.VectorEnv)
    is_single = gymnasium is not None and isinstance(env, gymnasium.Env)
    is_simulator = is_single and all(hasattr(env.unwrapped, name) for name in ("num_envs", "single_observation_space"))
    num_envs = env.num_envs if is_vector else env.unwrapped.num_envs if is_simulator else None
    taken = getattr(observer, "num_envs", num_envs)  # a function of a row has no such attribute
    if taken != num_envs:
        raise SpecError(
            f"`env` is {_count(num_envs)}, and the {type(observer).__name__} takes steps of {_count(taken)}. "
            f"Pass `num_envs={num_envs}` to it."
        )
    if is_vector or is_single:
        with needs("`record`", "reverb-writer[gymnasium]"):  # the installed version may be too old
            from reverb_writer.environments.gymnasium_recorders import (  # noqa: PLC0415
                Recorder,
                SimulatorRecorder,
                VectorRecorder,
            )

        wrapper = VectorRecorder if is_vector else SimulatorRecorder if is_simulator else Recorder
        return wrapper(env, observer, extras=extras, final_extras=final_extras)
    if dm_env is not None and isinstance(env, dm_env.Environment):
        from reverb_writer.environments.dm_env_recorder import RecordedEnvironment  # noqa: PLC0415  # needs dm_env

        return RecordedEnvironment(env, observer, extras=extras, final_extras=final_extras)
    kind = type(env).__name__
    raise SpecError(f"`env` must be a gymnasium.Env, a gymnasium.vector.VectorEnv or a dm_env.Environment, got {kind}.")


def _count(num_envs: int | None) -> str:
    return "a single environment" if num_envs is None else f"{num_envs} environments that step together"
