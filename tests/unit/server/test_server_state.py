"""The state of the service, what systemd hears of it, and when memory counts as high. No server takes part."""

from __future__ import annotations

import itertools
import time

import pytest
from reverb_writer_server.checkpoints.folder import Kept
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.observability.systemd import _lines
from reverb_writer_server.service import is_high
from reverb_writer_server.turn import Turn

MORE_TIME = "EXTEND_TIMEOUT_USEC=30000000"


@pytest.mark.parametrize(
    ("phase", "is_alive", "expected"),
    [
        ("starting", True, ["STATUS=starting", "WATCHDOG=1", MORE_TIME]),
        ("serving", True, ["STATUS=serving", "WATCHDOG=1", "READY=1"]),
        ("draining", True, ["STATUS=draining", "WATCHDOG=1", "STOPPING=1", MORE_TIME]),
        ("serving", False, ["STATUS=the service's loop has not run for 31 s", "READY=1"]),
        ("draining", False, ["STATUS=the service's loop has not run for 31 s", "STOPPING=1"]),
    ],
)
def test_systemd_hears_the_phase_and_gives_more_time_only_to_a_service_that_lives(
    phase: str, is_alive: bool, expected: list[str]
) -> None:
    state = ServiceState()
    state.phase = phase
    state._loop_ran_at -= 0 if is_alive else 31
    assert list(_lines(state)) == expected


def test_work_hangs_after_ten_times_the_silence_that_is_allowed_and_never_without_a_limit() -> None:
    state = ServiceState()
    state._work_ran_at -= 50
    for max_silence_s, hangs in ((0.0, False), (4.0, True), (6.0, False)):
        state.max_silence_s = max_silence_s
        assert state.work_hangs() is hangs


def test_age_of_a_checkpoint_is_not_negative_when_the_clock_was_set_back() -> None:
    state = ServiceState()
    assert state.snapshot()["checkpoints"]["age_s"] is None
    for written_s_ago, least in ((100.0, 100.0), (-100.0, 0.0)):
        state.kept = Kept(1, "newest", 5, time.time() - written_s_ago)
        assert least <= state.snapshot()["checkpoints"]["age_s"] < least + 100


def test_turn_of_a_server_that_claims_nothing_is_never_over() -> None:
    turn = Turn(ServerConfig(), None, ServiceState())
    assert (turn.is_claimed, turn.is_over, turn.must_end_at_once(None)) == (False, False, False)


@pytest.mark.parametrize(
    ("now_bytes", "crosses"),
    [
        ([90, 100, 101, 102], [False, False, True, False]),
        ([101, 86, 101], [True, False, False]),  # it swings about the limit: once
        ([101, 85, 101, 85, 86], [True, False, True, False, False]),
        ([101, 0, 300], [True, False, True]),
    ],
)
def test_limit_is_crossed_again_when_memory_has_fallen_to_85_percent_of_it(
    now_bytes: list[int], crosses: list[bool]
) -> None:
    states = [False]
    for now in now_bytes:
        states.append(is_high(now, 100, was_high=states[-1]))
    assert [now and not before for before, now in itertools.pairwise(states)] == crosses
