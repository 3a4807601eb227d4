"""When a vector environment resets its environments, and where their terminal observations are then.

`o5` is the terminal observation of an episode, `o0` the first one of the next:

    mode       call   observation  terminated  infos
    ---------  -----  -----------  ----------  -------------
    NEXT_STEP  step   o5           True
               step   o0           False                      the action of this step has no effect
    SAME_STEP  step   o0           True        final_obs: o5
    DISABLED   step   o5           True
               reset  o0                                      in the environments of the mask

Source: Gymnasium 1.x, `gymnasium.vector.AutoresetMode` and `vector/sync_vector_env.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from reverb_writer.errors import SpecError, StructureError

__all__ = ["AutoresetMode", "env_infos", "final_infos", "final_observation"]

_FINAL_OBSERVATIONS = ("final_obs", "final_observation")  # the second one until Gymnasium 1.0


class AutoresetMode(enum.Enum):
    """When a vector environment resets an environment whose episode is over; the values are Gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"

    @classmethod
    def parse(cls, mode: Any) -> AutoresetMode:
        """Return the member for `mode`: one of ours, one of Gymnasium's, or its name there, such as "SameStep".

        Raises:
            SpecError: there is no such mode.
        """
        try:
            return cls(getattr(mode, "value", mode))
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise SpecError(
                f"`autoreset_mode` must be one of {names}, got {mode!r}. If the environment does not tell it, set "
                '`env.metadata["autoreset_mode"]`.'
            ) from None


def final_observation(infos: Mapping[str, Any] | None, env_id: int) -> Any:
    """Return the terminal observation of an environment that was reset in the same step.

    Raises:
        StructureError: the infos have none.
    """
    infos = infos or {}
    found = [infos[key][env_id] for key in _FINAL_OBSERVATIONS if infos.get(key) is not None]
    if not found or found[0] is None:
        raise StructureError(
            f"environment {env_id}: its episode is over, and `infos` have no `final_obs` for it, only {sorted(infos)}: "
            "its terminal observation would be lost. Pass the infos of the step, or use another `autoreset_mode`."
        )
    return found[0]


def final_infos(infos: Mapping[str, Any] | None, env_id: int) -> dict[str, Any]:
    """Return the infos that belong to the terminal observation of an environment."""
    final = (infos or {}).get("final_info", {})
    return env_infos(final, env_id) if isinstance(final, Mapping) else dict(final[env_id] or {})


def env_infos(infos: Mapping[str, Any] | None, env_id: int) -> dict[str, Any]:
    """Return the infos of one environment: those that its mask `_key` says it has; all where there is no mask.

    >>> infos = {"lives": [3, 2], "_lives": [True, False]}
    >>> env_infos(infos, 0), env_infos(infos, 1)
    ({'lives': 3}, {})
    """
    infos = infos or {}
    own = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if key in (*_FINAL_OBSERVATIONS, "final_info") or (key.startswith("_") and key[1:] in infos):
            continue
        if mask is None or mask[env_id]:
            own[key] = env_infos(values, env_id) if isinstance(values, Mapping) else values[env_id]
    return own
