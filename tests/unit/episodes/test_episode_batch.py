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

vector = gymnasium.vector
MODES = list(vector.AutoresetMode)


class Counting(gymnasium.Env[Any, Any]):
    """Observes what the action before was and how many steps there were; ends after `length` steps."""

    observation_space = gymnasium.spaces.Dict(
        step=gymnasium.spaces.Discrete(100), action=gymnasium.spaces.Box(-1, 99, (2,), np.float32)
    )
    action_space = gymnasium.spaces.Discrete(50)

    def __init__(self, length: int, truncates: bool = False) -> None:
        self.length, self.truncates, self.at = length, truncates, 0

    def reset(self, **_: Any) -> Any:
        self.at = 0
        return {"step": 0, "action": np.full(2, -1, np.float32)}, {"reset": True}

    def step(self, action: Any) -> Any:
        self.at += 1
        over = self.at == self.length
        observation = {"step": self.at, "action": np.full(2, action, np.float32)}
        return observation, self.at / 2, over and not self.truncates, over and self.truncates, {"at": self.at}


class Saying(gymnasium.Env[Any, Any]):
    """Observes texts; ends after two steps."""

    observation_space = gymnasium.spaces.Text(9)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_: Any) -> Any:
        self.said = "reset"
        return self.said, {}

    def step(self, _: Any) -> Any:
        self.said = {"reset": "middle", "middle": "end"}[self.said]
        return self.said, 1.0, self.said == "end", False, {}


def run(envs: Any, num_calls: int, extras: Any = None) -> tuple[EpisodeBatch, list[Episode]]:
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
        finished += batch.take_finished()
    return batch, finished


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [vector.SyncVectorEnv, vector.AsyncVectorEnv])
def test_environments_hold_what_each_environment_did(mode: Any, kind: Any) -> None:
    lengths = (3, 5)
    envs = kind([lambda n=n: Counting(n, truncates=n == 5) for n in lengths], autoreset_mode=mode)
    _, finished = run(envs, 13)
    envs.close()
    for length, truncated in zip(lengths, (False, True), strict=True):
        own = [episode for episode in finished if len(episode) == length]
        period = length + (mode.name == "NEXT_STEP")  # the call that resets is no step
        assert len(own) == 13 // period
        for number, episode in enumerate(own):
            observations = episode.get_observations()
            assert observations["step"].tolist() == [*range(length + 1)]
            actions = [number * period + 1 + n for n in range(length)]
            assert episode.get_actions().tolist() == actions
            assert observations["action"][1:, 0].tolist() == actions
            assert episode.get_rewards().tolist() == [n / 2 for n in range(1, length + 1)]
            assert (episode.is_terminated, episode.is_truncated) == (not truncated, truncated)
    assert len(finished) == sum(1 for episode in finished if len(episode) in lengths)
    assert len({episode.id_ for episode in finished}) == len(finished)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_texts_stay_texts(mode: Any) -> None:
    envs = vector.SyncVectorEnv([Saying, Saying], autoreset_mode=mode)
    _, finished = run(envs, 3)
    assert [episode.get_observations().tolist() for episode in finished] == [["reset", "middle", "end"]] * 2


def test_extras_are_model_outputs_of_their_environments() -> None:
    envs = vector.SyncVectorEnv([lambda: Counting(2)] * 2)
    _, (first, second) = run(envs, 3, lambda: {"logp": np.array([0.5, 0.25]), "state": {"h": np.eye(2)}})
    assert first.get_extra_model_outputs("logp").tolist() == [0.5, 0.5]
    assert second.get_extra_model_outputs("state", 0)["h"].tolist() == [0, 1]


def test_number_of_environments_must_be_a_number() -> None:
    with pytest.raises(SpecError, match="`num_envs` must be >= 1, got 0"):
        EpisodeBatch(0)
