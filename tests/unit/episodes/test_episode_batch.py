"""`EpisodeBatch` beside real vector environments: no terminal observation is lost in any autoreset mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.environments import record
from reverb_writer.episodes import Episode, EpisodeBatch
from reverb_writer.errors import SpecError

pytest.importorskip("gymnasium", minversion="1.1")
import gymnasium
from worlds import Sampling, counting  # only where gymnasium is

vector = gymnasium.vector
MODES = list(vector.AutoresetMode)


def run(envs: Any, num_calls: int, extras: Any = None) -> list[Episode]:
    """Drive a vector environment as its mode asks for, with actions 1, 2, ..."""
    batch = EpisodeBatch(envs.num_envs)
    recorded = record(envs, batch, extras=extras)
    finished: list[Episode] = []
    recorded.reset(seed=0)
    for call in range(1, num_calls + 1):
        _, _, terminated, truncated, _ = recorded.step(np.full(batch.num_envs, call))
        over = terminated | truncated
        if envs.metadata["autoreset_mode"] is vector.AutoresetMode.DISABLED and over.any():
            recorded.reset(options={"reset_mask": over})
        num_steps = batch.num_steps
        finished += batch.take_finished()
        assert batch.num_steps == num_steps
    recorded.close()
    return finished


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_episodes_hold_what_each_environment_did(mode: Any) -> None:
    lengths, ends = (3, 5), ("terminated", "truncated")
    envs = [counting([(length, end)], 1000 * length) for length, end in zip(lengths, ends, strict=True)]
    finished = run(vector.SyncVectorEnv(envs, autoreset_mode=mode), 13)
    for length, end in zip(lengths, ends, strict=True):
        own = [episode for episode in finished if len(episode) == length]
        period = length + (mode.name == "NEXT_STEP")  # the call that resets is no step
        assert len(own) == 13 // period
        for number, episode in enumerate(own):
            first = 1000 * length + 100 * number
            assert episode.get_observations()[:, 1].tolist() == [*range(first, first + length + 1)]
            assert episode.get_actions().tolist() == [number * period + n for n in range(1, length + 1)]
            assert episode.get_rewards().tolist() == [*range(1, length + 1)]
            assert (episode.is_terminated, episode.is_truncated) == (end == "terminated", end == "truncated")
    assert len(finished) == sum(13 // (length + (mode.name == "NEXT_STEP")) for length in lengths)
    assert len({episode.id_ for episode in finished}) == len(finished)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_texts_stay_texts(mode: Any) -> None:
    envs = [Sampling(gymnasium.spaces.Text(9, charset="a\0"), gymnasium.spaces.Discrete(5)) for _ in range(2)]
    first, second, *_ = run(vector.SyncVectorEnv([lambda: envs[0], lambda: envs[1]], autoreset_mode=mode), 4)
    assert [one.get_observations().tolist() for one in (first, second)] == [env.observed[:4] for env in envs]


def test_extras_are_model_outputs_of_their_environments() -> None:
    envs = vector.SyncVectorEnv([counting([(2, "terminated")])] * 2)
    first, second = run(envs, 3, lambda: {"logp": np.array([0.5, 0.25]), "state": {"h": np.eye(2)}})
    assert first.get_extra_model_outputs("logp").tolist() == [0.5, 0.5]
    assert second.get_extra_model_outputs("state", 0)["h"].tolist() == [0, 1]


def test_number_of_environments_must_be_a_number() -> None:
    with pytest.raises(SpecError, match="`num_envs` must be >= 1, got 0"):
        EpisodeBatch(0)
