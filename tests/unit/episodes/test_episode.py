"""How an episode grows, what it refuses, and that a refused call changes nothing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from reverb_writer.episodes import Episode
from reverb_writer.errors import ClosedError, IncompleteError, SpecError, StructureError, UnknownKeyError

spaces = pytest.importorskip("gymnasium").spaces


def grown(num_steps: int = 3, **options: Any) -> Episode:
    """Return an episode with observations 0, 1, ..., actions 10, 11, ... and rewards 1, 2, ..."""
    episode = Episode("x", **options)
    episode.add_env_reset(0, {"at": 0})
    for n in range(num_steps):
        episode.add_env_step(n + 1, 10 + n, float(n + 1), {"at": n + 1})
    return episode


def told(episode: Episode) -> dict[str, Any]:
    """Return all that an episode tells of itself, the look-back included."""
    columns = {"observations": episode.observations, "infos": episode.infos, "actions": episode.actions}
    columns |= {"rewards": episode.rewards, **episode.extra_model_outputs}
    return {
        **{name: (np.asarray(column.data).tolist(), column.lookback) for name, column in columns.items()},
        **{name: getattr(episode, name) for name in ("id_", "t", "t_started", "is_terminated", "is_truncated")},
    }


def test_episode_grows_step_by_step() -> None:
    episode = grown(3)
    assert (len(episode), episode.t, episode.t_started, episode.is_done) == (3, 3, 0, False)
    assert episode.get_observations() == [0, 1, 2, 3]
    assert episode.get_actions() == [10, 11, 12]
    assert episode.get_rewards() == [1, 2, 3]
    assert episode.get_infos() == [{"at": 0}, {"at": 1}, {"at": 2}, {"at": 3}]
    assert (episode.get_return(), episode.env_steps(), episode.agent_steps()) == (6.0, 3, 3)
    assert str(episode) == "Episode(len=3 done=False R=6 id_=x)"


def test_infos_may_be_left_out() -> None:
    episode = Episode(observations=np.zeros((3, 2)), actions=np.zeros(2), rewards=np.zeros(2), len_lookback_buffer=0)
    assert episode.get_infos() == [{}, {}, {}]
    episode = Episode()
    episode.add_env_reset(0)
    episode.add_env_step(1, 0, 0.0)
    assert episode.get_infos() == [{}, {}]


def test_all_given_steps_are_look_back_unless_told_otherwise() -> None:
    data: Any = {"observations": [0, 1, 2], "actions": [0, 1], "rewards": [0.0, 1.0]}
    assert [len(Episode(**data, len_lookback_buffer=n)) for n in ("auto", 99, 2, 1, 0)] == [0, 0, 0, 1, 2]
    episode = Episode(**data, t_started=10, len_lookback_buffer=1)
    assert (episode.t_started, episode.t) == (10, 11)
    assert episode.get_actions(-1, neg_index_as_lookback=True) == 0


def test_columns_may_be_given_as_buffers_which_are_copied() -> None:
    whole = grown(4).cut(3)
    whole.add_env_step(5, 14, 5.0, {"at": 5})
    columns: Any = {name: getattr(whole, name) for name in ("observations", "actions", "rewards", "infos")}
    again = Episode(**columns, t_started=whole.t_started, id_="x")
    assert told(again) == told(whole)
    again.set_rewards(new_data=[-1.0])
    assert whole.get_rewards() == [5.0]


@pytest.mark.parametrize(
    "data",
    [
        {"observations": [0, 1], "actions": [0], "rewards": []},
        {"observations": [0, 1], "actions": [], "rewards": [0.0]},
        {"observations": [0], "actions": [0], "rewards": [0.0]},
        {"observations": [0, 1], "actions": [0], "rewards": [0.0], "infos": [{}]},
        {"observations": [0, 1], "actions": [0], "rewards": [0.0], "extra_model_outputs": {"x": [1, 2]}},
        {"actions": [0]},
        {"observations": [0, 1], "actions": [0], "rewards": [[0.0]]},
        {"observations": [0, [1]], "actions": [0], "rewards": [0.0]},
        {"observations": {"a": np.zeros(2), "b": np.zeros(3)}, "actions": [0], "rewards": [0.0]},
    ],
)
def test_data_that_does_not_fit_together_is_refused(data: Any) -> None:
    with pytest.raises(StructureError):
        Episode(**data, len_lookback_buffer=0)


def test_reset_comes_first_and_once() -> None:
    episode = Episode()
    with pytest.raises(IncompleteError, match="a step needs a reset before it"):
        episode.add_env_step(1, 0, 0.0)
    episode.add_env_reset(0)
    with pytest.raises(SpecError, match="the reset must be the first call"):
        episode.add_env_reset(0)
    with pytest.raises(SpecError, match="at step 5"):
        Episode(t_started=5).add_env_reset(0)
    assert episode.get_observations() == [0]


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_nothing_follows_the_end(flag: str) -> None:
    episode = grown(1)
    ending: Any = {flag: np.True_}
    episode.add_env_step(2, 0, 0.5, **ending)
    assert episode.is_done
    assert getattr(episode, f"is_{flag}") is True
    before = told(episode)
    for call in (lambda: episode.add_env_step(3, 0, 0.0), lambda: episode.add_env_reset(0), episode.cut):
        with pytest.raises(ClosedError, match="the episode is over"):
            call()
    assert told(episode) == before


def test_finalized_episode_returns_arrays_and_takes_no_step() -> None:
    episode = grown(3)
    assert episode.finalize() is episode.finalize()
    assert episode.is_finalized
    assert isinstance(episode.get_observations([1]), np.ndarray)
    assert isinstance(episode.actions[0:2], np.ndarray)
    assert isinstance(episode.get_infos(), list)
    with pytest.raises(ClosedError, match=r"the episode is finalized: .* Continue in `cut\(\)`"):
        episode.add_env_step(4, 0, 0.0)
    successor = episode.cut(1)
    successor.add_env_step(4, 13, 4.0)
    assert successor.get_rewards(slice(-1, None), neg_index_as_lookback=True) == [3.0, 4.0]


def test_episode_without_steps_can_be_finalized() -> None:
    episode = grown(0).finalize()
    assert (episode.is_finalized, episode.observations.finalized) == (True, True)
    assert episode.get_rewards().tolist() == []
    assert {key: len(data) for key, data in episode.get_data_dict().items()} == dict.fromkeys(
        ("terminateds", "truncateds", "t", "eps_id", "obs", "infos", "actions", "rewards"), 0
    )


def test_data_dict_has_a_row_for_each_step() -> None:
    episode = grown(2)
    episode.add_env_step(3, 12, 3.0, terminated=True)
    assert episode.get_data_dict() == {
        "terminateds": [False, False, True],
        "truncateds": [False] * 3,
        "t": [0, 1, 2],
        "eps_id": ["x"] * 3,
        "obs": [0, 1, 2],
        "infos": [{"at": 0}, {"at": 1}, {"at": 2}],
        "actions": [10, 11, 12],
        "rewards": [1.0, 2.0, 3.0],
    }
    finalized = episode.finalize().get_data_dict()
    assert all(isinstance(data, np.ndarray) for key, data in finalized.items() if key != "infos")


STEP: Any = {"observation": 9, "action": 9, "reward": 9.0, "extra_model_outputs": {"logp": 0.5}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"observation": np.zeros(2)},
        {"observation": {"a": 1}},
        {"action": [1, 2]},
        pytest.param({"action": object()}, id="{'action': object()}"),
        {"reward": np.zeros(1)},
        {"reward": None},
        {"extra_model_outputs": None},
        {"extra_model_outputs": {"logp": 0.5, "more": 1}},
        {"extra_model_outputs": {"logp": np.zeros(2)}},
    ],
    ids=str,
)
def test_refused_step_changes_nothing(wrong: Any) -> None:
    episode = Episode()
    episode.add_env_reset(0)
    episode.add_env_step(**STEP)
    before = told(episode)
    with pytest.raises(StructureError):
        episode.add_env_step(**{**STEP, **wrong})
    assert told(episode) == before
    episode.add_env_step(**STEP)
    episode.validate()
    assert len(episode) == 2


def test_first_step_that_is_refused_leaves_no_trace() -> None:
    episode = Episode()
    episode.add_env_reset(0)
    with pytest.raises(StructureError, match="`reward` must be a number"):
        episode.add_env_step(1, action=np.zeros(3), reward="x", extra_model_outputs={"a": 1})
    episode.add_env_step(1, action=0, reward=1.0, extra_model_outputs={"b": 1})
    assert (episode.get_actions(), [*episode.extra_model_outputs]) == ([0], ["b"])


def test_step_out_of_its_space_is_refused_at_the_first_and_every_50th_step() -> None:
    episode = Episode(observation_space=spaces.Discrete(2), action_space=spaces.Discrete(2))
    with pytest.raises(StructureError, match="observation 5 is not in its space Discrete"):
        episode.add_env_reset(5)
    episode.add_env_reset(0)
    for n in range(101):
        arguments: Any = {"observation": 1, "action": 0, "reward": 0.0}
        if n % 50 == 0:
            for wrong in ("observation", "action"):
                with pytest.raises(StructureError, match=f"{wrong} 7 is not in its space"):
                    episode.add_env_step(**{**arguments, wrong: 7})
        episode.add_env_step(**arguments)
    assert len(episode) == 101


def test_strings_are_kept() -> None:
    episode = Episode(observation_space=spaces.Text(5))
    episode.add_env_reset("go")
    episode.add_env_step("stop", np.array(["a", "b"]), 1.0)
    assert episode.get_observations() == ["go", "stop"]
    assert episode.get_actions(0).tolist() == ["a", "b"]
    assert episode.get_observations(slice(0, 3), fill="") == ["go", "stop", ""]


def test_rows_with_another_number_of_leaves_are_refused() -> None:
    Seen = pytest.importorskip("attr").make_class("Seen", ["rays"])  # noqa: N806  # a class
    episode = Episode()
    episode.add_env_reset(Seen([1.0, 2.0]))
    for rays in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(StructureError, match="its leaves are not those of the first row"):
            episode.add_env_step(Seen(rays), 0, 0.0)
    episode.add_env_step(Seen([3.0, 4.0]), 0, 0.0)
    assert episode.get_observations() == [Seen([1.0, 2.0]), Seen([3.0, 4.0])]


def test_unknown_names_are_errors_by_name() -> None:
    episode = grown(2)
    for call in (
        lambda: episode.get_extra_model_outputs("logp"),
        lambda: episode.set_extra_model_outputs(key="logp", new_data=1, at_indices=0),
        lambda: episode.get_temporary_timestep_data("logp"),
    ):
        with pytest.raises(UnknownKeyError, match="logp") as caught:
            call()
        assert isinstance(caught.value, KeyError)
        assert not str(caught.value).startswith("'")
    assert episode.extra_model_outputs == {}


def test_new_extra_model_outputs_need_an_item_for_each_step() -> None:
    episode = grown(2)
    with pytest.raises(StructureError, match="`logp` must have an item for each of 2 steps, got 3"):
        episode.set_extra_model_outputs(key="logp", new_data=[1, 2, 3])
    episode.set_extra_model_outputs(key="logp", new_data=[0.1, 0.2])
    episode.validate()
    assert episode.get_extra_model_outputs("logp") == [0.1, 0.2]


def test_temporary_data_lasts_until_the_episode_is_finalized() -> None:
    episode = grown(1)
    episode.add_temporary_timestep_data("state", 1)
    episode.add_temporary_timestep_data("state", "two")
    assert episode.get_temporary_timestep_data("state") == [1, "two"]
    episode.finalize()
    for call in (
        lambda: episode.get_temporary_timestep_data("state"),
        lambda: episode.add_temporary_timestep_data("state", 3),
    ):
        with pytest.raises(ClosedError, match="temporary data"):
            call()


def test_setters_overwrite_what_indices_mean() -> None:
    episode = Episode(observations=[4, 5, 6, 7, 8, 9], actions=[0] * 5, rewards=[0.0] * 5, len_lookback_buffer=3)
    episode.set_observations(new_data=60, at_indices=-1, neg_index_as_lookback=True)
    episode.set_observations(new_data=[80, 90], at_indices=slice(1, 3))
    episode.set_rewards(new_data=[1.0, 2.0])
    episode.set_actions(new_data=[5, 6], at_indices=[-1, -5])
    assert episode.observations.data == [4, 5, 60, 7, 80, 90]
    assert episode.rewards.data == [0, 0, 0, 1, 2]
    episode.set_rewards(new_data=[], at_indices=[])
    episode.set_actions(new_data=np.zeros(0), at_indices=[])
    assert repr(episode.actions.data) == "[6, 0, 0, 0, 5]"  # no rows of floats make none of the others floats
    assert episode.rewards.data == [0, 0, 0, 1, 2]
    with pytest.raises(IndexError, match="cannot set 2 rows to 1 new ones"):
        episode.set_rewards(new_data=[1.0], at_indices=[0, 1])


@pytest.mark.parametrize(
    ("new_data", "at_indices"),
    [
        ([1.0], None),
        ([1.0, 2.0, 3.0], [0, 1]),
        ([1.0], [0, 1]),
        ([1.0, 2.0], slice(0, 3)),
        (1.0, 3),
        (1.0, -4),
        ([1.0, 2.0], [0, 3]),
        ("x", 0),
        ([1.0, "x"], [0, 1]),
        (np.zeros(2), 0),
    ],
)
@pytest.mark.parametrize("finalized", [False, True])
def test_refused_setter_changes_nothing(new_data: Any, at_indices: Any, finalized: bool) -> None:
    episode = grown(3).finalize() if finalized else grown(3)
    before = told(episode)
    with pytest.raises((IndexError, StructureError)):
        episode.set_rewards(new_data=new_data, at_indices=at_indices)
    assert told(episode) == before


def test_finalized_nest_is_set_and_every_item_must_be_in_its_space() -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2,), np.float32))
    data = {"a": np.array([0, 1, 2]), "b": np.zeros((3, 2), np.float32)}
    others: Any = {"actions": np.zeros(2), "rewards": np.zeros(2), "len_lookback_buffer": 0}
    episode = Episode(observations=data, observation_space=space, **others)
    episode.set_observations(new_data={"a": np.array([2, 2]), "b": np.ones((2, 2), np.float32)}, at_indices=slice(0, 2))
    assert episode.get_observations()["a"].tolist() == [2, 2, 2]
    before = told(episode)
    growing = Episode(observation_space=spaces.Discrete(2))
    growing.add_env_reset(0)
    growing.set_observations(new_data=7, at_indices=0)  # is not checked
    with pytest.raises(StructureError, match="is not in its space"):
        episode.set_observations(new_data={"a": np.array([0, 9]), "b": np.ones((2, 2), np.float32)}, at_indices=[0, 1])
    assert str(told(episode)) == str(before)


def test_duration_is_that_of_the_steps() -> None:
    episode = grown(0)
    assert episode.get_duration_s() == 0.0
    episode.add_env_step(1, 0, 0.0)
    first = episode.get_duration_s()
    episode.add_env_step(2, 0, 0.0)
    assert 0 < first < episode.get_duration_s()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda episode: pickle.loads(pickle.dumps(episode))])  # noqa: S301  # our own
def test_copy_of_an_episode_takes_infos_of_any_objects(copied: Any) -> None:
    episode = grown(2)
    chunk = episode.cut()
    chunk.add_env_step(3, 0, 1.0, {"seen": {1, 2}})
    again = copied(episode)
    again.concat_episode(copied(chunk))
    assert again.get_infos(-1) == {"seen": {1, 2}}


def test_buffer_takes_and_gives_rows() -> None:
    buffer = Episode(observations=[1, 2, 3], actions=[0, 0], rewards=[0, 0], len_lookback_buffer=1).observations
    buffer.append(4)
    buffer.extend([5, 6])
    buffer.pop()
    buffer.pop(1)
    assert (buffer.data, buffer.lookback) == ([1, 3, 4, 5], 1)
    assert (buffer + buffer).data == [1, 3, 4, 5, 3, 4, 5]
    assert buffer.__add__([7]).data == [1, 3, 4, 5, 7]
    assert (buffer + 1).data == [2, 4, 5, 6]
    assert (buffer + 1) != buffer
    assert buffer.__add__([]) == buffer
    buffer[0] = 30
    with pytest.raises(IndexError, match="cannot pop row 9"):
        buffer.pop(9)
    buffer.finalize()
    buffer.append(6)
    assert buffer.get().tolist() == [30, 4, 5, 6]
    with pytest.raises(ClosedError, match="cannot add to a finalized"):
        _ = buffer + 1
