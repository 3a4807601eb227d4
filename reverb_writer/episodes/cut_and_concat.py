"""Cut, slice and concatenate episodes."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from reverb_writer.episodes.episode_data import EpisodeData
from reverb_writer.episodes.growing_columns import Block
from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer
from reverb_writer.errors import SpecError, StructureError

Rows = npt.NDArray[np.integer[Any]]
Chunk = TypeVar("Chunk", bound=EpisodeData)


def cut(episode: Chunk, lookback: int) -> Chunk:
    """Return the chunk that continues an episode: it is ongoing, and its look-back is the last steps."""
    total = episode.rewards.len_incl_lookback()
    steps = np.arange(max(0, total - lookback), total)
    last = episode.observations.len_incl_lookback() - 1
    successor = _part(episode, np.append(steps, last) if last >= 0 else steps, steps, len(steps), episode.t)
    for buffer in (
        successor.observations,
        successor.actions,
        successor.rewards,
        *successor.extra_model_outputs.values(),
    ):
        buffer.finalized = False
    successor.start_timer()
    return successor


def cut_out(episode: Chunk, wanted: slice) -> Chunk:
    """Return the steps of a slice, with as much look-back as the episode has."""
    if wanted.step is not None and wanted.step < 1:
        raise SpecError(f"the step of an episode's slice must be >= 1, got {wanted.step}.")
    start, stop, step = wanted.indices(len(episode))
    num_lookback = episode.rewards.lookback
    steps = np.arange(start, stop, step) + num_lookback
    if start <= stop and len(episode.observations):
        lookback = np.arange(start, start + num_lookback)
        # A part of T steps has T + 1 observations.
        observations = np.concatenate([lookback, steps, [stop + num_lookback]])
        part = _part(episode, observations, np.concatenate([lookback, steps]), num_lookback, episode.t_started + start)
    else:  # it ends before it starts: it has no observation either
        part = _part(episode, steps, steps, 0, episode.t_started + start)
    if stop == len(episode):
        part.is_terminated, part.is_truncated = episode.is_terminated, episode.is_truncated
    return part


def concat(episode: EpisodeData, other: EpisodeData) -> None:
    """Add the steps of the next chunk, in place."""
    other.validate()
    for name, own, following in (("id_", episode.id_, other.id_), ("t_started", episode.t, other.t_started)):
        if own != following:
            raise SpecError(f"the next chunk must have `{name}` {own!r}, got {following!r}.")
    if not (len(episode.observations) and len(other.observations) and _meet(episode.observations, other.observations)):
        raise SpecError("the next chunk must start with the last observation of this one.")
    extras = dict(episode.extra_model_outputs)
    if len(other):
        if not len(episode):
            extras |= {key: InfiniteLookbackBuffer() for key in other.extra_model_outputs if key not in extras}
        if extras.keys() != other.extra_model_outputs.keys():
            names = f"{sorted(extras)}, got {sorted(other.extra_model_outputs)}"
            raise StructureError(f"the next chunk must have the same extra model outputs, {names}.")
        pairs = [
            (episode.observations, other.observations, 1),
            (episode.actions, other.actions, 0),
            (episode.rewards, other.rewards, 0),
            *((extras[key], other.extra_model_outputs[key], 0) for key in extras),
        ]
        blocks = [(own.rows, own.rows.check(_new(following, skip), "chunk")) for own, following, skip in pairs]
        for rows, block in blocks:
            rows.put(block)
            rows.size += block.num_rows
        episode.extra_model_outputs = extras
    episode.infos.pop()
    episode.infos.extend(other.infos.get())
    episode.custom_data.update(other.custom_data)
    episode.t = other.t
    episode.is_terminated, episode.is_truncated = other.is_terminated, other.is_truncated


def _part(episode: Chunk, observations: Rows, others: Rows, lookback: int, t_started: int) -> Chunk:
    """Return an episode of some of the rows; their numbers include the look-back.

    The first `lookback` of these rows are the look-back of the new episode.
    """
    part = type(episode)(
        episode.id_,
        t_started=t_started,
        agent_id=episode.agent_id,
        module_id=episode.module_id,
        multi_agent_episode_id=episode.multi_agent_episode_id,
    )
    part.observations = episode.observations.part(observations, lookback)
    part.infos = episode.infos.part(observations, lookback)
    part.actions = episode.actions.part(others, lookback)
    part.rewards = episode.rewards.part(others, lookback)
    part.extra_model_outputs = {
        key: buffer.part(others, lookback) for key, buffer in episode.extra_model_outputs.items()
    }
    part.t = t_started + len(part.rewards)
    part.custom_data = copy.deepcopy(episode.custom_data)
    return part


def _meet(first: InfiniteLookbackBuffer, second: InfiniteLookbackBuffer) -> bool:
    last = first.part(np.array([first.len_incl_lookback() - 1]), 0)
    return last.rows == second.part(np.array([second.lookback]), 0).rows


def _new(buffer: InfiniteLookbackBuffer, skip: int) -> Block:
    """Return the rows without the look-back and the first `skip`."""
    block = buffer.rows.block(np.arange(buffer.lookback + skip, buffer.len_incl_lookback()))
    assert block is not None  # noqa: S101  # there are steps
    return block
