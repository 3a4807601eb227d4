"""The state of an episode as JSON, and back: ids, columns, and custom data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from reverb_writer.episodes.column_state import broken_state, column_state, restore_column
from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.episodes.json_encoding import decoded, encoded
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer

Restored = TypeVar("Restored", bound=EpisodeData)

_PLAIN = (
    "id_",
    "agent_id",
    "module_id",
    "multi_agent_episode_id",
    "t_started",
    "t",
    "is_terminated",
    "is_truncated",
)
_COLUMNS = ("observations", "infos", "actions", "rewards")


def state_of(episode: EpisodeData) -> dict[str, Any]:
    """Return the state of an episode."""
    state = {name: encoded(getattr(episode, name), name) for name in _PLAIN}
    state |= {name: column_state(getattr(episode, name), name) for name in _COLUMNS}
    state["extra_model_outputs"] = {
        str(key): column_state(buffer, str(key)) for key, buffer in episode.extra_model_outputs.items()
    }
    state["temporary_timestep_data"] = encoded(episode.temporary_timestep_data, "temporary_timestep_data")
    state["custom_data"] = encoded(episode.custom_data, "custom_data")
    state["duration_s"] = episode.get_duration_s()
    return state


def restore(episode: Restored, state: Mapping[str, Any]) -> Restored:
    """Set the state of an episode."""
    with broken_state("an episode"):
        for name in _PLAIN:
            setattr(episode, name, decoded(state[name]))
        for name in _COLUMNS:
            setattr(episode, name, restore_column(InfiniteLookbackBuffer(untyped=name == "infos"), state[name]))
        episode.extra_model_outputs = {
            key: restore_column(InfiniteLookbackBuffer(), column)
            for key, column in state["extra_model_outputs"].items()
        }
        episode.temporary_timestep_data = decoded(state["temporary_timestep_data"])
        episode.custom_data = decoded(state.get("custom_data", {}))
        episode.start_timer(state["duration_s"])
        episode.validate()
    return episode
