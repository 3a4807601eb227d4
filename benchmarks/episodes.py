"""`Episode` and RLlib's `SingleAgentEpisode` in turn: a step, and the getters.

RLlib is timed where it is installed: `make rllib`. It takes steps in two modes, lists while an episode is ongoing and
arrays after `finalize()`; ours takes steps in lists only.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.comparison import Effort
from benchmarks.report import Table, ratio
from reverb_writer.episodes import Episode

_SMALL = np.zeros(4, np.float32)
_NEST = {"floats": _SMALL, "frame": np.zeros((64, 64), np.uint8)}
_STEPS: list[tuple[str, Any, int]] = [
    ("4 floats", _SMALL, 1_000),
    ("4 floats", _SMALL, 10_000),
    ("4 floats", _SMALL, 100_000),
    ("a dict of 4 floats and 64 x 64 bytes", _NEST, 1_000),
]
_REQUIRED_AT = _STEPS[0]
_MISSING = "not installed"
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
    for case in _STEPS:
        name, observation, length = case
        contenders = [partial(_step_us, Episode, observation, length)]
        if peer is not None:
            contenders += [partial(_step_us, peer, observation, length, finalized=mode) for mode in (False, True)]
        ours, *theirs = _medians(contenders, effort.rounds)
        cells = [f"{ours:.2f}"]
        for us, least in zip(theirs or (None, None), (1, 10), strict=True):
            if us is None:
                cells += [_MISSING, "", ""]
            else:
                times, required = ratio(us, ours, least)
                cells += [f"{us:.2f}", times, required if case is _REQUIRED_AT else ""]
        rows.append([name, f"{length:,}", *cells])
    return Table(
        "A step of an episode: observation, action, reward, info",
        [
            "observation", "steps before", "ours, us",
            "RLlib's list, us", "ours is x times", "required",
            "RLlib's array, us", "ours is x times", "required",
        ],
        rows,
        "CPU time. RLlib's lists keep a reference to the observation, ours copies it.",
    )  # fmt: skip


def episode_getters(effort: Effort) -> Table:
    """Getters of `Episode` and of RLlib's on arrays, 1,000 steps."""
    kinds = [kind for kind in (Episode, _peer()) if kind is not None]
    episodes = [_filled(kind, _SMALL, 1_000).finalize() for kind in kinds]
    rows = []
    for name, getter in _GETTERS.items():
        ours, *theirs = _medians([partial(_call_us, getter, episode) for episode in episodes], effort.rounds)
        cells = [f"{theirs[0]:.2f}", *ratio(theirs[0], ours, 2)] if theirs else [_MISSING, "", ""]
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
