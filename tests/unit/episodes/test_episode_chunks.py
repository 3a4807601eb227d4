"""Chunks of an episode: cut, concatenated, sliced, as by RLlib 2.35, its faults aside; and its steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.episodes import Episode, InfiniteLookbackBuffer
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL


def five_steps(**options: Any) -> Episode:
    """Return observations 0..5, actions 1..5 and rewards 1..5, nothing of it look-back."""
    return Episode(
        "x",
        observations=[0, 1, 2, 3, 4, 5],
        actions=[1, 2, 3, 4, 5],
        rewards=[1.0, 2.0, 3.0, 4.0, 5.0],
        **{"len_lookback_buffer": 0, **options},
    )


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


def test_cut_counts_from_the_end_of_columns_whose_look_backs_differ() -> None:
    episode = Episode(
        "x",
        observations=InfiniteLookbackBuffer([*range(-3, 4)], lookback=3),
        infos=[{}] * 4,
        actions=[1, 2, 3],
        rewards=[1.0, 2.0, 3.0],
        len_lookback_buffer=0,
    )
    assert [episode.cut(number).observations.data for number in (0, 2)] == [[3], [1, 2, 3]]
    ended = five_steps().cut(5)
    ended.add_env_step(6, 6, 6.0)
    ended.set_extra_model_outputs(key="logp", new_data=[60])  # without look-back
    chunk = ended.cut(2)
    assert (chunk.get_actions([-2, -1]), chunk.get_extra_model_outputs("logp", -1)) == ([5, 6], 60)


def test_slice_of_a_finalized_episode_is_its_own() -> None:
    episode = five_steps().finalize()
    part = episode[1:3]
    assert part.is_finalized
    part.set_rewards(new_data=[8.0, 9.0])
    assert episode.get_rewards().tolist() == [1, 2, 3, 4, 5]


def test_only_slices_forward_and_a_look_back_of_0_or_more_are_there() -> None:
    with pytest.raises(SpecError, match="`len_lookback_buffer` must be >= 0, got -1"):
        five_steps().cut(-1)
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


def test_chunk_is_added_to_columns_that_were_given_as_arrays() -> None:
    episode = Episode(
        observations=np.arange(6),
        actions=np.arange(1, 6),
        rewards=[1.0] * 5,
        extra_model_outputs={"v": np.ones(5)},
        len_lookback_buffer=0,
    )
    chunk = episode.cut()
    chunk.add_env_step(6, 6, 6.0, extra_model_outputs={"v": 2.0})
    episode.concat_episode(chunk)
    assert (episode.get_observations().tolist(), episode.get_actions(-1), episode.t) == ([*range(7)], 6, 6)
    assert (episode.get_rewards(-1), episode.get_extra_model_outputs("v", -1)) == (6.0, 2.0)


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
        (following(observations=[5, 6], actions=[[6, 6]]), StructureError, "added rows: its leaves"),
        (Episode("x", t_started=5), SpecError, "must start with the last observation"),
    ):
        with pytest.raises(error, match=message):
            episode.concat_episode(chunk)
        assert (episode.observations.data, episode.actions.data, episode.t) == ([*range(6)], [*range(1, 6)], 5)
        assert len(episode.infos) == 6
    episode.concat_episode(following())
    assert episode.t == 6


def whole_episode(**options: Any) -> rw.Episode:
    actions = np.array([[1, 1], [2, 2], [3, 3]], np.float32)
    data: Any = {"observations": [10, 11, 12, 13], "actions": actions, "rewards": [0.5, 1.5, 2.5], "terminated": True}
    return rw.Episode(**{"id_": "x", "len_lookback_buffer": 0, **data, **options})


def test_steps_are_rows_in_single_precision_and_kinds_say_how_they_ended() -> None:
    steps = whole_episode().steps()
    assert {name: (str(leaf.dtype), leaf.tolist()) for name, leaf in steps.items()} == {
        "observation": ("int64", [10, 11, 12, 13]),
        "action": ("float32", [[1, 1], [2, 2], [3, 3], [0, 0]]),
        "reward": ("float32", [0.5, 1.5, 2.5, 0]),
    }
    assert whole_episode().kinds().tolist() == [FIRST | ACTION, ACTION, ACTION, LAST | TERMINAL]
    assert whole_episode(terminated=False, truncated=True).kinds().tolist() == [FIRST | ACTION, ACTION, ACTION, LAST]
    assert whole_episode(terminated=False).kinds().tolist() == [FIRST | ACTION, ACTION, ACTION, 0]  # cut
    assert whole_episode(t_started=2).kinds().tolist() == [ACTION, ACTION, ACTION, LAST | TERMINAL]


def test_model_outputs_are_written_too_and_strings_as_bytes() -> None:
    steps = whole_episode(extra_model_outputs={"logp": [1, 2, 3]}, actions=["a", "b", "c"]).steps()
    assert steps["extra_model_outputs"]["logp"].tolist() == [1, 2, 3, 0]
    assert steps["action"].tolist() == [b"a", b"b", b"c", b""]


def test_episode_without_a_step_has_no_steps() -> None:
    started = rw.Episode()
    started.add_env_reset(0)
    with pytest.raises(IncompleteError, match="an episode without a step has nothing to write"):
        started.steps()
    with pytest.raises(IncompleteError, match="an episode without a step has nothing to write"):
        started.kinds()


def columns_of(episode: rw.Episode) -> list[Any]:
    columns = episode.get_observations(), episode.get_actions(), episode.get_rewards()
    return [*(np.asarray(column).tolist() for column in columns), episode.is_terminated, episode.is_truncated]


WHOLE = [[10, 11, 12, 13], [[1, 1], [2, 2], [3, 3]], [0.5, 1.5, 2.5]]


def flagged(episode: rw.Episode) -> dict[str, Any]:
    """Return the rows of an episode with flags instead of kinds, as `record` passes them to a function."""
    last = np.arange(4) == 3
    flags = {"is_first": np.arange(4) == 0, "is_last": last, "discount": np.array([1, 1, 0, 0], np.float32)}
    return {**episode.steps(), **flags, "terminated": last, "truncated": ~last & last}


def test_steps_in_several_layouts_are_an_episode() -> None:
    episode = whole_episode()
    steps = flagged(episode)
    rlds = {key: steps[key] for key in ("observation", "action", "reward", "discount", "is_first", "is_last")}
    types = np.array([0, 1, 1, 2], np.int32)
    trajectory = rw.Trajectory(
        types, steps["observation"], steps["action"], (), np.roll(types, -1), steps["reward"], steps["discount"]
    )
    for data in (steps, {**rlds, "is_terminal": steps["is_last"]}, trajectory):
        assert columns_of(rw.Episode.from_steps(data)) == [*WHOLE, True, False]
    assert columns_of(rw.Episode.from_steps(episode.steps(), kinds=episode.kinds())) == [*WHOLE, True, False]
    assert columns_of(rw.Episode.from_steps({**rlds, "is_terminal": np.zeros(4)})) == [*WHOLE, False, True]
    cut_off = trajectory._replace(discount=np.array([1, 1, 1, 0], np.float32))
    assert columns_of(rw.Episode.from_steps(cut_off)) == [*WHOLE, False, True]


def test_a_cut_chunk_comes_back_as_one_that_goes_on() -> None:
    chunk = whole_episode(terminated=False, t_started=2)
    again = rw.Episode.from_steps(chunk.steps(), kinds=chunk.kinds(), t_started=2)
    assert (columns_of(again), again.t) == ([*WHOLE, False, False], 5)


NUMBERS = np.arange(3.0)


def test_a_list_is_a_nest_of_leaves() -> None:
    # Three leaves and T = 2 rows more: lists of rows and lists of leaves have the same sizes.
    steps = {"observation": [NUMBERS, NUMBERS + 10, NUMBERS + 20], "action": [NUMBERS + 30, NUMBERS + 40]}
    kinds = [FIRST | ACTION, ACTION, LAST]
    episode = rw.Episode.from_steps({**steps, "reward": NUMBERS}, kinds=kinds)
    assert episode.get_observations(1) == [1, 11, 21]
    assert episode.get_actions(1) == [31, 41]
    again = rw.Episode.from_steps(episode.steps(), kinds=episode.kinds())
    assert [leaf.tolist() for leaf in again.get_observations()] == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert rw.Episode.from_state(episode.get_state()).get_actions(0) == [30, 40]


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_a_last_row_with_an_action_is_not_lost(ending: str) -> None:
    rows = {"observation": NUMBERS, "action": NUMBERS + 30, "reward": NUMBERS + 1}
    flags = {name: (np.arange(3) == 2) & (name == ending) for name in ("terminated", "truncated")}
    with pytest.raises(StructureError, match="Pass `last_row='action'`"):  # the names do not show whose row it is
        rw.Episode.from_steps({**rows, **flags})
    kinds = np.array([FIRST | ACTION, ACTION, LAST | ACTION | TERMINAL * (ending == "terminated")])
    with pytest.raises(StructureError, match="the last row of the episode has an action"):
        rw.Episode.from_steps(rows, kinds=kinds)
    if ending == "terminated":
        for episode in (
            rw.Episode.from_steps({**rows, **flags}, last_row="action"),
            rw.Episode.from_steps(rows, kinds=kinds, last_row="action"),
        ):
            assert columns_of(episode) == [[0, 1, 2, 2], [30, 31, 32], [1, 2, 3], True, False]
    else:  # the value of its last observation is not known
        with pytest.raises(StructureError, match="the last row of the episode has an action"):
            rw.Episode.from_steps({**rows, **flags}, last_row="action")
    episode = rw.Episode.from_steps(rows, kinds=kinds, last_row="boundary")
    assert columns_of(episode)[:3] == [[0, 1, 2], [30, 31], [1, 2]]
    assert (episode.is_terminated, episode.is_truncated) == (ending == "terminated", ending == "truncated")


def test_rows_of_two_episodes_are_refused() -> None:
    two = {key: np.concatenate([leaf, leaf]) for key, leaf in flagged(whole_episode()).items()}
    with pytest.raises(StructureError, match="rows of 2 episodes, and an `Episode` holds one"):
        rw.Episode.from_steps(two)
    padded = [FIRST | ACTION, LAST, PADDING, FIRST | ACTION, LAST]
    rows = {name: np.zeros(5) for name in ("observation", "action", "reward")}
    with pytest.raises(StructureError, match="rows of an episode follow padding"):
        rw.Episode.from_steps(rows, kinds=padded)


def test_policy_infos_come_back_as_model_outputs() -> None:
    types, discounts = np.array([0, 1, 1, 2], np.int32), np.array([1, 1, 1, 1], np.float32)
    policy_info = {"logp": np.arange(4)}
    trajectory = rw.Trajectory(types, np.zeros(4), np.zeros(4), policy_info, np.roll(types, -1), np.zeros(4), discounts)
    found = rw.Episode.from_steps(trajectory).get_extra_model_outputs("policy_info")
    assert found["logp"].tolist() == [0, 1, 2]
    again = rw.Episode.from_steps(trajectory._replace(policy_info=np.arange(4)))
    assert again.get_extra_model_outputs("policy_info").tolist() == [0, 1, 2]
    assert not rw.Episode.from_steps(trajectory._replace(policy_info=())).extra_model_outputs


def test_extras_of_recorded_rows_are_model_outputs() -> None:
    steps = flagged(whole_episode())
    episode = rw.Episode.from_steps({**steps, "extras": {"logp": np.arange(4)}})
    assert episode.get_extra_model_outputs("logp").tolist() == [0, 1, 2]
    episode = rw.Episode.from_steps({**steps, "extras": np.arange(4)})
    assert episode.get_extra_model_outputs("extras").tolist() == [0, 1, 2]


def test_steps_that_are_no_episode_are_refused() -> None:
    steps = whole_episode().steps()
    with pytest.raises(StructureError, match="missing: action, reward"):
        rw.Episode.from_steps({"observation": np.zeros(3)})
    with pytest.raises(StructureError, match="two rows or more"):
        rw.Episode.from_steps({key: leaf[:1] for key, leaf in flagged(whole_episode()).items()})
    with pytest.raises(StructureError, match=r"Pass their kinds: `kinds=episode.kinds\(\)`"):
        rw.Episode.from_steps(steps)
    with pytest.raises(StructureError, match=r"`kinds` must be integers \[4\], one per row, got uint8 \[3\]"):
        rw.Episode.from_steps(steps, kinds=np.zeros(3, np.uint8))
    with pytest.raises(SpecError, match="`last_row` must be"):
        rw.Episode.from_steps(steps, kinds=whole_episode().kinds(), last_row="end")  # type: ignore[arg-type]


def test_bfloat16_is_kept() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    episode = Episode()
    episode.add_env_reset(observation=np.array([1.5, 2], bfloat16))
    episode.add_env_step(observation=np.array([2.5, 3], bfloat16), action=bfloat16(0.5), reward=1.0)
    assert episode.steps()["observation"].dtype == bfloat16
    again = Episode.from_steps(episode.steps(), kinds=episode.kinds())
    assert (again.get_observations().dtype, again.get_observations().tolist()) == (bfloat16, [[1.5, 2], [2.5, 3]])
    assert again.get_actions().tolist() == [0.5]


def test_rllibs_newer_names_are_there_beside_the_older_ones() -> None:
    episode = Episode()
    assert (episode.is_reset, episode.is_numpy, episode.is_finalized) == (False, False, False)
    episode.add_env_reset(0)
    assert episode.is_reset
    episode.add_env_step(1, 2, 0.5)
    assert episode.to_numpy() is episode
    assert (episode.is_reset, episode.is_numpy, episode.is_finalized) == (True, True, True)
    assert isinstance(episode.get_observations(), np.ndarray)
    assert episode.cut().is_reset


def test_custom_data_goes_on_with_the_chunks_and_is_not_shared() -> None:
    episode = five_steps()
    episode.custom_data["marks"] = [1]
    chunk, part = episode.cut(), episode[:2]
    chunk.custom_data["marks"].append(2)
    chunk.custom_data["more"] = True
    assert (episode.custom_data, part.custom_data) == ({"marks": [1]}, {"marks": [1]})
    episode.to_numpy()
    assert episode.custom_data == {"marks": [1]}
    whole = part[:]
    whole.concat_episode(episode[2:])
    assert whole.custom_data == {"marks": [1]}
    episode = five_steps()
    episode.custom_data = {"marks": [1], "own": 0}
    episode.concat_episode(chunk)
    assert episode.custom_data == {"marks": [1, 2], "own": 0, "more": True}
