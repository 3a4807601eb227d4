"""A wait counts from the last progress, and has an end all the same."""

from __future__ import annotations

import pytest

from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight
from reverb_writer.transport.server_probe import ConfirmationWait


@pytest.mark.parametrize(("extends", "is_over"), [(True, False), (False, True)])
def test_confirmation_begins_the_time_of_a_wait_that_extends_on_progress_anew(extends: bool, is_over: bool) -> None:
    with Channel("localhost:1") as channel:
        flight = InFlight()
        wait = ConfirmationWait(channel, flight, 1000.0, extend=extends)
        wait.began_at -= 2000
        wait._since -= 2000
        flight.acknowledged = 1
        assert (wait.left_s() == 0) is is_over


@pytest.mark.parametrize(("began_s_ago", "is_over"), [(9_000, False), (10_001, True)])
def test_wait_that_extends_on_progress_ends_after_ten_times_its_time(began_s_ago: int, is_over: bool) -> None:
    with Channel("localhost:1") as channel:
        flight = InFlight()
        wait = ConfirmationWait(channel, flight, 1000.0, extend=True)
        wait.began_at -= began_s_ago
        flight.acknowledged = 1
        assert (wait.left_s() == 0) is is_over
        assert wait.spent_s == pytest.approx(began_s_ago, abs=500)
