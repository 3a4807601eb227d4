"""Ctrl-C at any moment of a call of a recorded environment: each transition that is written has happened."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from interrupting import interrupted
from kinds import client_alone
from reading import Place

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from worlds import Counting  # noqa: E402

# An interrupt in a function that Python calls when it deletes something is printed, and has no other effect.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EPISODES = [(3, "terminated"), (2, "truncated"), (9, "both")]
_NUM_STEPS = 4

Transition = tuple[float, int, float, float]


class Logged(Counting):
    def __init__(self, happened: set[Transition], offset: int = 0) -> None:
        super().__init__(EPISODES, offset, reuse=False)
        self._happened = happened

    def step(self, action: Any) -> Any:
        before = float(self._observe()[0])
        result = super().step(action)
        self._happened.add((before, int(action), float(result[1]), float(result[0][0])))
        return result


def check_happened(place: Place, happened: set[Transition]) -> None:
    """Check that the windows of two steps have many transitions, each of which has happened, and none twice."""
    size = place.client.server_info()["a"].current_size
    with rw.ReplayDataset(place.client, "a", size, max_in_flight_batches=1, timeout_s=60) as dataset:
        batch = rw.to_transitions(next(dataset))
    columns = batch.observation[..., 0], batch.action, batch.reward, batch.next_observation[..., 0]
    found = [tuple(values) for values in zip(*(column[batch.mask].tolist() for column in columns), strict=True)]
    assert len(found) > 30
    assert set(found) - happened == set()
    assert len(set(found)) == len(found)


def play(env: Any, num_envs: int | None = None) -> int:
    """Interrupt each kind of call at one moment after another; return how many moments there were."""
    numbers = itertools.count(1)
    env.reset()
    env.step(0 if num_envs is None else np.zeros(num_envs, int))  # dm-tree remembers a wrong kind of a type: its fault
    moment, was_interrupted, resetting = 1, True, (gymnasium.error.ResetNeeded, rw.errors.StructureError)
    while was_interrupted:
        was_interrupted = not interrupted(env.reset, moment)
        env.reset()
        for _ in range(_NUM_STEPS):
            number = next(numbers) % 1000
            action = number if num_envs is None else np.full(num_envs, number)
            try:
                was_interrupted |= not interrupted(functools.partial(env.step, action), moment)
                env.step(action)
            except resetting:
                env.reset()
                env.step(action)
        moment += 1 + moment // 40
    return moment


@client_alone
@pytest.mark.parametrize("kind", ["trajectory", "episode"])
def test_each_recorded_transition_has_happened(place: Place, kind: str) -> None:
    happened: set[Transition] = set()
    observer: Any = (
        rw.EpisodeObserver(place.client, "a", 100) if kind == "episode" else rw.TrajectoryObserver(place.client, "a", 2)
    )
    with observer:
        env = rw.environments.record(Logged(happened), observer)
        assert play(env) > 20
        with contextlib.suppress(KeyboardInterrupt):
            env.close()
        observer.flush()
        if kind == "trajectory":
            check_happened(place, happened)
        else:
            for sample in place.client.sample("a", place.client.server_info()["a"].current_size):
                observations = sample.data["observation"][:, 0]
                assert (np.diff(observations) == 1).all()
                assert sample.kinds is not None
                assert sample.kinds[0] == FIRST | ACTION
                assert (sample.kinds[1:-1] == ACTION).all()
                assert sample.kinds[-1] in (LAST, LAST | TERMINAL)


@client_alone
@pytest.mark.parametrize("mode", [*AutoresetMode])
def test_each_recorded_transition_of_a_vector_has_happened(place: Place, mode: AutoresetMode) -> None:
    happened: set[Transition] = set()
    with rw.TrajectoryObserver(place.client, "a", 2, num_envs=2) as observer:
        envs = SyncVectorEnv([lambda: Logged(happened), lambda: Logged(happened, 100_000)], autoreset_mode=mode)
        env = rw.environments.record(envs, observer)
        assert play(env, 2) > 20
        env.close()
        observer.flush()
        check_happened(place, happened)


@client_alone
def test_each_recorded_transition_of_dm_env_has_happened(place: Place) -> None:
    pytest.importorskip("dm_env")
    from dm_worlds import OfTimeSteps

    happened: set[Transition] = set()
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        env = rw.environments.record(OfTimeSteps(Logged(happened)), observer)
        assert play(env) > 20
        env.close()
        observer.flush()
        check_happened(place, happened)


@client_alone
def test_two_environments_that_step_in_turn_are_refused_one_observer(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2) as observer:
        one, other = (rw.environments.record(Counting(EPISODES, offset), observer) for offset in (0, 500))
        for env in (one, other):  # after the end of an episode, another environment may write the next one
            env.reset()
            for action in range(3):
                env.step(action)
        observer.flush()
        assert observer.stats().items == 2 * 3
        for env in (one, other):
            env.reset()
            env.step(0)
        with pytest.raises(rw.errors.SpecError, match="got steps from elsewhere in the middle of an episode"):
            one.step(1)
        with pytest.raises(gymnasium.error.ResetNeeded):
            one.step(1)
        one.reset()
        assert observer.num_steps == 2 * 4 + 2
