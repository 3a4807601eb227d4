"""TF-Agents' names: its two booleans, and the signature of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import SpecError
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tf_agents import ReverbAddTrajectoryObserver, _end_of_episode_mode
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


@pytest.mark.parametrize(
    "kind",
    [str, lambda address: [address], lambda address: rw.shards.Target.of([address]), rw.Client],
    ids=["address", "list", "target", "client"],
)
def test_signature_is_read_for_every_kind_of_client(kind: Callable[[str], Any]) -> None:
    signature = {"x": ArraySpec((None, 2), np.dtype(np.float32))}
    with rw.LocalServer([rw.TableConfig("replay", signature=signature)]) as server:
        observer = ReverbAddTrajectoryObserver(kind(server.address), "replay", 2)
        assert observer.get_table_signature() == signature
        observer.close()
