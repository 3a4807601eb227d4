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
from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw

MODES = {"ZERO_PAD": "cover", "TRUNCATE": "truncate", "WRITE": "align_end"}


def row(observation: float, action: int, reward: float, discount: float, *, start: bool) -> dict[str, Any]:
    return {
        "observation": np.float32(observation),
        "action": np.int32(action),
        "reward": np.float32(reward),
        "discount": np.float32(discount),
        "start_of_episode": np.bool_(start),
    }


def episode(num_transitions: int, *, first: int = 1) -> list[dict[str, Any]]:
    """Make the rows of an episode whose observations count up from `first`; the last transition is terminal."""
    last = num_transitions - 1
    rows = [row(first + t, 1, 1, 0 if t == last else 1, start=t == 0) for t in range(num_transitions)]
    return [*rows, row(first + num_transitions, 0, 0, 0, start=False)]


def write(observer: Any, episodes: Sequence[Sequence[Any]]) -> None:
    with closing(observer):
        for rows in episodes:
            for t, step in enumerate(rows):
                observer(step, end_of_episode=t == len(rows) - 1)


def take(peer: Any, table: str = "ours") -> list[dict[str, Any]]:
    """Read all items of a queue, as nests of arrays [L, ...]."""
    num_items = peer.server_info(timeout=60)[table].current_size
    samples = peer.sample(table, num_items, emit_timesteps=False) if num_items else ()
    return [tree.unflatten_as(row(0, 0, 0, 0, start=False), sample.data) for sample in samples]


def spelled(items: list[dict[str, Any]]) -> str:
    """Spell items as the tables do: the step's number, `F` for a final row, `P` for padding."""

    def letter(observation: float, action: int) -> str:
        return "P" if not observation else str(int(observation) - 1) if action else "F"

    return " ".join("".join(map(letter, item["observation"], item["action"])) for item in items)


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


@pytest.mark.parametrize(("num_transitions", "length", "period", "zero_pad", "truncate", "write_last", "_"), CASES)
def test_an_episode_is_cut_as_acme_cuts_it(
    peer: Any, num_transitions: int, length: int, period: int, zero_pad: str, truncate: str, write_last: str, _: str
) -> None:
    for mode, expected in (("ZERO_PAD", zero_pad), ("TRUNCATE", truncate), ("WRITE", write_last)):
        observer = rw.TrajectoryObserver(peer, "ours", length, period, end_of_episode=MODES[mode])
        write(observer, [episode(num_transitions)])
        assert spelled(take(peer)) == expected, mode


@pytest.mark.parametrize(("num_transitions", "length", "period", "expected"), [(*case[:3], case[-1]) for case in CASES])
def test_an_episode_that_continues_is_cut_as_acme_cuts_it(
    peer: Any, num_transitions: int, length: int, period: int, expected: str
) -> None:
    write(rw.SequenceObserver(peer, "ours", length, period), [episode(num_transitions)])
    assert spelled(take(peer)) == expected


def test_three_episodes_continue_into_each_other(peer: Any) -> None:
    write(rw.SequenceObserver(peer, "ours", 3, 2), [episode(6), episode(6), episode(6)])
    assert spelled(take(peer)) == "012 234 45F F01 123 345 5F0 012 234 45F"


# Acme's test cases, value by value


LONGER = [
    row(1, 0, 2, 1, start=True),
    row(2, 0, 3, 1, start=False),
    row(3, 0, 5, 1, start=False),
    row(4, 0, 7, 0, start=False),
    row(5, 0, 0, 0, start=False),
]
SHORTER = [row(1, 0, 2, 1, start=True), row(2, 0, 3, 0, start=False), row(3, 0, 0, 0, start=False)]
ZEROS = row(0, 0, 0, 0, start=False)


@pytest.mark.parametrize(
    ("mode", "length", "period", "rows", "expected"),
    [
        ("ZERO_PAD", 3, 2, LONGER, [LONGER[:3], LONGER[2:]]),
        ("TRUNCATE", 3, 2, LONGER, [LONGER[:3], LONGER[2:]]),
        ("ZERO_PAD", 4, 1, SHORTER, [[*SHORTER, ZEROS]]),
        ("TRUNCATE", 4, 1, SHORTER, [SHORTER]),
        ("WRITE", 4, 1, SHORTER, []),
    ],
)
def test_items_hold_acmes_values(
    peer: Any, mode: str, length: int, period: int, rows: list[Any], expected: list[list[Any]]
) -> None:
    write(rw.TrajectoryObserver(peer, "ours", length, period, end_of_episode=MODES[mode]), [rows])
    items = take(peer)
    assert len(items) == len(expected)
    for item, steps in zip(items, expected, strict=True):
        for name, column in item.items():
            np.testing.assert_array_equal(column, np.stack([step[name] for step in steps]), strict=True)
