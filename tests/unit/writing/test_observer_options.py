"""What an observer refuses or says when it is made, the numbers of its steps, and its end."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import numpy as np
import pytest
from reading import fifo

import reverb_writer as rw


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_length": 0}, "`chunk_length` must be >= 1, got 0"),
        ({"chunk_length": 16384}, "`chunk_length` must be <= 16383, got 16384"),
        ({"chunk_length": 2.5}, "`chunk_length` must be an integer"),
        ({"max_delay_s": 0}, "`max_delay_s` must be > 0 seconds, got 0"),
        ({"timeout_s": -1}, "`timeout_s` must be > 0 seconds, got -1"),
        ({"timeout_s": math.nan}, "`timeout_s` must be > 0 seconds, got nan"),
        ({"max_in_flight_items": 0}, "`max_in_flight_items` must be >= 1, got 0"),
        ({"max_in_flight_bytes": 0}, "`max_in_flight_bytes` must be >= 1, got 0"),
        ({"on_block": "panic"}, "`on_block` must be 'wait', 'raise' or 'drop_oldest', got 'panic'"),
        ({"max_item_bytes": 0}, "`max_item_bytes` must be >= 1, got 0"),
        ({"end_of_episode": "finish"}, "`end_of_episode` must be one of"),
        ({"patience_s": 0}, "`patience_s` must be > 0 seconds, got 0"),
        ({"actor_id": ""}, "`actor_id` must be a string that is not empty, or None, got ''"),
        ({"connect_timeout_s": "soon"}, "`connect_timeout_s` must be > 0 seconds"),
        ({"until": False}, "`until` must be a function without arguments, got False. Put `lambda:`"),
        *(({"num_envs": number}, "`num_envs` must be") for number in (0, -1, 2.0, True)),
        *(({"priority": one}, "must be a finite number >= 0") for one in (math.nan, math.inf, -0.1, "1", None)),
        ({"table": []}, "`table` must be a name or several different ones, got none"),
        ({"table": ["a", "a"]}, "`table` must be a name or several different ones"),
        ({"max_sequence_length": 0}, "`max_sequence_length` must be >= 1, got 0"),
        ({"max_sequence_length": 2.0}, "`max_sequence_length` must be an integer"),
        ({"max_sequence_length": 2, "priority": -1.0}, "`priority` must be a finite number >= 0"),
    ],
)
def test_options_that_cannot_work_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    of_episodes = "max_sequence_length" in options
    kind: Any = rw.EpisodeObserver if of_episodes else functools.partial(rw.TrajectoryObserver, sequence_length=2)
    with rw.LocalServer([fifo("a")]) as server, pytest.raises(rw.errors.SpecError, match=message):
        kind(server, **{"table": "a", **options})


def test_observer_that_waits_for_its_server_says_so_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("reverb_writer.client.server_set.LOG_EVERY_S", 0.05)
    begin = time.monotonic()
    missing = r"no Reverb server at localhost:1 within 1\.5 s.*refused"
    with pytest.raises(rw.errors.ServerUnavailableError, match=missing):
        rw.TrajectoryObserver("localhost:1", "a", 1, timeout_s=1.5)
    assert time.monotonic() - begin < 20
    told = [record.getMessage() for record in caplog.records]
    assert len(told) >= 2
    assert all("an observer waits for the server at localhost:1 (" in each for each in told)
    caplog.clear()
    with pytest.raises(rw.errors.ServerUnavailableError):
        rw.Variables("localhost:1", "weights", timeout_s=0.5)
    assert "table `weights`: waiting for the server at localhost:1 (" in caplog.text


def test_steps_are_numbered_from_the_first_also_in_an_observer_that_is_opened_again() -> None:
    with rw.LocalServer([fifo("a")]) as server, rw.EpisodeObserver(server, "a", 3) as observer:
        for first in (0, 5):
            assert observer.num_steps == first
            observer({"n": np.int64(0)}, end_of_episode=True)
            with pytest.raises(rw.errors.StructureError, match=f"^step {first + 1}, leaf `n`"):
                observer({"n": 0.5})
            with pytest.raises(rw.errors.SpecError, match="longer than max_sequence_length=3"):
                observer.extend({"n": np.arange(7)})  # the fourth step of the episode is the last that is taken
            observer.close()
            assert observer.num_steps == first + 5
            observer.open()


def test_observer_that_is_closed_has_nothing_to_do_at_the_end_of_the_program() -> None:
    with rw.LocalServer([fifo("a")]) as server:
        observer = rw.TrajectoryObserver(server, "a", 1)
        observer({"n": np.int64(0)})
        sender, ended = observer._sender, list[bool]()
        observer.close()
        assert sender is not None
        assert sender.end_soon(lambda: ended.append(True)) is None
    assert ended == [True]
