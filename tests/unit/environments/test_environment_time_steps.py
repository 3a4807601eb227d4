"""What dm_env's environments are recorded as, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw

dm_env = pytest.importorskip("dm_env")
pytest.importorskip("gymnasium", reason="worlds needs it")

import worlds  # noqa: E402  # as the next two: only where gymnasium is
from dm_worlds import OfTimeSteps  # noqa: E402
from worlds import Rows, refusing, told  # noqa: E402


def counting(episodes: list[tuple[int, str]]) -> OfTimeSteps:
    return OfTimeSteps(worlds.Counting(episodes))


EPISODES = [(2, "terminated"), (1, "truncated")]
RECORDED = ["0 10 1 0.5 F", "1 11 2 0", "2 0 0 0 Lt", "100 13 1 1 F", "101 0 0 0 Lr"]


def test_a_recorded_environment_resets_itself_as_dm_env_says() -> None:
    steps: list[Any] = []
    env = rw.environments.record(counting(EPISODES), steps.append)
    assert isinstance(env, dm_env.Environment)
    for action in (9, 10, 11, 12, 13):  # the actions of steps that reset mean nothing
        env.step(action)
    assert [told(step) for step in steps] == RECORDED


def test_an_observer_gets_rows_with_kinds_and_the_discounts_of_the_environment() -> None:
    observer = Rows()
    env = rw.environments.record(
        counting(EPISODES),
        observer,
        extras=lambda: {"value": np.float32(7)},
        final_extras=lambda observation: {"value": observation[0]},
    )
    for action in (9, 10, 11, 12, 13):
        env.step(action)
    # FIRST 1, ACTION 2, LAST 4, TERMINAL 8; RECORDED has the same rows
    assert observer.told == ["0 10 1 3", "1 11 2 2", "2 0 0 12", "100 13 1 3", "101 0 0 4"]
    assert [float(row["discount"]) for row in observer.rows] == [0.5, 0, 0, 1, 0]
    assert [row["extras"]["value"].item() for row in observer.rows] == [7, 7, 2, 7, 101]
    assert {tuple(sorted(row)) for row in observer.rows} == {("action", "discount", "extras", "observation", "reward")}


def test_extras_of_an_environment_without_infos_take_no_arguments() -> None:
    with pytest.raises(rw.errors.SpecError, match="steps of dm_env have no `info`"):
        rw.environments.record(counting(EPISODES), print, extras=lambda info: info)


def test_the_environment_is_otherwise_the_same() -> None:
    bare = counting(EPISODES)
    env = rw.environments.record(bare, print)
    assert env.observation_spec() == bare.observation_spec()
    assert env.action_spec() == bare.action_spec()
    assert env.reward_spec() == bare.reward_spec()
    assert env.discount_spec() == bare.discount_spec()
    assert env.closed is False
    with env:
        pass
    assert bare.closed
    with pytest.raises(AttributeError):
        _ = env.no_such_name


@pytest.mark.parametrize("leave", ["reset", "close"])
def test_an_episode_that_the_actor_leaves_is_truncated(leave: str) -> None:
    steps: list[Any] = []
    env = rw.environments.record(counting([(9, "terminated")]), steps.append)
    env.reset()
    env.reset()
    env.step(1)
    getattr(env, leave)()
    assert [told(step) for step in steps] == ["100 1 1 0.5 F", "101 0 0 0 Lr"]
    env.close()
    assert len(steps) == 2


def test_nests_of_any_kind_and_extras_are_zero_in_the_last_step() -> None:
    steps: list[Any] = []
    recorder = rw.environments.TimeStepRecorder(steps.append)
    observation = {"a": np.ones(2), "b": [np.int32(1), "text"]}
    reward, discount = {"x": np.float32(1), "y": np.ones(2)}, {"x": np.float32(0), "y": np.zeros(2)}
    recorder.observe_first(dm_env.restart(observation))
    recorder.observe(
        (np.int8(1), [2.5]),
        dm_env.TimeStep(dm_env.StepType.LAST, reward, discount, observation),
        extras={"log_prob": np.float32(-1)},
    )
    first, last = steps
    assert (first["extras"], first["reward"]["x"], first["is_first"]) == ({"log_prob": -1}, 1, True)
    for name in ("action", "reward", "discount", "extras"):
        tree.assert_same_structure(first[name], last[name])
        for one, other in zip(tree.flatten(first[name]), tree.flatten(last[name]), strict=True):
            assert np.asarray(one).dtype == np.asarray(other).dtype
            assert not np.any(other)
    assert (last["observation"]["b"][1], last["terminated"]) == ("text", True)


@pytest.mark.parametrize("wrapped", [True, False])
def test_extras_stand_beside_their_action_and_a_policy_may_reuse_its_arrays(wrapped: bool) -> None:
    steps: list[Any] = []
    bare = counting([(4, "terminated")])
    action, extras = np.zeros(1, np.int64), {"log_prob": np.zeros(1)}
    env = rw.environments.record(bare, steps.append, extras=lambda: extras) if wrapped else bare
    recorder = rw.environments.TimeStepRecorder(steps.append)
    first = env.reset()
    if not wrapped:
        recorder.observe_first(first)
    for number in (1, 2, 3, 4):
        action[:] = extras["log_prob"][:] = number
        result = env.step(action)
        if not wrapped:
            recorder.observe(action, result, extras)
    assert [step["action"].tolist() for step in steps] == [[1], [2], [3], [4], [0]]
    assert [step["extras"]["log_prob"].tolist() for step in steps] == [[1], [2], [3], [4], [0]]


def test_rewards_may_be_any_numbers_that_an_observer_takes() -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as server:
        with rw.EpisodeObserver(server.address, "t", 10) as observer:
            recorder = rw.environments.TimeStepRecorder(observer)
            recorder.observe_first(dm_env.restart(np.zeros(2)))
            recorder.observe(0, dm_env.transition(0.0, np.zeros(2), 1.0))
            recorder.observe(0, dm_env.transition(1, np.zeros(2), 1))
            recorder.observe(0, dm_env.termination(2, np.zeros(2)))
        with rw.Client(server.address) as client:
            (sample,) = client.sample("t")
    assert sample.data["reward"].tolist() == [0, 1, 2, 0]
    assert sample.data["discount"].tolist() == [1, 1, 0, 0]


def test_time_steps_out_of_order_are_refused_and_change_nothing() -> None:
    steps: list[Any] = []
    env = counting([(2, "terminated")])
    recorder = rw.environments.TimeStepRecorder(steps.append)
    first = env.reset()
    middle = env.step(0)
    with pytest.raises(ValueError, match="call `observe_first` before `observe`"):
        recorder.observe(0, middle)
    with pytest.raises(ValueError, match=r"`observe_first` takes the first .* got <StepType.MID: 1>"):
        recorder.observe_first(middle)
    recorder.observe_first(first)
    with pytest.raises(ValueError, match="`observe` takes the time step after an action"):
        recorder.observe(0, first)
    recorder.observe(0, middle)
    recorder.observe(0, env.step(0))
    with pytest.raises(ValueError, match="call `observe_first` before `observe`"):
        recorder.observe(0, middle)
    assert [bool(step["is_last"]) for step in steps] == [False, False, True]


def test_a_step_that_the_observer_refused_ends_the_episode_before_it() -> None:
    steps: list[Any] = []
    env = rw.environments.record(counting([(9, "terminated")]), refusing(steps.append, 2))
    env.reset()
    env.step(1)
    with pytest.raises(rw.errors.ReplayTimeoutError):
        env.step(2)
    with pytest.raises(rw.errors.StructureError, match="no episode is being recorded"):
        env.step(3)
    env.reset()
    assert [told(step) for step in steps] == ["0 1 1 0.5 F", "1 0 0 0 Lr"]
