"""Convert an episode to rows, as `reverb_writer.environments` records them, and back.

T steps of an environment are T + 1 rows; `environments.recorded_steps` draws them. `extra_model_outputs` are in the row
of their action. Strings are bytes, as Reverb stores them. The kinds of the rows:

    first row     FIRST, unless the chunk is a later one
    T rows        ACTION
    last row      LAST, and TERMINAL if the environment ended the episode; 0 if the episode continues after the chunk
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer
from reverb_writer.errors import IncompleteError, StructureError
from reverb_writer.leaves import as_bytes, padded_rows
from reverb_writer.nests import fields_of, named_leaves
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL, LastRow, first_rows, has, kinds_of
from reverb_writer.rows.layouts import checked_last_row, layout_of

Array = npt.NDArray[Any]

_NEEDED = ("observation", "action", "reward")
_EXTRAS = ("extra_model_outputs", "extras", "policy_info")


def of(episode: EpisodeData) -> dict[str, Any]:
    """Return the T + 1 rows of an episode as a nest with leaves [T + 1, ...], copied."""
    _num_steps(episode)
    steps = {
        "observation": tree.map_structure(_stored, episode.observations.to_arrays()),
        "action": tree.map_structure(_closed, episode.actions.to_arrays()),
        "reward": _closed(episode.rewards.to_arrays()).astype(np.float32),
    }
    if episode.extra_model_outputs:
        steps["extra_model_outputs"] = {
            key: tree.map_structure(_closed, buffer.to_arrays()) for key, buffer in episode.extra_model_outputs.items()
        }
    return steps


def kinds(episode: EpisodeData) -> npt.NDArray[np.uint8]:
    """Return the kinds of the T + 1 rows of an episode, uint8 [T + 1]."""
    found = np.full(_num_steps(episode) + 1, ACTION, np.uint8)
    found[0] |= FIRST * (episode.t_started == 0)
    found[-1] = LAST * episode.is_done | TERMINAL * episode.is_terminated
    return found


def columns(data: Any, kinds: Any = None, last_row: LastRow | None = None) -> dict[str, Any]:
    """Return the arguments of `Episode` for rows with leaves [T + 1, ...]; arguments as for `Episode.from_steps`."""
    paths, _ = named_leaves(data, "steps")
    fields = fields_of(data)
    fields = {} if fields is None else fields
    if missing := [name for name in _NEEDED if fields.get(name) is None]:
        raise StructureError(f"steps must have an observation, an action and a reward; missing: {', '.join(missing)}.")
    num_rows = len(np.asarray(fields["reward"]))
    found = _real_kinds(_kinds_of(data, paths, kinds, num_rows, checked_last_row(last_row)))
    num = len(found) - 1
    last = int(found[-1]) if num >= 0 else 0
    repeats = last & ACTION and last & LAST and last_row != "boundary"
    if repeats:
        if last_row != "action" or not last & TERMINAL:
            raise StructureError(_without_final(last))
        num += 1
    if num < 1:
        raise StructureError("an episode needs two rows or more: it has one step more than actions.")

    def column(name: str, nest: Any, *, has_final: bool = False) -> InfiniteLookbackBuffer:
        rows = np.minimum(
            np.arange(num + has_final), len(found) - 1
        )  # with `repeats`, the last observation appears twice
        _, leaves = named_leaves(nest, f"`{name}`")
        return InfiniteLookbackBuffer.from_arrays(
            tree.unflatten_as(nest, [np.asarray(leaf)[rows] for leaf in leaves]), name
        )

    return {
        "observations": column("observation", fields["observation"], has_final=True),
        "actions": column("action", fields["action"]),
        "rewards": column("reward", fields["reward"]),
        "extra_model_outputs": {name: column(name, part) for name, part in _extras(fields).items()},
        "terminated": bool(last & TERMINAL),
        "truncated": bool(last & LAST) and not last & TERMINAL,
    }


def _num_steps(episode: EpisodeData) -> int:
    if not len(episode):
        raise IncompleteError("an episode without a step has nothing to write. Add a step first.")
    return len(episode)


def _kinds_of(data: Any, paths: Sequence[str], kinds: Any, num_rows: int, last_row: LastRow | None) -> Array:
    """Return the kinds of all rows."""
    if kinds is None:
        if layout_of(paths) is None:
            raise StructureError(
                "no leaf of these steps shows where the episode ends. Pass their kinds: `kinds=episode.kinds()`, or "
                "`kinds=sample.kinds`."
            )
        return np.asarray(kinds_of(data, last_row=last_row))
    found = np.asarray(kinds)
    if found.shape != (num_rows,) or found.dtype.kind not in "iu":
        raise StructureError(
            f"`kinds` must be integers [{num_rows}], one per row, got {found.dtype} {list(found.shape)}."
        )
    return found.astype(np.uint8)


def _real_kinds(kinds: Array) -> Array:
    """Return the kinds without padding, of rows of one episode."""
    num = int(np.argmax(np.append(has(kinds, PADDING), True)))
    if not has(kinds[num:], PADDING).all():
        raise StructureError("rows of an episode follow padding. Pass the rows of one episode.")
    if (count := int(first_rows(kinds).sum())) > 1:
        raise StructureError(
            f"these steps are rows of {count} episodes, and an `Episode` holds one. Split them at the rows that begin "
            "an episode; `reverb_writer.rows.first_rows` shows these rows."
        )
    return kinds[:num]


def _without_final(last: int) -> str:
    """Return the error of a last row with an action, because the observation after the action is missing."""
    repeat = "`last_row='action'` to repeat the last observation there, or " if last & TERMINAL else ""
    return (
        "the last row of the episode has an action, and no row holds the observation after it. Append a row with the "
        f"final observation; or pass {repeat}`last_row='boundary'` if the last row only holds the final observation, "
        "and its action and reward have no meaning."
    )


def _extras(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra model outputs by name; a nest that is no dict has the name of its leaf in the row."""
    found: dict[str, Any] = {}
    for name in _EXTRAS:
        nest = fields.get(name)
        if nest is None or (tree.is_nested(nest) and not tree.flatten(nest)):
            continue
        is_dict = isinstance(nest, Mapping) and name != "policy_info"
        found.update(nest if is_dict else {name: nest})
    return found


def _closed(leaf: Array) -> Array:
    """Append a row of zeros to a leaf."""
    return padded_rows(_stored(leaf), len(leaf) + 1)


def _stored(leaf: Array) -> Array:
    """Return strings as Reverb stores them, and other leaves unchanged."""
    return as_bytes(leaf, "episode", "as in its first step") if leaf.dtype.kind == "O" else leaf
