"""An episode as the steps that observers write, and steps of several kinds as an episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import IncompleteError, StructureError


def episode(**options: Any) -> rw.Episode:
    return rw.Episode(
        **{
            "id_": "x",
            "observations": [10, 11, 12, 13],
            "actions": np.array([[1, 1], [2, 2], [3, 3]], np.float32),
            "rewards": [0.5, 1.5, 2.5],
            "len_lookback_buffer": 0,
            "terminated": True,
            **options,
        }
    )


def test_steps_have_the_transition_beside_its_observation_and_the_end_in_the_boundary_step() -> None:
    steps = episode().steps()
    assert {key: leaf.tolist() for key, leaf in steps.items()} == {
        "observation": [10, 11, 12, 13],
        "action": [[1, 1], [2, 2], [3, 3], [0, 0]],
        "reward": [0.5, 1.5, 2.5, 0],
        "discount": [1, 1, 0, 0],
        "is_first": [True, False, False, False],
        "is_last": [False, False, False, True],
        "terminated": [False, False, False, True],
        "truncated": [False] * 4,
    }
    dtypes = {key: str(leaf.dtype) for key, leaf in steps.items()}
    assert (dtypes["reward"], dtypes["discount"], dtypes["action"]) == ("float32", "float32", "float32")


def test_truncated_episode_has_a_discount_of_1() -> None:
    steps = episode(terminated=False, truncated=True).steps()
    assert (steps["discount"].tolist(), steps["truncated"].tolist()) == ([1, 1, 1, 0], [False, False, False, True])


def test_chunk_that_was_cut_has_no_flags_and_no_look_back() -> None:
    chunk = episode(terminated=False).cut(2)
    chunk.add_env_step(14, np.array([4, 4], np.float32), 3.5)
    steps = chunk.steps()
    assert steps["observation"].tolist() == [13, 14]
    assert not any(steps[flag].any() for flag in ("is_first", "is_last", "terminated", "truncated"))


def test_model_outputs_are_written_too_and_strings_as_bytes() -> None:
    steps = episode(extra_model_outputs={"logp": [1, 2, 3]}, actions=["a", "b", "c"]).steps()
    assert steps["extra_model_outputs"]["logp"].tolist() == [1, 2, 3, 0]
    assert steps["action"].tolist() == [b"a", b"b", b"c", b""]


def test_episode_without_a_step_has_no_steps() -> None:
    started = rw.Episode()
    started.add_env_reset(0)
    for call in (started.steps, lambda: started.windows(rw.WindowSpec(2))):
        with pytest.raises(IncompleteError, match="an episode without a step has nothing to write"):
            call()


def test_windows_are_padded_with_zeros() -> None:
    first, second = episode().windows(rw.WindowSpec(3, 3, "cover"))
    assert (first["observation"].tolist(), second["observation"].tolist()) == ([10, 11, 12], [13, 0, 0])
    assert second["is_last"].tolist() == [True, False, False]
    assert [window["observation"].shape for window in episode().windows(rw.WindowSpec.whole_episode())] == [(4,)]
    assert episode().windows(rw.WindowSpec(9)) == []


def told(episode: rw.Episode) -> list[Any]:
    columns = episode.get_observations(), episode.get_actions(), episode.get_rewards()
    return [*(np.asarray(column).tolist() for column in columns), episode.is_terminated, episode.is_truncated]


WHOLE = [[10, 11, 12, 13], [[1, 1], [2, 2], [3, 3]], [0.5, 1.5, 2.5]]


def test_steps_in_several_layouts_are_an_episode() -> None:
    steps = episode().steps()
    columns = [steps[name] for name in sorted(steps)]
    rlds = {key: steps[key] for key in ("observation", "action", "reward", "discount", "is_first", "is_last")}
    types = np.array([0, 1, 1, 2], np.int32)
    trajectory = rw.Trajectory(
        types, steps["observation"], steps["action"], (), np.roll(types, -1), steps["reward"], steps["discount"]
    )
    for data in (steps, tuple(columns), {**rlds, "is_terminal": steps["is_last"]}, trajectory):
        assert told(rw.Episode.from_steps(data)) == [*WHOLE, True, False]
    assert told(rw.Episode.from_steps({**rlds, "is_terminal": np.zeros(4)})) == [*WHOLE, False, True]
    cut_off = trajectory._replace(discount=np.array([1, 1, 1, 0], np.float32))
    assert told(rw.Episode.from_steps(cut_off)) == [*WHOLE, False, True]


def test_columns_get_the_structure_of_a_step() -> None:
    nested = episode(observations=[{"a": n, "b": (n,)} for n in range(4)])
    steps = nested.steps()
    columns = [steps[name] for name in ("action", "discount", "is_first", "is_last")]
    columns += [steps["observation"]["a"], steps["observation"]["b"][0]]
    columns += [steps[name] for name in ("reward", "terminated", "truncated")]
    again = rw.Episode.from_steps(columns, like=steps, id_="x", t_started=7)
    assert again.get_observations(2) == {"a": 2, "b": (2,)}
    assert (again.id_, again.t_started, again.t, again.is_finalized) == ("x", 7, 10, True)
    with pytest.raises(StructureError, match=r"9 columns do not make steps of .*Give a step as `like`"):
        rw.Episode.from_steps(columns)


def test_model_outputs_and_policy_infos_come_back() -> None:
    steps = episode(extra_model_outputs={"logp": [1, 2, 3]}).steps()
    assert rw.Episode.from_steps(steps).get_extra_model_outputs("logp").tolist() == [1, 2, 3]
    types = np.array([0, 1, 1, 2], np.int32)
    trajectory = rw.Trajectory(types, np.zeros(4), np.zeros(4), {"logp": np.arange(4)}, types, np.zeros(4), np.ones(4))
    policy_info = rw.Episode.from_steps(trajectory).get_extra_model_outputs("policy_info")
    assert policy_info["logp"].tolist() == [0, 1, 2]
    again = rw.Episode.from_steps(trajectory._replace(policy_info=np.arange(4)))
    assert again.get_extra_model_outputs("policy_info").tolist() == [0, 1, 2]
    assert not rw.Episode.from_steps(trajectory._replace(policy_info=())).extra_model_outputs


def test_padding_is_left_out_and_what_is_no_episode_is_refused() -> None:
    (padded,) = episode().windows(rw.WindowSpec(9, end_of_episode="pad"))
    assert told(rw.Episode.from_steps(padded)) == [*WHOLE, True, False]
    with pytest.raises(StructureError, match="missing: action, reward"):
        rw.Episode.from_steps({"observation": np.zeros(3)})
    with pytest.raises(StructureError, match="two rows or more"):
        rw.Episode.from_steps({key: leaf[:1] for key, leaf in episode().steps().items()})
