"""Acme's sequences by our names: cases worked by hand, written by our observers, read by dm-reverb's client.

Acme's row holds an observation, the action taken on it and what came of it; an episode of T transitions has N = T + 1
rows, the last one with the last observation and zeros. Ours is given those rows as a dict and told which is the last.
So Acme's modes are

    ZERO_PAD  end_of_episode="cover"         WRITE     end_of_episode="align_end"
    TRUNCATE  end_of_episode="truncate"      CONTINUE  SequenceObserver

Rows are labelled 0 to T-1, and `F` for the final one; `P` is padding.

Source: Acme `SequenceAdder` in `adders/reverb/sequence.py` and its `test_cases.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw

from .trajectories import read

MODES: dict[str, Any] = {
    "ZERO_PAD": partial(rw.TrajectoryObserver, end_of_episode="cover"),
    "TRUNCATE": partial(rw.TrajectoryObserver, end_of_episode="truncate"),
    "WRITE": partial(rw.TrajectoryObserver, end_of_episode="align_end"),
    "CONTINUE": rw.SequenceObserver,
}


def row(observation: float, action: int, reward: float, discount: float, *, start: bool) -> dict[str, Any]:
    return {
        "observation": np.float32(observation),
        "action": np.int32(action),
        "reward": np.float32(reward),
        "discount": np.float32(discount),
        "start_of_episode": np.bool_(start),
    }


PADDING = row(0, 0, 0, 0, start=False)


def episode(num_transitions: int, *, first: int = 1) -> list[dict[str, Any]]:
    """Make the rows of an episode whose observations count up from `first`; the last transition is terminal."""
    last = num_transitions - 1
    rows = [row(first + t, 1, 2 * t + 3, 0 if t == last else 1, start=t == 0) for t in range(num_transitions)]
    return [*rows, row(first + num_transitions, 0, 0, 0, start=False)]


def write(observer: Any, episodes: Sequence[Sequence[Any]]) -> None:
    with closing(observer):
        for rows in episodes:
            for t, step in enumerate(rows):
                observer(step, end_of_episode=t == len(rows) - 1)


def take(peer: Any, *episodes: Sequence[dict[str, Any]]) -> str:
    """Read all items of a queue, compare them value by value with the rows that they hold, and spell them."""
    rows = {float(step["observation"]): step for steps in episodes for step in steps}
    windows = []
    for sample in read(peer, "ours"):
        item = tree.unflatten_as(PADDING, sample.data)
        steps = [rows.get(float(observation), PADDING) for observation in item["observation"]]
        for name, column in item.items():
            np.testing.assert_array_equal(column, np.stack([step[name] for step in steps]), strict=True)
        windows.append("".join(map(letter, steps)))
    return " ".join(windows)


def letter(step: dict[str, Any]) -> str:
    """Spell a row as the tables do: the step's number in its episode, `F` for a final row, `P` for padding."""
    return "P" if step is PADDING else str(int(step["observation"] - 1) % 10) if step["action"] else "F"


# T, L, p, then the windows of ZERO_PAD, TRUNCATE, WRITE and of CONTINUE.
CASES = [
    (4, 3, 2, "012 23F", "012 23F", "012 23F", "012 23F"),
    (7, 3, 3, "012 345 6FP", "012 345 6F", "012 345 56F", "012 345"),
    (5, 4, 4, "0123 4FPP", "0123 4F", "0123 234F", "0123"),
    (2, 4, 1, "01FP", "01F", "", ""),
    (4, 3, 1, "012 123 23F", "012 123 23F", "012 123 23F", "012 123 23F"),
    (4, 2, 2, "01 23 FP", "01 23 F", "01 23 3F", "01 23"),
    (1, 3, 3, "0FP", "0F", "", ""),
    (6, 3, 2, "012 234 45F", "012 234 45F", "012 234 45F", "012 234 45F"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("number", range(len(MODES)), ids=MODES)
def test_an_episode_is_cut_as_acme_cuts_it(peer: Any, case: Any, number: int) -> None:
    num_transitions, length, period, *expected = case
    rows = episode(num_transitions)
    write([*MODES.values()][number](peer, "ours", length, period), [rows])
    assert take(peer, rows) == expected[number]


def test_three_episodes_continue_into_each_other(peer: Any) -> None:
    episodes = [episode(6, first=first) for first in (1, 11, 21)]
    write(rw.SequenceObserver(peer, "ours", 3, 2), episodes)
    assert take(peer, *episodes) == "012 234 45F F01 123 345 5F0 012 234 45F"
