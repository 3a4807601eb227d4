"""TF-Agents' faults are not ours; `test_compatibility_page.py` has those of its episode observer."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import pytest
from tf_agents.replay_buffers import reverb_utils as theirs

from reverb_writer import tf_agents as ours

from .trajectories import OBSERVERS, SIDES, Steps, assert_same, labels, play, play_both, take

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

SMALL = range(1, 5)
WINDOWED = OBSERVERS[:2]
NOT_ENOUGH = (
    "write_cached_steps is True, but not enough steps remain in the cache to write an item with sequence_length={}"
)


def windows(k: int, length: int, stride: int) -> list[str]:
    """Label the regular windows of `k` steps numbered from 1."""
    return [" ".join(map(str, range(end - length + 1, end + 1))) for end in range(length, k + 1, stride)]


# a and b: reset(write_cached_steps=True) without padding


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("flush", [[], ["flush"]], ids=["at once", "after a flush"])
@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_a_b_a_last_window_is_written_once_on_and_off_the_stride(
    peer: Any, length: int, stride: int, flush: list[str], name: str
) -> None:
    for k in range(length, length + 3 * stride + 1):
        is_aligned, expected = (k - length) % stride == 0, windows(k, length, stride)
        steps = Steps()
        start, episode = steps.beginning(k), steps.episode(length)
        with closing(getattr(theirs, name)(peer, "theirs", length, stride)) as observer:
            play(observer, [*start, *flush] if is_aligned else start)
            refused = pytest.raises(ValueError, match=NOT_ENOUGH.format(length))
            with nullcontext() if is_aligned else refused:
                observer.reset(write_cached_steps=True)
                observer.flush()
        with closing(getattr(ours, name)(peer, "ours", length, stride)) as observer:
            play(observer, [*start, *flush, "write and reset", *episode])
        # Theirs writes the last window twice, or refuses it.
        assert labels(take(peer, "theirs")) == [*expected, *expected[-1:] * is_aligned]
        last = [] if is_aligned else [" ".join(map(str, range(k - length + 1, k + 1)))]
        following = " ".join(map(str, range(k + 1, k + length + 1))) + "B"
        assert labels(take(peer, "ours")) == [*expected, *last, following]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("length", range(2, 6))
def test_b_too_few_steps_are_refused_and_the_episode_goes_on(peer: Any, length: int, name: str) -> None:
    for k in range(1, length):
        steps = Steps()
        start, rest = steps.beginning(k), steps.episode(length + 1)
        for module, table in SIDES:
            with closing(getattr(module, name)(peer, table, length)) as observer:
                play(observer, start)  # which flushes
                with pytest.raises(
                    ValueError, match=NOT_ENOUGH.format(length) + ", consider enabling pad_end_of_episodes"
                ):
                    observer.reset(write_cached_steps=True)
                play(observer, rest)
        assert_same(take(peer, "ours"), take(peer, "theirs"))


@pytest.mark.parametrize("name", WINDOWED)
def test_b_with_nothing_cached_nothing_is_written_or_refused(peer: Any, name: str) -> None:
    script = ["write and reset", "write and reset", *Steps().beginning(3), "drop and reset", "write and reset"]
    assert play_both(peer, name, script, 3) == ["1 2 3"]


# c: what padding loses


@pytest.mark.parametrize("stride", SMALL)
@pytest.mark.parametrize("length", SMALL)
def test_c_what_padding_drops_is_counted(peer: Any, length: int, stride: int) -> None:
    for n in range(1, length + 2 * stride + 1):
        script, dropped = Steps().episode(n), dict[str, int]()
        for module, table in SIDES:
            with closing(
                module.ReverbAddTrajectoryObserver(peer, table, length, stride, pad_end_of_episodes=True)
            ) as observer:
                play(observer, script)
                dropped = {} if module is theirs else observer.stats().dropped_steps
        items = take(peer, "theirs")
        assert_same(take(peer, "ours"), items)
        covered = {number for item in items for number in item.window.observation["number"].tolist()} - {0}
        assert sum(dropped.values()) == n - len(covered), dropped
