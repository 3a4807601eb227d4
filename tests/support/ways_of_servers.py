"""Ways of episodes through a server: each of `STEPS` by each of `OBSERVERS`, read by each of `READERS`.

`STEPS` are programs that pass steps to an observer, `OBSERVERS` make items of the steps, and a learner reads the items
by `READERS`. Only the steps decide which transitions exist: observers and readers keep all of them,
and `SAMPLERS` some. To add a way, add a function to one of the four tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
import tree
from played import LAYOUTS, Pair, Played
from ways import all_pairs, kinds_by_hand, pairs_in, pairs_of_actions, rows_of, stacked

import reverb_writer as rw
from reverb_writer.errors import IncompleteError
from reverb_writer.transitions.n_step import one_per_window

if TYPE_CHECKING:
    from typing import TypeGuard

ENDED = frozenset(("terminated", "truncated"))
ALL_ENDS = ENDED | {"cut"}
MAX_ROWS = 100  # of an episode


class Steps(NamedTuple):
    """A program that passes its steps to an observer."""

    write: Callable[[Any, Sequence[Played]], None]
    keeps: Callable[[Played], Sequence[Pair]]
    ends: frozenset[str] = ALL_ENDS
    options: Mapping[str, Any] = MappingProxyType({})  # of the observer
    last_row: Any = None  # of the reader


# ---------------------------------------------------------------------------------------------------------- writing


def _end(observer: Any, episodes: Sequence[Played]) -> None:
    """End an episode that was cut: by an observer, or by a writer of files."""
    if episodes[-1].end == "cut":
        observer.reset() if hasattr(observer, "reset") else observer.end_episode(end="reset")


def _rows(layout: str) -> Callable[[Any, Sequence[Played]], None]:
    """Write rows whose own leaves show the ends."""

    def write(observer: Any, episodes: Sequence[Played]) -> None:
        for episode in episodes:
            for row in rows_of(episode, layout):
                observer(row)
        _end(observer, episodes)

    return write


def _plain(episode: Played, t: int, *, discount: bool = False) -> dict[str, Any]:
    """Return the step of an action, as a loop over an environment has it."""
    row = episode.row(t)
    return {name: row[name] for name in ("observation", "action", "reward", *(["discount"] if discount else []))}


def _said(*, discount: bool = False, final: bool = True) -> Callable[[Any, Sequence[Played]], None]:
    """Write steps of actions, whose ends the caller says."""

    def write(observer: Any, episodes: Sequence[Played]) -> None:
        for episode in episodes:
            for t in range(episode.size + (episode.end == "cut")):
                is_end = t == episode.size - 1
                observer(
                    _plain(episode, t, discount=discount),
                    terminated=is_end and episode.end == "terminated",
                    truncated=is_end and episode.end == "truncated",
                    final_observation=np.int64(episode.first + t + 1) if final else None,
                )
        _end(observer, episodes)

    return write


def _end_of_episode(observer: Any, episodes: Sequence[Played]) -> None:
    """Write the commonest loop: its ends say nothing of the environment."""
    for episode in episodes:
        for t in range(episode.size + (episode.end == "cut")):
            observer(_plain(episode, t), end_of_episode=t == episode.size - 1 and episode.end != "cut")
    _end(observer, episodes)


def _by_row(observer: Any, episodes: Sequence[Played]) -> None:
    for episode in episodes:
        for row, kind in zip(rows_of(episode, "kinds"), kinds_by_hand(episode), strict=True):
            observer.write_row(row, int(kind))
    _end(observer, episodes)


def _by_column(observer: Any, episodes: Sequence[Played]) -> None:
    for episode in episodes:
        observer.extend(stacked(rows_of(episode, "kinds")), kinds_by_hand(episode))
    _end(observer, episodes)


def _of_two_envs(observer: Any, episodes: Sequence[Played]) -> None:
    """Write two environments that step together, until one has no episode left; then the other one alone."""
    streams = [
        [(one, t) for one in part for t in range(one.size + (one.end == "cut"))]
        for part in (episodes[::2], episodes[1::2])
    ]
    for number in range(max(map(len, streams))):
        both = [stream[min(number, len(stream) - 1)] if stream else streams[0][0] for stream in streams]
        ends = [one.end if t == one.size - 1 else "" for one, t in both]
        observer(
            stacked([_plain(one, t) for one, t in both]),
            env_mask=np.array([number < len(stream) for stream in streams]),
            terminated=np.array([end == "terminated" for end in ends]),
            truncated=np.array([end == "truncated" for end in ends]),
            final_observation=np.array([one.first + t + 1 for one, t in both]),
        )
    _end(observer, episodes)


def _episodes(observer: Any, episodes: Sequence[Played]) -> None:
    for episode in episodes:
        actions = [_plain(episode, t) for t in range(episode.size)]
        observer.write_episode(
            rw.Episode(
                observations=np.arange(episode.first, episode.first + episode.size + 1),
                actions=np.array([row["action"] for row in actions]),
                rewards=np.array([row["reward"] for row in actions]),
                terminated=episode.end == "terminated",
                truncated=episode.end == "truncated",
                len_lookback_buffer=0,
            )
        )


class Scripted(gymnasium.Env[Any, Any]):
    """Plays listed episodes, and then the same filler without end."""

    observation_space = gymnasium.spaces.Box(0, 2**40, (), np.int64)
    action_space = gymnasium.spaces.Discrete(5)

    def __init__(self, episodes: Sequence[Played]) -> None:
        self._left, self._filler = [*episodes], Played(FILLER, 3, "truncated", 1.0)

    @property
    def is_over(self) -> bool:
        """Whether all listed episodes were played."""
        return self._now is self._filler

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._now, self._t = self._left.pop(0) if self._left else self._filler, 0
        return np.int64(self._now.first), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        pair, is_end = self._now.pair(self._t, has_discounts=False), self._t == self._now.size - 1
        assert action == pair.action
        self._t += 1
        terminated, truncated = (is_end and self._now.end == end for end in ("terminated", "truncated"))
        return np.int64(pair.next_observation), pair.reward, terminated, truncated, {}


FILLER = 2**20
"""Observations from here on belong to no listed episode."""


def _recorded(observer: Any, episodes: Sequence[Played]) -> None:
    """Record an environment; `close` ends an episode that was cut as a truncated one."""
    env = rw.environments.record(Scripted(episodes), observer)
    for episode in episodes:
        observation, _ = env.reset()
        for _ in range(episode.size):
            observation, *_ = env.step(observation % 5)
    env.close()


def _recorded_envs(mode: str) -> Callable[[Any, Sequence[Played]], None]:
    """Record two environments in an autoreset mode."""

    def write(observer: Any, episodes: Sequence[Played]) -> None:
        scripted = [Scripted(episodes[::2]), Scripted(episodes[1::2])]
        autoreset = gymnasium.vector.AutoresetMode(mode)
        making: Any = [functools.partial(lambda one: one, one) for one in scripted]
        vector = gymnasium.vector.SyncVectorEnv(making, autoreset_mode=autoreset)
        env = rw.environments.record(vector, observer)
        observation, _ = env.reset()
        while not all(one.is_over for one in scripted):
            observation, _, terminated, truncated, _ = env.step(observation % 5)
            is_over = terminated | truncated
            if mode == "Disabled" and is_over.any():
                observation, _ = env.reset(options={"reset_mask": is_over})
        env.close()

    return write


def _without_discounts(episode: Played) -> list[Pair]:
    return all_pairs(episode, "flags")


def _of(layout: str) -> Callable[[Played], Sequence[Pair]]:
    return lambda episode: all_pairs(episode, layout)


def _beside_actions(episode: Played) -> list[Pair]:
    return pairs_of_actions(episode, "flags") if episode.end != "cut" else all_pairs(episode, "flags")


def _of_unknown_ends(episode: Played) -> list[Pair]:
    pairs = all_pairs(episode, "flags")
    return pairs if episode.end == "cut" else pairs[:-1]


STEPS = {
    **{
        f"rows, {layout}": Steps(_rows(layout), _of(layout))
        for layout in LAYOUTS
        if layout not in ("flags", "discount")
    },
    "rows, flags": Steps(_rows("flags"), _without_discounts, options={"last_row": "boundary"}),
    "said": Steps(_said(), _without_discounts),
    "said, with discounts": Steps(_said(discount=True), _of("recorded")),
    "said, no final observation": Steps(_said(final=False), _beside_actions),
    "end_of_episode": Steps(_end_of_episode, _of_unknown_ends),
    "write_row": Steps(_by_row, _without_discounts),
    "extend": Steps(_by_column, _without_discounts),
    "Episode": Steps(_episodes, _without_discounts),
    "two environments": Steps(_of_two_envs, _without_discounts, options={"num_envs": 2}),
    "record": Steps(_recorded, _without_discounts),
    **{
        f"record, {mode}": Steps(_recorded_envs(mode), _without_discounts, ENDED, {"num_envs": 2})
        for mode in ("NextStep", "SameStep", "Disabled")
    },
    **{
        f"rows, {layout}": Steps(
            _rows(layout), lambda episode: pairs_of_actions(episode, "flags"), ENDED, {"last_row": "action"}, "action"
        )
        for layout in ("gymnasium", "d4rl", "rsl_rl", "torchrl")
    },
}

OBSERVERS: dict[str, Callable[..., Any]] = {
    "windows of 2": lambda replay, **options: rw.TrajectoryObserver(replay, "a", 2, end_of_episode="tile", **options),
    "windows of 3": lambda replay, **options: rw.TrajectoryObserver(
        replay, "a", 3, 2, end_of_episode="cover", **options
    ),
    "windows up to 4": lambda replay, **options: rw.TrajectoryObserver(
        replay, "a", 4, 3, end_of_episode="truncate", **options
    ),
    "windows across episodes": lambda replay, **options: rw.SequenceObserver(replay, "a", 2, **options),
    "episodes": lambda replay, **options: rw.EpisodeObserver(replay, "a", MAX_ROWS, **options),
}
"""Each pair of neighbouring rows of an episode is in exactly one item."""


# ---------------------------------------------------------------------------------------------------------- reading


def _num_items(replay: Any) -> int:
    with rw.Client(replay) as client:
        return client.server_info()["a"].current_size


def read_batch(replay: Any, last_row: Any) -> rw.Batch | None:
    """Return all items as one batch of padded windows."""
    if not (size := _num_items(replay)):
        return None
    with rw.ReplayDataset(
        replay, "a", size, collate="pad", last_row=last_row, max_in_flight_batches=1, timeout_s=60
    ) as dataset:
        found: rw.Batch = next(dataset)
        return found


def _has_pairs(batch: rw.Batch | None, last_row: Any) -> TypeGuard[rw.Batch]:
    """Return whether windows are long enough for a transition."""
    return batch is not None and (last_row == "action" or len(tree.flatten(batch.data)[0][0]) > 1)


def _windows(replay: Any, last_row: Any) -> Iterable[Pair]:
    batch = read_batch(replay, last_row)
    return pairs_in(rw.to_transitions(batch)) if _has_pairs(batch, last_row) else []


def _of_library(library: str) -> Callable[[Any, Any], Iterable[Pair]]:
    def read(replay: Any, last_row: Any) -> Iterable[Pair]:
        make = __import__(library, fromlist=["asarray"]).asarray
        batch = read_batch(replay, last_row)
        return pairs_in(rw.to_transitions(batch.map_arrays(make))) if _has_pairs(batch, last_row) else []

    return read


def _samples(replay: Any, last_row: Any) -> Iterable[Pair]:
    """Read items without a dataset."""
    size = _num_items(replay)
    with rw.Client(replay) as client:
        for sample in client.sample("a", size) if size else ():
            kinds: Any = sample.kinds
            if len(kinds) > 1 or last_row == "action":
                yield from pairs_in(rw.to_transitions(sample.data, kinds=kinds, last_row=last_row))


def _slices(replay: Any, last_row: Any) -> Iterable[Pair]:
    """Read slices with the row after each: some transitions, and maybe several times."""
    if not (size := _num_items(replay)):
        return []
    with rw.SliceDataset(
        replay,
        "a",
        2 * size,
        2,
        pool_size=size,
        with_next=True,
        last_row=last_row,
        max_in_flight_batches=1,
        timeout_s=60,
    ) as dataset:
        try:
            return pairs_in(rw.to_transitions(next(dataset)))
        except IncompleteError:  # all rows are padding
            return []


def _one_per_window(replay: Any, last_row: Any) -> Iterable[Pair]:
    """Read a transition of each window at random."""
    batch = read_batch(replay, last_row)
    if not _has_pairs(batch, last_row):
        return []
    return pairs_in(one_per_window(batch, 1, 0.99, np.random.default_rng(0)))


READERS = {
    "windows": _windows,
    "torch": _of_library("torch"),
    "jax": _of_library("jax.numpy"),
    "Client.sample": _samples,
}
"""Each gives every transition of the items once."""

SAMPLERS = {"slices": _slices, "one per window": _one_per_window}
"""Each gives some transitions of the items, maybe several times."""


def suits(steps: str, observer: str, episodes: Sequence[Played]) -> bool:
    """Return whether the steps can end so, and fill a window."""
    num_rows = sum(episode.size + (STEPS[steps].last_row != "action") for episode in episodes)
    fills = num_rows > 1 or observer != "windows across episodes"
    return fills and {episode.end for episode in episodes} <= STEPS[steps].ends


def write(replay: Any, steps: str, observer: str, episodes: Sequence[Played]) -> None:
    """Write episodes into the table `a`."""
    way = STEPS[steps]
    with OBSERVERS[observer](replay, timeout_s=60, **way.options) as opened:
        way.write(opened, episodes)
