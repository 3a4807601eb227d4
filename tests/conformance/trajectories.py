"""The steps that both sides are given, and the items that come back.

A step is a TF-Agents `Trajectory` whose every leaf tells the step's number, in many dtypes and shapes; items are read
by dm-reverb's own client. `play` gives an observer a script: any sequence of steps and of calls between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import tree
from tf_agents.replay_buffers import reverb_utils as theirs
from tf_agents.trajectories import StepType, Trajectory

import reverb_writer as rw
from reverb_writer import tf_agents as ours

SIDES = ((theirs, "theirs"), (ours, "ours"))
TRAJECTORIES, SEQUENCES, EPISODES = OBSERVERS = (
    "ReverbAddTrajectoryObserver",
    "ReverbTrajectorySequenceObserver",
    "ReverbAddEpisodeObserver",
)
MODES = {"none": (False, False), "pad": (True, False), "tile": (True, True)}
BOUNDARY_DISCOUNT = 1.0  # of the real boundary step; padding has 0

Script = list[Any]  # of Trajectory and of the names of CALLS


def drop_and_reset(observer: Any) -> None:
    """Reset without writing: our own observers and TF-Agents' spell it differently."""
    if type(observer) is rw.TrajectoryObserver:
        observer.reset(discard=True)
    else:
        observer.reset(write_cached_steps=False)


CALLS: dict[str, Callable[[Any], None]] = {
    "flush": lambda observer: observer.flush(),
    "write and reset": lambda observer: observer.reset(write_cached_steps=True),
    "drop and reset": drop_and_reset,
    "close": lambda observer: observer.close(),
    "open": lambda observer: observer.open(),
}


def step(number: int, *, first: bool = False, last: bool = False, boundary: bool = False) -> Any:
    """Make the step whose leaves all hold `number`, in so far as their dtypes can."""
    kind, following = StepType.FIRST if first else StepType.MID, StepType.LAST if last else StepType.MID
    if boundary:
        kind, following = StepType.LAST, StepType.FIRST
    return Trajectory(
        step_type=np.asarray(kind, np.int32),
        observation={
            "number": np.int64(number),
            "joints": {"velocity": np.arange(3, dtype=np.float32) + number, "angle": np.float64(number) / 3},
            "camera": np.full((2, 3, 1), number % 251, np.uint8),
            "touch": np.array([number % 2 == 0, True]),
        },
        action=(np.int32(-number), np.float16(number % 16)),
        policy_info={"log_prob": np.float32(-number), "logits": np.arange(2, dtype=np.float64) - number},
        next_step_type=np.asarray(following, np.int32),
        reward=np.float32(0 if boundary else number),
        discount=np.float32(BOUNDARY_DISCOUNT if boundary or not last else 0),
    )


class Steps:
    """A source of steps that are numbered from 1, through all episodes."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def episode(self, n: int) -> list[Any]:
        """Make a whole episode of `n` steps, the boundary step included."""
        return [step(next(self._numbers), first=t == 0, last=t == n - 2, boundary=t == n - 1) for t in range(n)]

    def beginning(self, k: int) -> list[Any]:
        """Make the first `k` steps of an episode that goes on."""
        return [step(next(self._numbers), first=t == 0) for t in range(k)]


def play(observer: Any, script: Iterable[Any]) -> None:
    """Give `observer` each step of the script and make each call, then flush."""
    for move in itertools.chain(script, ["flush"]):
        CALLS[move](observer) if isinstance(move, str) else observer(move)


@dataclass(frozen=True)
class Item:
    """What dm-reverb's client says of an item.

    Attributes:
        window: The `Trajectory`, its leaves of shape [L, ...].
        label: The numbers of its steps; `B` stands behind that of a boundary step, `P` for a padding step.
    """

    priority: float
    columns: list[Any]
    window: Any
    label: str

    def facts(self) -> list[Any]:
        """Return all that must be equal: priority, and dtype, shape and bytes of each leaf."""
        return [
            self.priority,
            *(
                (column.dtype.str, column.shape, column.tolist() if column.dtype == object else column.tobytes())
                for column in self.columns
            ),
        ]


def read(client: Any, table: str) -> list[Any]:
    """Read all items of a queue with a `reverb.Client`, which empties it."""
    num_items = client.server_info(timeout=60)[table].current_size
    return list(client.sample(table, num_items, emit_timesteps=False)) if num_items else []


def take(client: Any, table: str) -> list[Item]:
    """Read all items of a queue of steps of `Steps`."""
    items = []
    for sample in read(client, table):
        window = tree.unflatten_as(step(0), sample.data)
        items.append(Item(sample.info.priority, sample.data, window, label(window)))
    return items


def label(window: Any) -> str:
    """Say which steps a window holds, for people to compare."""
    names = []
    for number, kind, discount in zip(window.observation["number"], window.step_type, window.discount, strict=True):
        if kind != StepType.LAST:
            names.append(str(number))
        else:
            names.append(f"{number}B" if discount == BOUNDARY_DISCOUNT else "P")
    return " ".join(names)


def labels(items: list[Item]) -> list[str]:
    """Return the labels of items."""
    return [item.label for item in items]


def assert_same(ours: list[Item], theirs: list[Item]) -> None:
    """Fail unless both lists hold the same items in the same order; say which steps they are."""
    assert labels(ours) == labels(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.facts() == other.facts(), f"item {mine.label}"


def play_both(peer: Any, name: str, script: Any, *arguments: Any, **options: Any) -> list[str]:
    """Give the script to an observer of each side; compare their items leaf by leaf; return the items' labels.

    The script may be a function of the module that makes the observer. `options` are for ours alone.
    """
    for module, table in SIDES:
        made = getattr(module, name)(peer, table, *arguments, **(options if module is ours else {}))
        with closing(made) as observer:
            play(observer, script(module) if callable(script) else script)
    tables = peer.server_info(timeout=60)
    assert tables["ours"].num_episodes == tables["theirs"].num_episodes
    items = take(peer, "theirs")
    assert_same(take(peer, "ours"), items)
    return labels(items)
