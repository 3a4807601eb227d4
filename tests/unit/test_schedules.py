"""Numbers that change while a learner trains."""

from __future__ import annotations

from typing import Any

import pytest

import reverb_writer as rw


@pytest.mark.parametrize(("step", "expected"), [(0, 1.0), (25, 0.75), (100, 0.0), (101, 0.0), (-5, 1.0), (12.5, 0.875)])
def test_number_moves_in_even_parts_and_stays_at_its_end(step: Any, expected: float) -> None:
    assert rw.LinearSchedule(1.0, 0.0, 100)(step) == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [(float("nan"), 1.0, 10), (0.0, "1", 10), (0.0, 1.0, 0), (0.0, 1.0, 2.5)])
def test_schedule_that_cannot_be_is_refused(wrong: Any) -> None:
    with pytest.raises(rw.SpecError, match=r"`(start|end|num_steps)` must be"):
        rw.LinearSchedule(*wrong)
