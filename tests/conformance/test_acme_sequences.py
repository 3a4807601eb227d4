"""Acme's sequences by our names: cases worked by hand, written by our observers, read by dm-reverb's client.

Acme's row holds an observation, the action taken on it and what came of it; an episode of T transitions has N = T + 1
rows, the last one with the last observation and zeros. Ours is given N numbered rows and told which is the last. So
Acme's modes are

    ZERO_PAD  end_of_episode="cover"         WRITE     end_of_episode="align_end"
    TRUNCATE  end_of_episode="truncate"      CONTINUE  SequenceObserver

Rows are labelled 0 to T-1, and `F` for the final one; `P` is padding.

Source: Acme `SequenceAdder` in `adders/reverb/sequence.py` and its `test_cases.py`.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import pytest
from episodes import feed

import reverb_writer as rw

from .trajectories import read

MODES: dict[str, Any] = {
    "ZERO_PAD": partial(rw.TrajectoryObserver, end_of_episode="cover"),
    "TRUNCATE": partial(rw.TrajectoryObserver, end_of_episode="truncate"),
    "WRITE": partial(rw.TrajectoryObserver, end_of_episode="align_end"),
    "CONTINUE": rw.SequenceObserver,
}


def take(peer: Any, *num_transitions: int) -> str:
    """Read all items of a queue, and spell the rows of these episodes as the cases do."""
    letters = ["P"]
    for count in num_transitions:
        letters += [*map(str, range(count)), "F"]
    items = (sample.data[0].tolist() for sample in read(peer, "ours"))
    return " ".join("".join(letters[number] for number in item) for item in items)


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
    with closing([*MODES.values()][number](peer, "ours", length, period)) as observer:
        feed(observer, [num_transitions + 1])
    assert take(peer, num_transitions) == expected[number]


def test_three_episodes_continue_into_each_other(peer: Any) -> None:
    with closing(rw.SequenceObserver(peer, "ours", 3, 2)) as observer:
        feed(observer, [7, 7, 7])
    assert take(peer, 6, 6, 6) == "012 234 45F F01 123 345 5F0 012 234 45F"
