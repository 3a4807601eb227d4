"""`EpisodeBatch` beside real vector environments: no terminal observation is lost in any autoreset mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.episodes import Episode, EpisodeBatch
from reverb_writer.errors import ClosedError, IncompleteError, SpecError, StructureError

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


def run(envs: Any, num_calls: int) -> tuple[EpisodeBatch, list[Episode]]:
    """Drive a vector environment as its mode asks for, with actions 1, 2, ..."""
    batch = EpisodeBatch.of(envs)
    finished: list[Episode] = []
    assert batch.add_env_reset(*envs.reset(seed=0)) == []
    for call in range(1, num_calls + 1):
        actions = np.full(len(batch), call)
        outcome = envs.step(actions)
        finished += batch.add_env_step(outcome[0], actions, *outcome[1:])
        over = outcome[2] | outcome[3]
        if batch.autoreset_mode == "Disabled" and over.any():
            batch.add_env_reset(*envs.reset(options={"reset_mask": over}), reset_mask=over)
    envs.close()
    return batch, finished


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("kind", [vector.SyncVectorEnv, vector.AsyncVectorEnv])
def test_environments_hold_what_each_environment_did(mode: Any, kind: Any) -> None:
    lengths = (3, 5)
    envs = kind([lambda n=n: Counting(n, truncates=n == 5) for n in lengths], autoreset_mode=mode)
    batch, finished = run(envs, 12)
    for length, truncated in zip(lengths, (False, True), strict=True):
        own = [episode for episode in finished if len(episode) == length]
        period = length + (mode.name == "NEXT_STEP")  # the call that resets is no step
        assert len(own) == 12 // period + (12 % period == length)
        for number, episode in enumerate(own):
            observations = episode.finalize().get_observations()
            assert observations["step"].tolist() == [*range(length + 1)]
            actions = [number * period + 1 + n for n in range(length)]
            assert episode.get_actions().tolist() == actions
            assert observations["action"][1:, 0].tolist() == actions
            assert episode.get_rewards().tolist() == [n / 2 for n in range(1, length + 1)]
            assert (episode.is_terminated, episode.is_truncated) == (not truncated, truncated)
            assert episode.get_infos() == [{"reset": True}, *({"at": n} for n in range(1, length + 1))]
    assert len(finished) == sum(1 for episode in finished if len(episode) in lengths)
    assert len({episode.id_ for episode in [*finished, *batch.episodes]}) >= len(finished)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_texts_stay_texts(mode: Any) -> None:
    envs = vector.SyncVectorEnv([Saying, Saying], autoreset_mode=mode)
    _, finished = run(envs, 2)
    assert [episode.get_observations() for episode in finished] == [["reset", "middle", "end"]] * 2


def test_a_sample_of_one_of_several_spaces_stays_what_it_is() -> None:
    space = gymnasium.spaces.OneOf([gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(-1, 1, (2,), np.float32)])
    batch = EpisodeBatch(3, observation_space=space)  # a batch of OneOf is a tuple of samples
    batch.add_env_reset(tuple((1, np.full(2, n, np.float32)) for n in (0, 0.5, 1)))
    assert [episode.get_observations(0)[1].tolist() for episode in batch.episodes] == [[0, 0], [0.5, 0.5], [1, 1]]


def test_cartpole_environments_are_those_of_single_environments() -> None:
    seeds: Any = [3, 4]
    num_calls = 60
    envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    batch = EpisodeBatch.of(envs)
    batch.add_env_reset(*envs.reset(seed=seeds))
    actions = np.random.default_rng(0).integers(0, 2, (num_calls, 2))
    finished = []
    for action in actions:
        outcome = envs.step(action)
        finished += batch.add_env_step(outcome[0], action, *outcome[1:])
    assert finished
    for env_id, seed in enumerate(seeds):
        env, expected = gymnasium.make("CartPole-v1"), Episode()
        expected.add_env_reset(*env.reset(seed=seed))
        for action in actions[:, env_id]:
            observation, reward, terminated, truncated, info = env.step(action)
            expected.add_env_step(observation, action, reward, info, terminated=terminated, truncated=truncated)
            if expected.is_done:
                break
        start = expected.get_observations(0)
        (first,) = [episode for episode in finished if np.array_equal(episode.get_observations(0), start)]
        assert np.array_equal(first.get_observations(), expected.get_observations())
        assert first.get_actions() == expected.get_actions()
        assert first.is_terminated


def step(batch: EpisodeBatch, over: tuple[bool, bool] = (False, False), **changes: Any) -> list[Episode]:
    zeros = np.zeros(2, bool)
    given: Any = {"observations": np.zeros((2, 3)), "actions": np.zeros(2), "rewards": np.ones(2)}
    return batch.add_env_step(**{**given, "terminateds": np.array(over), "truncateds": zeros, **changes})


def test_model_outputs_go_to_their_envs() -> None:
    batch = EpisodeBatch(2)
    batch.add_env_reset(np.zeros((2, 3)))
    step(batch, extra_model_outputs={"logp": np.array([0.5, 0.25]), "state": {"h": np.eye(2)}})
    first, second = batch.episodes
    assert (first.get_extra_model_outputs("logp"), second.get_extra_model_outputs("logp")) == ([0.5], [0.25])
    assert second.get_extra_model_outputs("state", 0)["h"].tolist() == [0, 1]


def test_terminal_observation_that_is_missing_is_an_error_and_changes_nothing() -> None:
    batch = EpisodeBatch(2, "SameStep")
    batch.add_env_reset(np.zeros((2, 3)))
    with pytest.raises(StructureError, match=r"environment 1: .* `infos` have no `final_obs` for it"):
        step(batch, over=(False, True))
    assert [len(episode) for episode in batch.episodes] == [0, 0]
    (over,) = step(batch, over=(False, True), infos={"final_obs": [None, np.ones(3)], "final_info": {}})
    assert over.get_observations(-1).tolist() == [1, 1, 1]
    assert [len(episode) for episode in batch.episodes] == [1, 0]


def test_refused_step_changes_no_env() -> None:
    batch = EpisodeBatch(2)
    with pytest.raises(IncompleteError):
        step(batch)
    batch.add_env_reset(np.zeros((2, 3)))
    step(batch)
    for changes in ({"rewards": [1.0, "x"]}, {"observations": [np.zeros(3), np.zeros(4)]}, {"terminateds": [True]}):
        with pytest.raises(StructureError):
            step(batch, **changes)
        assert [(len(episode), episode.t, len(episode.infos)) for episode in batch.episodes] == [(1, 1, 2)] * 2
    step(batch)
    assert [len(episode) for episode in batch.episodes] == [2, 2]


def test_first_step_that_is_refused_leaves_no_names_of_model_outputs() -> None:
    batch = EpisodeBatch(2)
    batch.add_env_reset(np.zeros((2, 3)))
    with pytest.raises(StructureError):
        step(batch, rewards=[1.0, "x"], extra_model_outputs={"a": np.zeros(2)})
    step(batch, extra_model_outputs={"b": np.zeros(2)})
    assert [[*episode.extra_model_outputs] for episode in batch.episodes] == [["b"], ["b"]]


def test_environment_that_waits_for_its_reset_takes_no_step() -> None:
    batch = EpisodeBatch(2, "Disabled")
    batch.add_env_reset(np.zeros((2, 3)))
    (over,) = step(batch, over=(True, False))
    with pytest.raises(ClosedError, match="the episode is over"):
        step(batch)
    assert batch.episodes[0] is over
    assert batch.add_env_reset(np.zeros((2, 3)), reset_mask=np.array([True, False])) == []
    step(batch)
    assert [len(episode) for episode in batch.episodes] == [1, 2]


def test_reset_in_mid_episode_hands_back_what_it_cuts_off() -> None:
    batch = EpisodeBatch(2)
    batch.add_env_reset(np.zeros((2, 3)))
    step(batch)
    cut_off = batch.add_env_reset(np.zeros((2, 3)), reset_mask=np.array([False, True]))
    assert [(len(episode), episode.is_done) for episode in cut_off] == [(1, False)]
    assert [len(episode) for episode in batch.episodes] == [1, 0]


def test_cut_hands_out_chunks_and_goes_on() -> None:
    batch = EpisodeBatch(2)
    batch.add_env_reset(np.zeros((2, 3)))
    step(batch)
    chunks = batch.cut(1)
    assert [(len(chunk), chunk.t) for chunk in chunks] == [(1, 1)] * 2
    assert batch.cut() == []
    step(batch)
    assert [(episode.t_started, episode.t, episode.rewards.data) for episode in batch.episodes] == [(1, 2, [1, 1])] * 2


def test_mode_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="`autoreset_mode` must be one of 'NextStep', 'SameStep', 'Disabled', got None"):
        EpisodeBatch(2, None)
    with pytest.raises(SpecError, match="`num_envs` must be >= 1, got 0"):
        EpisodeBatch(0)
