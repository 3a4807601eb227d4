"""`EpisodeBatch` beside real vector environments; tests/unit/environments has what it gets in each autoreset mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.environments import record
from reverb_writer.episodes import Episode, EpisodeBatch
from reverb_writer.errors import SpecError
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL

pytest.importorskip("gymnasium", minversion="1.1")
import gymnasium
from worlds import counting  # only where gymnasium is

vector = gymnasium.vector


def run(envs: Any, num_calls: int, extras: Any = None) -> list[Episode]:
    """Drive a vector environment that resets itself, with actions 1, 2, ..."""
    batch = EpisodeBatch(envs.num_envs)
    recorded = record(envs, batch, extras=extras)
    finished: list[Episode] = []
    recorded.reset(seed=0)
    for call in range(1, num_calls + 1):
        recorded.step(np.full(batch.num_envs, call))
        num_steps = batch.num_steps
        finished += batch.take_finished()
        assert batch.num_steps == num_steps
    recorded.close()
    return finished


def test_episodes_hold_what_each_environment_did() -> None:
    lengths, ends = (3, 5), ("terminated", "truncated")
    envs = [counting([(length, end)], 1000 * length) for length, end in zip(lengths, ends, strict=True)]
    finished = run(vector.SyncVectorEnv(envs, autoreset_mode=vector.AutoresetMode.SAME_STEP), 13)
    for length, end in zip(lengths, ends, strict=True):
        own = [episode for episode in finished if len(episode) == length]
        assert len(own) == 13 // length
        for number, episode in enumerate(own):
            first = 1000 * length + 100 * number
            assert episode.get_observations()[:, 1].tolist() == [*range(first, first + length + 1)]
            assert episode.get_actions().tolist() == [number * length + n for n in range(1, length + 1)]
            assert episode.get_rewards().tolist() == [*range(1, length + 1)]
            assert (episode.is_terminated, episode.is_truncated) == (end == "terminated", end == "truncated")
    assert len(finished) == sum(13 // length for length in lengths)
    assert len({episode.id_ for episode in finished}) == len(finished)


def test_texts_keep_their_last_zero_characters() -> None:
    batch = EpisodeBatch(1)
    for text, kind in (("a\0", FIRST | ACTION), ("b", LAST | TERMINAL)):
        row = {"observation": np.array([text], object), "action": np.zeros(1), "reward": np.zeros(1)}
        batch.write_row(row, np.array([kind], np.uint8))
    (episode,) = batch.take_finished()
    assert [str(observation) for observation in episode.get_observations()] == ["a\0", "b"]
    assert episode.is_terminated


def test_lists_are_nests_and_extras_may_be_any_nest() -> None:
    batch = EpisodeBatch(1)
    for number, kind in enumerate((FIRST | ACTION, ACTION, LAST)):
        leaf = np.array([number])
        row = {"observation": [leaf, leaf + 10], "action": [leaf + 20, leaf + 30, leaf + 40], "reward": leaf}
        batch.write_row({**row, "extras": [leaf, (leaf + 50,)]}, np.array([kind], np.uint8))
    (episode,) = batch.take_finished()
    assert episode.get_observations(1) == [1, 11]
    assert episode.get_actions(1) == [21, 31, 41]
    assert episode.get_extra_model_outputs("extras", 1) == [1, (51,)]
    assert (len(episode), episode.is_truncated) == (2, True)


def test_extras_are_model_outputs_of_their_environments() -> None:
    envs = vector.SyncVectorEnv([counting([(2, "terminated")])] * 2)
    first, second = run(envs, 3, lambda: {"logp": np.array([0.5, 0.25]), "state": {"h": np.eye(2)}})
    assert first.get_extra_model_outputs("logp").tolist() == [0.5, 0.5]
    assert second.get_extra_model_outputs("state", 0)["h"].tolist() == [0, 1]


def test_number_of_environments_must_be_a_number() -> None:
    with pytest.raises(SpecError, match="`num_envs` must be >= 1, got 0"):
        EpisodeBatch(0)
