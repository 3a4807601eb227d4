"""The state of an episode survives a pickle, whatever is in it, and shares nothing with the episode."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest

from reverb_writer.episodes import Episode, InfiniteLookbackBuffer
from reverb_writer.errors import FormatError, StructureError

spaces = pytest.importorskip("gymnasium").spaces

Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024  # as an environment may have it

SPACE = spaces.Dict(
    a=spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(4), spaces.MultiBinary([2, 3])]),
    b=spaces.Box(np.array([-np.inf, 0]), np.array([1, np.inf]), dtype=np.float64),
    c=spaces.MultiDiscrete([2, 3]),
    d=spaces.Text(5, charset="abc"),
)


def episode() -> Episode:
    box = spaces.Box(-1, 1, (2,), np.float32)
    episode = Episode("x", observation_space=SPACE, action_space=box, agent_id=("team", 1))
    SPACE.seed(0)
    episode.add_env_reset(SPACE.sample(), {"note": "a", "array": np.arange(3), "nan": float("nan"), 5: None})
    for n in range(4):
        action = np.full(2, n / 10, np.float32)
        episode.add_env_step(SPACE.sample(), action, n / 3, extra_model_outputs={"logp": np.float32(n), "h": {"c": n}})
    episode.add_temporary_timestep_data("key", [1, (2, b"3")])
    episode.custom_data["seed"] = {"value": 7}
    return episode.cut(2)


def through_pickle(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))  # noqa: S301  # our own


@pytest.mark.parametrize("finalized", [False, True])
def test_state_survives_a_pickle(finalized: bool) -> None:
    before = episode().finalize() if finalized else episode()
    after = Episode.from_state(through_pickle(before.get_state()))
    for name in ("observations", "actions", "rewards", "extra_model_outputs", "agent_id", "t", "t_started"):
        assert getattr(after, name) == getattr(before, name), name
    assert (after.observation_space, after.is_finalized) == (SPACE, finalized)
    assert after.custom_data == {"seed": {"value": 7}}
    assert after.temporary_timestep_data == before.temporary_timestep_data
    assert after.get_duration_s() == pytest.approx(before.get_duration_s(), abs=1e-6)
    assert str(after.get_infos()) == str(before.get_infos())
    if not finalized:
        step: Any = SPACE.sample(), np.zeros(2, np.float32), 1.0
        after.add_env_step(*step, extra_model_outputs={"logp": np.float32(1), "h": {"c": 1}}, terminated=True)
        assert Episode.from_state(after.get_state()).is_terminated


@pytest.mark.parametrize("finalized", [False, True])
def test_state_shares_nothing_with_the_episode(finalized: bool) -> None:
    before = episode().finalize() if finalized else episode()
    state = before.get_state()
    kept = pickle.dumps(state)
    before.set_rewards(new_data=-1.0, at_indices=-1, neg_index_as_lookback=True)
    before.set_actions(new_data=np.ones(2, np.float32), at_indices=-1, neg_index_as_lookback=True)
    before.infos.data[0]["note"] = "changed"
    assert pickle.dumps(state) == kept
    after = Episode.from_state(state)
    after.set_rewards(new_data=-1.0, at_indices=-1, neg_index_as_lookback=True)
    after.infos.data[0]["note"] = "changed"
    assert pickle.dumps(state) == kept


def test_state_keeps_dtypes_of_spaces_and_kinds_of_nests() -> None:
    space = spaces.Discrete(4, start=1)
    if "dtype" in inspect.signature(spaces.Discrete).parameters:
        space = spaces.Discrete(4, start=1, dtype=np.int32)
    before = Episode(action_space=space)
    before.add_env_reset(
        OrderedDict([("z", Point(np.float32(1), np.arange(2))), ("a", 2)]),
        {"order": OrderedDict(b=1, a=[Point(1, "text")])},
    )
    after = Episode.from_state(through_pickle(before.get_state()))
    assert after.actions.space == space
    assert after.actions.space.dtype == space.dtype
    observation, info = after.get_observations(0), after.get_infos(0)
    assert [type(info["order"]), *info["order"]] == [OrderedDict, "b", "a"]
    assert info["order"]["a"][0] == Point(1, "text")
    assert type(info["order"]["a"][0]) is Point
    assert (observation["z"]._fields, observation["z"].y.tolist(), observation["a"]) == (("x", "y"), [0, 1], 2)


@pytest.mark.parametrize(
    "copied", [through_pickle, copy.deepcopy, lambda episode: Episode.from_state(episode.get_state())]
)
def test_rows_that_are_lists_survive_finalize_and_a_copy(copied: Any) -> None:
    before = Episode(observations=[0, 1, 2], actions=[[1, 2, 3], [4, 5, 6]], rewards=[1.0, 2.0])
    assert copied(before.finalize()).get_actions(-1) == [4, 5, 6]


@pytest.mark.parametrize("copied", [through_pickle, copy.deepcopy])
def test_copy_of_a_chunk_without_steps_knows_what_its_rows_are(copied: Any) -> None:
    before = Episode(observations=[0, 1], actions=[np.float32(1)], rewards=[1.0])
    chunk = copied(before.cut())
    with pytest.raises(StructureError, match="expected float32"):
        chunk.add_env_step(2, "text", 1.0)


def test_state_has_infos_and_spaces_of_any_type() -> None:
    before = Episode(observation_space=spaces.Graph(spaces.Discrete(2), None))
    after = Episode.from_state(through_pickle(before.get_state()))
    assert after.observation_space == before.observation_space
    with_objects = Episode()
    with_objects.add_env_reset(0, {"seen": {1, 2}, "when": np.datetime64("2026-01-01"), "kind": Point})
    after = Episode.from_state(through_pickle(with_objects.get_state()))
    assert after.get_infos(0) == with_objects.get_infos(0)


@pytest.mark.parametrize(
    "change",
    [
        {"rewards": None},
        {"rewards": {"data": [object()], "lookback": 0, "finalized": False, "space": None}},
        {"rewards": {"data": [1.0], "lookback": 0, "finalized": False}},
        {"observations": {"data": [1, [2]], "lookback": 0, "finalized": False, "space": None}},
        {"observations": {"data": None, "lookback": -1, "finalized": False, "space": None}},
        {"actions": {"data": [1, 2], "lookback": 0, "finalized": False, "space": None}},
        {"t_started": object()},
    ],
)
def test_broken_state_is_refused(change: Any) -> None:
    with pytest.raises(FormatError):
        Episode.from_state({**Episode().get_state(), **change})
    with pytest.raises(FormatError, match="this is not a state of an episode"):
        Episode.from_state({})


@pytest.mark.parametrize("finalized", [False, True])
def test_state_of_a_buffer_survives_a_pickle_with_its_space_and_look_back(finalized: bool) -> None:
    before = episode()
    for buffer in (before.observations, before.actions, before.rewards, before.infos, InfiniteLookbackBuffer()):
        if finalized and buffer.len_incl_lookback():
            buffer.finalize()
        after = InfiniteLookbackBuffer.from_state(through_pickle(buffer.get_state()))
        if buffer is not before.infos:  # which have NaN in them
            assert after == buffer
        assert (len(after), after.lookback, after.finalized) == (len(buffer), buffer.lookback, buffer.finalized)
        assert after.is_untyped == buffer.is_untyped


def test_what_is_no_state_of_a_buffer_is_refused() -> None:
    state = InfiniteLookbackBuffer([1, 2]).get_state()
    for broken in ({}, {**state, "lookback": -1}, {**state, "data": [object()]}):
        with pytest.raises(FormatError):
            InfiniteLookbackBuffer.from_state(broken)
