"""`Episode` and RLlib's `SingleAgentEpisode` in turn: a step, and the getters.

RLlib is timed where it is installed: `make rllib`. It has two modes, lists while an episode is ongoing and arrays after
`finalize()`; ours has arrays from the start.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.arena import Effort
from benchmarks.report import Table, ratio
from reverb_writer.episode import Episode

__all__ = ["episode_getters", "episode_steps"]

_LENGTHS = (1_000, 10_000, 100_000)
_OBSERVATIONS: dict[str, Any] = {
    "4 floats": np.zeros(4, np.float32),
    "a dict of 4 floats and 64 x 64 bytes": {"floats": np.zeros(4, np.float32), "frame": np.zeros((64, 64), np.uint8)},
}
_GETTERS: dict[str, Callable[[Any], Any]] = {
    "get_observations(-1)": lambda episode: episode.get_observations(-1),
    "get_observations(slice(-4, None))": lambda episode: episode.get_observations(slice(-4, None)),
    "get_observations([3, 5, 8])": lambda episode: episode.get_observations([3, 5, 8]),
    "get_observations()": lambda episode: episode.get_observations(),
    "get_rewards(slice(-4, 4), fill=0.0)": lambda episode: episode.get_rewards(
        slice(-4, 4), neg_index_as_lookback=True, fill=0.0
    ),
    "get_rewards(slice(-4, 0), fill=0.0)": lambda episode: episode.get_rewards(
        slice(-4, 0), neg_index_as_lookback=True, fill=0.0
    ),
    "get_actions(slice(-4, 4), fill=0, one_hot)": lambda episode: episode.get_actions(
        slice(-4, 4), neg_index_as_lookback=True, fill=0, one_hot_discrete=True
    ),
}


def episode_steps(effort: Effort) -> Table:
    """`Episode.add_env_step` beside RLlib's lists and RLlib's arrays, in short and in long episodes."""
    peer, rows = _peer(), []
    for name, observation in _OBSERVATIONS.items():
        for length in _LENGTHS if name == "4 floats" else _LENGTHS[:1]:
            contenders: list[Callable[[], float]] = [lambda: _step_us(Episode, observation, length)]  # noqa: B023  # called below
            if peer is not None:
                contenders += [
                    lambda: _step_us(peer, observation, length),  # noqa: B023
                    lambda: _step_us(peer, observation, length, finalized=True),  # noqa: B023
                ]
            ours, *theirs = _medians(contenders, effort.rounds)
            cells = [f"{us:.2f}" for us in (ours, *theirs)] + ["not installed"] * (2 - len(theirs))
            for us, least in zip(theirs, (1, 10), strict=False):
                cells += ratio(us, ours, least) if length == _LENGTHS[0] else (f"{us / ours:.1f}", "")
            rows.append([name, f"{length:,}", *cells, *[""] * (8 - 2 - len(cells) + 1)][:9])
    return Table(
        "A step of an episode, observations, 1 action, 1 reward, infos",
        ["observation", "steps before", "ours, us", "RLlib list, us", "RLlib array, us", "list/ours", "required",
         "array/ours", "required"],
        rows,
        "CPU time. RLlib's lists keep a reference to the observation, ours copies it.",
    )  # fmt: skip


def episode_getters(effort: Effort) -> Table:
    """Getters of `Episode` and of RLlib's on arrays, 1,000 steps."""
    peer, rows = _peer(), []
    episodes = [
        _filled(kind, _OBSERVATIONS["4 floats"], 1_000).finalize() for kind in (Episode, peer) if kind is not None
    ]
    for name, getter in _GETTERS.items():
        contenders = [lambda episode=episode: _call_us(getter, episode) for episode in episodes]  # noqa: B023
        ours, *theirs = _medians(contenders, effort.rounds)
        cells = [f"{theirs[0]:.2f}", *ratio(theirs[0], ours, 2)] if theirs else ["not installed", "", ""]
        rows.append([name, f"{ours:.2f}", *cells])
    return Table(
        "Getters on arrays, 1,000 steps",
        ["", "ours, us", "RLlib, us", "ours is x times", "required"],
        rows,
        "CPU time. RLlib's slices are views of the episode's own data, ours are copies.",
    )


def _peer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("ray.rllib.env.single_agent_episode").SingleAgentEpisode
        except ImportError:
            return None


def _filled(kind: Any, observation: Any, length: int) -> Any:
    """Return an ongoing episode of so many steps."""
    spaces = importlib.import_module("gymnasium").spaces
    episode = kind(action_space=spaces.Discrete(4))
    episode.add_env_reset(observation, {})
    for _ in range(length):
        episode.add_env_step(observation, 1, 1.0, {})
    return episode


def _step_us(kind: Any, observation: Any, length: int, *, finalized: bool = False) -> float:
    """Return the microseconds of a step, on average of those that follow the first `length`."""
    episode = _filled(kind, observation, length)
    if finalized:
        episode.finalize()
    num_steps = 100 if finalized else 1_000
    gc.collect()
    start = time.process_time()
    for _ in range(num_steps):
        episode.add_env_step(observation, 1, 1.0, {})
    return 1e6 * (time.process_time() - start) / num_steps


def _call_us(getter: Callable[[Any], Any], episode: Any) -> float:
    start = time.process_time()
    for _ in range(2_000):
        getter(episode)
    return 1e6 * (time.process_time() - start) / 2_000


def _medians(contenders: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Time each contender in turn, round by round."""
    turns = [[contender() for contender in contenders] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]
