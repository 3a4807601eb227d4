"""Convert an episode to steps in the layout that `reverb_writer.environments` records, and back.

T steps of an environment are T + 1 rows; `environments.recorded_steps` draws them. `extra_model_outputs` are in the row
of their action. In a later chunk no row has `is_first`. The last row of a cut chunk has no flag, because the episode
continues. Strings are bytes, as Reverb stores them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.errors import IncompleteError, StructureError
from reverb_writer.leaves import as_bytes, padded_rows
from reverb_writer.nests import fields_of
from reverb_writer.slices.markers import read_markers

Array = npt.NDArray[Any]


def of(episode: EpisodeData) -> dict[str, Any]:
    """Return the T + 1 steps of an episode as a nest with leaves [T + 1, ...], copied."""
    num = len(episode)
    if not num:
        raise IncompleteError("an episode without a step has nothing to write. Add a step first.")
    last = np.arange(num + 1) == num
    steps = {
        "observation": tree.map_structure(_stored, episode.observations.to_arrays()),
        "action": tree.map_structure(_closed, episode.actions.to_arrays()),
        "reward": _closed(episode.rewards.to_arrays()).astype(np.float32),
        "discount": _closed(np.ones(num, np.float32)),
        "is_first": (np.arange(num + 1) == 0) & (episode.t_started == 0),
        "is_last": last & episode.is_done,
        "terminated": last & episode.is_terminated,
        "truncated": last & episode.is_truncated,
    }
    steps["discount"][num - 1] = not episode.is_terminated
    if episode.extra_model_outputs:
        steps["extra_model_outputs"] = {
            key: tree.map_structure(_closed, buffer.to_arrays()) for key, buffer in episode.extra_model_outputs.items()
        }
    return steps


def columns(data: Any) -> dict[str, Any]:
    """Return the arguments of `Episode` for steps with leaves [T + 1, ...].

    Steps are a nest in the layout above, RLDS steps, or a TF-Agents trajectory. `reverb_writer.slices.read_markers`
    finds their end.
    """
    fields = fields_of(data) or {}
    found = {name: fields.get(name) for name in ("observation", "action", "reward")}
    missing = [name for name, part in found.items() if part is None]
    if missing:
        raise StructureError(f"steps must have an observation, an action and a reward; missing: {', '.join(missing)}.")
    markers = read_markers(data)
    ends = markers.ends if markers.done is None else markers.done
    is_done = ends is not None and bool(ends.any())
    num = int(np.argmax(ends)) if is_done and ends is not None else len(np.asarray(found["reward"])) - 1
    if num < 1:
        raise StructureError("an episode needs two rows or more: it has one step more than actions.")
    terminated = markers.terminated is not None and bool(markers.terminated[: num + 1].any())
    extras = dict(fields.get("extra_model_outputs") or {})
    policy_info = fields.get("policy_info")
    if policy_info is not None and tree.flatten(policy_info):
        extras["policy_info"] = policy_info

    def first(nest: Any, num_rows: int) -> Any:
        return tree.map_structure(lambda leaf: np.asarray(leaf)[:num_rows], nest)

    return {
        "observations": first(found["observation"], num + 1),
        "actions": first(found["action"], num),
        "rewards": first(found["reward"], num),
        "extra_model_outputs": {key: first(part, num) for key, part in extras.items()},
        "terminated": terminated,
        "truncated": is_done and not terminated,
    }


def _closed(leaf: Array) -> Array:
    """Append a row of zeros to a leaf."""
    return padded_rows(_stored(leaf), len(leaf) + 1)


def _stored(leaf: Array) -> Array:
    """Return strings as Reverb stores them, and other leaves unchanged."""
    return as_bytes(leaf, "episode", "as in its first step") if leaf.dtype.kind == "O" else leaf
