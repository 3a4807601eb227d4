"""What TF-Agents' two booleans mean."""

from __future__ import annotations

from typing import Any

import pytest

from reverb_writer.errors import SpecError
from reverb_writer.tf_agents import _end_of_episode_mode
from reverb_writer.windows import EndOfEpisode


@pytest.mark.parametrize(
    ("mode", "pad", "tile", "expected"),
    [
        (None, False, False, "drop"),
        (None, True, False, "pad"),
        (None, True, True, "tile"),
        ("cover", False, False, "cover"),
        (EndOfEpisode.TRUNCATE, False, False, "truncate"),
    ],
)
def test_mode_or_booleans_give_the_mode(mode: Any, pad: bool, tile: bool, expected: str) -> None:
    assert _end_of_episode_mode(mode, pad=pad, tile=tile) is EndOfEpisode(expected)


@pytest.mark.parametrize(
    ("mode", "pad", "tile", "message"),
    [
        (None, False, True, "Must set `pad_end_of_episodes=True` when using `tile_end_of_episodes`"),
        ("pad", True, False, "say the same thing twice"),
        ("cover", True, True, "say the same thing twice"),
        ("finish", False, False, "`end_of_episode` must be one of 'drop', "),
    ],
)
def test_booleans_that_contradict_are_refused(mode: Any, pad: bool, tile: bool, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _end_of_episode_mode(mode, pad=pad, tile=tile)
