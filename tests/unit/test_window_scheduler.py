"""Which windows are complete and not yet written, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from reverb_writer.errors import SpecError
from reverb_writer.windows import WindowSpec
from reverb_writer.writing.priorities import EpisodeEnd
from reverb_writer.writing.window_items import Windows
from reverb_writer.writing.window_scheduler import WindowScheduler
from reverb_writer.writing.window_targets import NEVER, WindowTarget


def scheduler(*targets: WindowTarget) -> WindowScheduler:
    return WindowScheduler(targets, [0], list, lambda _: 1.0)


def pairs(windows: Windows) -> list[tuple[int, int]]:
    return list(zip(windows.starts.tolist(), windows.ends.tolist(), strict=True))


SHORT = WindowTarget(WindowSpec(2, 1), ("a", "b"))
LONG = WindowTarget(WindowSpec(4, 2), ("c",), 0.5)
WHOLE = WindowTarget(WindowSpec.whole_episode(), ("d",))


def test_windows_of_all_kinds_are_complete_at_their_last_step() -> None:
    schedule = scheduler(SHORT, LONG)
    short, long = schedule.windows(6, None)
    assert pairs(short) == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 6)]
    assert pairs(long) == [(0, 4), (2, 6)]
    assert (short.tables, short.priorities.tolist()) == (("a", "b"), [1.0] * 5)
    assert (long.tables, long.priorities.tolist()) == (("c",), [0.5, 0.5])
    assert schedule.num_items(6, None) == 5 * 2 + 2


def test_windows_that_are_written_are_not_complete_again() -> None:
    schedule = scheduler(SHORT, LONG)
    schedule.written = 4
    assert [pairs(windows) for windows in schedule.windows(6, None)] == [[(3, 5), (4, 6)], [(2, 6)]]
    assert schedule.last_window_end(6, None) == 6
    assert schedule.last_window_end(4, None) == 0


def test_last_window_may_end_before_the_last_step() -> None:
    assert scheduler(LONG).last_window_end(7, None) == 6


def test_tables_and_items_of_a_step_are_summed_over_the_kinds() -> None:
    schedule = scheduler(SHORT, LONG)
    assert schedule.tables == {"a", "b", "c"}
    assert schedule.items_per_step == 2 + 0.5
    assert schedule.longest == 4
    assert scheduler(SHORT, WHOLE).longest == NEVER


def test_whole_episode_is_one_window_at_its_end() -> None:
    schedule = scheduler(WHOLE)
    assert schedule.num_items(5, None) == 0
    end = schedule.episode_end(5)
    assert [pairs(windows) for windows in schedule.windows(5, end)] == [[(0, 5)]]


def test_padding_completes_windows_of_its_own_kind_only() -> None:
    tile = WindowTarget(WindowSpec(3, 1, "tile"), ("a",))
    schedule = scheduler(tile, WindowTarget(WindowSpec(2), ("b",)))
    end = schedule.episode_end(3)
    assert end == EpisodeEnd(3, [2, 0], [None, None], {})
    tiled, dropped = schedule.windows(5, end)
    assert pairs(tiled) == [(0, 3), (1, 4), (2, 5)]
    assert pairs(dropped) == [(0, 2), (1, 3)]


def test_end_that_is_aligned_adds_the_last_steps_and_counts_what_no_window_holds() -> None:
    schedule = scheduler(WindowTarget(WindowSpec(3, 3), ("a",)))
    assert schedule.episode_end(5).dropped == {"unaligned_tail": 2}
    end = schedule.episode_end(5, align=True)
    assert end == EpisodeEnd(5, [0], [(2, 5)], {})
    assert [pairs(windows) for windows in schedule.windows(5, end)] == [[(0, 3), (2, 5)]]


def test_end_that_discards_adds_nothing_and_counts_under_its_reason() -> None:
    schedule = scheduler(WindowTarget(WindowSpec(3, 3, "cover"), ("a",)), WHOLE)
    end = schedule.episode_end(5, discard="reset")
    assert end == EpisodeEnd(5, [0, 0], [None, None], {"reset": 2 + 5})


def test_new_priority_applies_to_its_kind_only() -> None:
    schedule = scheduler(SHORT, LONG)
    targets, priorities = schedule.with_priority(1, 7.0, 3)
    assert ([target.priority for target in targets], priorities) == ([1.0, 7.0], None)
    assert schedule.targets == (SHORT, LONG)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), "high"])
def test_priority_that_is_no_number_is_refused(priority: Any) -> None:
    with pytest.raises(SpecError, match="`priority` must be a finite number >= 0"):
        scheduler(SHORT).with_priority(0, priority, 0)


def test_function_cannot_become_the_priority_of_windows_whose_steps_were_not_kept() -> None:
    schedule = scheduler(LONG)
    with pytest.raises(SpecError, match="the last 3 steps of this one, and 0 were kept"):
        schedule.with_priority(0, len, 3)
    targets, priorities = schedule.with_priority(0, len, 0)
    assert targets[0].priority is len
    assert priorities is not None
