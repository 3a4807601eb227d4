"""The state of an episode as what JSON has, and back: columns, spaces, ids."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.episode.buffer import InfiniteLookbackBuffer
from reverb_writer.episode.columns import Columns, as_objects, batched
from reverb_writer.episode.data import EpisodeData
from reverb_writer.episode.encoding import decoded, encoded
from reverb_writer.errors import FormatError, ReverbWriterError, StructureError
from reverb_writer.extras import needs

__all__ = ["restore", "state_of"]

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

_SPACES = {
    "Box": {"low": "low", "high": "high", "shape": "shape", "dtype": "dtype"},
    "Discrete": {"n": "n", "start": "start"},
    "MultiBinary": {"n": "n"},
    "MultiDiscrete": {"nvec": "nvec", "start": "start", "dtype": "dtype"},
    "Text": {"max_length": "max_length", "min_length": "min_length", "charset": "characters"},
}
"""The arguments that make a space, and under which name it has them; old releases lack some."""


def state_of(episode: EpisodeData) -> dict[str, Any]:
    """Return the state of an episode.

    Raises:
        StructureError: a part cannot be put into it.
    """
    state = {name: encoded(getattr(episode, name), name) for name in _PLAIN}
    state |= {name: _buffer_state(getattr(episode, name), name) for name in _COLUMNS}
    state["extra_model_outputs"] = {
        str(key): _buffer_state(buffer, str(key)) for key, buffer in episode.extra_model_outputs.items()
    }
    state["temporary_timestep_data"] = encoded(episode.temporary_timestep_data, "temporary_timestep_data")
    state["duration_s"] = episode.get_duration_s()
    return state


def restore(episode: Restored, state: Mapping[str, Any]) -> Restored:
    """Give an episode a state.

    Raises:
        FormatError: it is none.
    """
    try:
        for name in _PLAIN:
            setattr(episode, name, decoded(state[name]))
        for name in _COLUMNS:
            setattr(episode, name, _buffer(state[name], untyped=name == "infos"))
        episode.extra_model_outputs = {
            key: _buffer(buffer, untyped=False) for key, buffer in state["extra_model_outputs"].items()
        }
        episode.temporary_timestep_data = decoded(state["temporary_timestep_data"])
        episode.start_timer(state["duration_s"])
        episode.validate()
    except FormatError:
        raise
    except (ReverbWriterError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"this is no state of an episode: {type(error).__name__}: {error}") from error
    return episode


def _buffer_state(buffer: InfiniteLookbackBuffer, name: str) -> dict[str, Any]:
    rows = buffer.rows.arrays
    return {
        "data": None if rows is None else encoded(list(rows[0]) if name == "infos" else buffer.rows.pack(rows), name),
        "lookback": buffer.lookback,
        "finalized": buffer.finalized,
        "space": _space_state(buffer.space),
    }


def _buffer(state: Mapping[str, Any], *, untyped: bool) -> InfiniteLookbackBuffer:
    data = decoded(state["data"])
    buffer = InfiniteLookbackBuffer(space=_space(state["space"]), untyped=untyped)
    if data is not None:
        buffer.rows = Columns(as_objects(data) if untyped else batched(data, "state"), untyped=untyped)
    buffer.lookback = min(integer("lookback", state["lookback"], minimum=0), buffer.rows.size)
    buffer.finalized = bool(state["finalized"])
    return buffer


def _space_state(space: Any) -> Any:
    if space is None:
        return None
    kind = type(space).__name__
    if kind == "Dict":
        return {kind: [[encoded(key), _space_state(part)] for key, part in space.spaces.items()]}
    if kind == "Tuple":
        return {kind: [_space_state(part) for part in space.spaces]}
    if kind not in _SPACES:
        raise StructureError(f"a state can have spaces of {', '.join(_SPACES)}, Dict and Tuple, got {kind}.")
    values = {argument: getattr(space, name) for argument, name in _SPACES[kind].items() if hasattr(space, name)}
    if "dtype" in values:
        values["dtype"] = np.dtype(values["dtype"]).str
    return {
        kind: encoded(
            {argument: value.item() if isinstance(value, np.generic) else value for argument, value in values.items()}
        )
    }


def _space(state: Any) -> Any:
    if state is None:
        return None
    with needs("An episode with spaces", "reverb-writer[gymnasium]"):
        spaces = importlib.import_module("gymnasium.spaces")
    ((kind, content),) = state.items()
    if kind == "Dict":
        return spaces.Dict([(decoded(key), _space(part)) for key, part in content])
    if kind == "Tuple":
        return spaces.Tuple([_space(part) for part in content])
    values = decoded(content)
    if kind not in _SPACES or not values.keys() <= _SPACES[kind].keys():
        raise FormatError(f"{kind!r} with {sorted(values)} is no space that a state can have.")
    return getattr(spaces, kind)(**values)
