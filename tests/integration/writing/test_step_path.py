"""A step that does not fill its chunk costs few calls, whatever it is made of."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from reading import Place

import reverb_writer as rw

_MAX_CALLS = 6


def python_calls(call: Any) -> list[str]:
    """Return the names of the Python functions that a call runs in this thread, itself included."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]  # without the lambda


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("end_of_episode", [None, False])
def test_step_that_fills_no_chunk_takes_at_most_six_calls(
    place: Place, mask: bool, end_of_episode: bool | None
) -> None:
    step = {"is_last": np.bool_(False), "obs": {"a": np.zeros(4), "b": np.int64(1)}}
    allowed = _MAX_CALLS + 2 * mask  # the mask is added to the leaves
    with rw.TrajectoryObserver(place.client, "a", 20, mask=mask, chunk_length=20, max_delay_s=1000) as observer:
        observer(step, end_of_episode=end_of_episode)
        every = [python_calls(lambda: observer(step, end_of_episode=end_of_episode)) for _ in range(10)]
        quiet = [calls for calls in every if not any(name.endswith("_wake") for name in calls)]
        assert quiet  # on a busy machine some steps come so late that they wake the sender
        assert all(len(calls) <= allowed for calls in quiet), quiet


def test_calls_of_a_vector_step_do_not_grow_with_the_environments(place: Place) -> None:
    counts = []
    for num_envs in (2, 50):
        step = {"obs": np.zeros((num_envs, 4)), "reward": np.zeros(num_envs)}
        go_on = np.zeros(num_envs, bool)
        with rw.TrajectoryObserver(
            place.client, "a", 20, num_envs=num_envs, chunk_length=20, max_delay_s=1000
        ) as observer:
            observer(step, end_of_episode=go_on)
            counts.append(len(python_calls(lambda step=step, go_on=go_on: observer(step, end_of_episode=go_on))))
    assert counts[0] == counts[1]
