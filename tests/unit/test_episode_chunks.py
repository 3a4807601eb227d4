"""Chunks of an episode: cut, concatenated, sliced; worked by RLlib 2.35, its faults aside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.episodes import Episode
from reverb_writer.errors import SpecError, StructureError


def five_steps(**options: Any) -> Episode:
    """Return observations 0..5, actions 1..5 and rewards 1..5, nothing of it look-back."""
    return Episode(
        "x",
        observations=[0, 1, 2, 3, 4, 5],
        actions=[1, 2, 3, 4, 5],
        rewards=[1.0, 2.0, 3.0, 4.0, 5.0],
        **{"len_lookback_buffer": 0, **options},
    )


@pytest.mark.parametrize(
    ("lookback", "observations", "actions"),
    [(0, [5], []), (2, [3, 4, 5], [4, 5]), (9, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5])],
)
def test_cut_takes_the_last_steps_along_as_look_back(lookback: int, observations: Any, actions: Any) -> None:
    chunk = five_steps(t_started=10).cut(lookback)
    assert (chunk.id_, len(chunk), chunk.t, chunk.t_started) == ("x", 0, 15, 15)
    assert (chunk.observations.data, chunk.actions.data) == (observations, actions)
    assert chunk.observations.lookback == chunk.actions.lookback == len(actions)
    assert chunk.get_observations() == [5]


def test_cut_looks_back_into_the_look_back() -> None:
    chunk = five_steps().cut(9).cut(3)
    assert (chunk.observations.data, chunk.actions.data) == ([2, 3, 4, 5], [3, 4, 5])


def test_chunk_goes_on() -> None:
    chunk = five_steps(extra_model_outputs={"logp": [0.1] * 5}).cut(2)
    chunk.add_env_step(6, 6, 6.0, extra_model_outputs={"logp": 0.6})
    assert chunk.get_rewards() == [6.0]
    assert chunk.get_rewards(slice(-2, None), neg_index_as_lookback=True) == [4, 5, 6]
    assert chunk.get_extra_model_outputs("logp", slice(-1, None), neg_index_as_lookback=True) == [0.1, 0.6]


def test_chunks_keep_ids_spaces_and_infos() -> None:
    space = pytest.importorskip("gymnasium").spaces.Discrete(9)
    episode = five_steps(
        observation_space=space, action_space=space, agent_id="a", module_id="m", multi_agent_episode_id="e",
        infos=[{"n": n} for n in range(6)],
    )  # fmt: skip
    for chunk in (episode.cut(1), episode[1:3]):
        assert (chunk.agent_id, chunk.module_id, chunk.multi_agent_episode_id) == ("a", "m", "e")
        assert chunk.observation_space is chunk.action_space is space
        assert chunk.infos.data == [{"n": n} for n in chunk.observations.data]


def test_negative_look_back_is_refused() -> None:
    with pytest.raises(SpecError, match="`len_lookback_buffer` must be >= 0, got -1"):
        five_steps().cut(-1)


@pytest.mark.parametrize(
    ("wanted", "observations", "actions", "t_started"),
    [
        (slice(1, 3), [1, 2, 3], [2, 3], 1),
        (slice(-2, None), [3, 4, 5], [4, 5], 3),
        (slice(None, 1), [0, 1], [1], 0),
        (slice(0, 4, 2), [0, 2, 4], [1, 3], 0),
        (slice(0, 3, 2), [0, 2, 3], [1, 3], 0),  # RLlib's has an observation too few
        (slice(3, 3), [3], [], 3),
        (slice(2, 1), [], [], 2),
        (slice(None), [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 0),
        (slice(-100, None), [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 0),  # RLlib's starts at -95
        (slice(None, 1000), [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 0),
    ],
)
def test_slice_holds_the_steps_and_the_observation_they_lead_to(
    wanted: slice, observations: Any, actions: Any, t_started: int
) -> None:
    part = five_steps()[wanted]
    assert (part.get_observations(), part.get_actions()) == (observations, actions)
    assert (part.t_started, part.t) == (t_started, t_started + len(actions))
    part.validate()


def test_slice_keeps_the_look_back() -> None:
    part = five_steps(len_lookback_buffer=2, t_started=10)[1:2]
    assert (part.t_started, part.t) == (11, 12)
    assert (part.observations.data, part.actions.data) == ([1, 2, 3, 4], [2, 3, 4])
    assert (part.get_observations(), part.get_actions()) == ([3, 4], [4])


def test_slice_is_done_if_it_reaches_to_the_end() -> None:
    done = five_steps(terminated=True)
    assert [done[wanted].is_terminated for wanted in (slice(3), slice(5), slice(1000), slice(-2, None))] == [
        False, True, True, True,
    ]  # fmt: skip


def test_slice_of_a_finalized_episode_is_its_own() -> None:
    episode = five_steps().finalize()
    part = episode[1:3]
    assert part.is_finalized
    part.set_rewards(new_data=[8.0, 9.0])
    assert episode.get_rewards().tolist() == [1, 2, 3, 4, 5]


def test_only_slices_forward_are_there() -> None:
    with pytest.raises(NotImplementedError, match="an episode can only be sliced"):
        five_steps()[1]
    with pytest.raises(SpecError, match=r"the step of an episode.s slice must be >= 1, got -1"):
        five_steps()[::-1]


def test_nests_and_nan_meet() -> None:
    episode = Episode("x")
    episode.add_env_reset({"a": np.array([np.nan, 1.0]), "b": 2})
    chunk = episode.cut()
    chunk.add_env_step({"a": np.array([0.0, 1.0]), "b": 3}, 0, 1.0, extra_model_outputs={"logp": 1})
    assert episode.concat_episode(chunk) is None  # type: ignore[func-returns-value]  # that is the point
    assert (len(episode), episode.get_extra_model_outputs("logp")) == (1, [1])


def test_chunk_that_does_not_follow_changes_nothing() -> None:
    def following(**options: Any) -> Episode:
        data: Any = {"observations": [5, 6], "actions": [6], "rewards": [6.0], "t_started": 5, "len_lookback_buffer": 0}
        return Episode(**{"id_": "x", **data, **options})

    episode = five_steps()
    for chunk, error, message in (
        (following(id_="y"), SpecError, "`id_` 'x', got 'y'"),
        (following(t_started=4), SpecError, "`t_started` 5, got 4"),
        (following(observations=[4, 6]), SpecError, "must start with the last observation"),
        (following(extra_model_outputs={"logp": [1]}), StructureError, "names of the first step"),
        (following(observations=[5, 6], actions=[[6, 6]]), StructureError, "chunk"),
        (Episode("x", t_started=5), SpecError, "must start with the last observation"),
    ):
        with pytest.raises(error, match=message):
            episode.concat_episode(chunk)
        assert (episode.observations.data, episode.actions.data, episode.t) == ([*range(6)], [*range(1, 6)], 5)
        assert len(episode.infos) == 6
    episode.concat_episode(following())
    assert episode.t == 6
