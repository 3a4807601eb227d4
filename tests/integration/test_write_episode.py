"""`observer.write_episode` on a real server: the same windows as step by step, and whole episodes come back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from kinds import contents
from reading import Place, read

import reverb_writer as rw

pytestmark = contents

MODES = [mode.value for mode in rw.EndOfEpisode]


def episode(num_steps: int, first: int = 1, **options: Any) -> rw.Episode:
    """Return an episode whose observations are numbered from `first` on, with nests and model outputs."""
    numbers = np.arange(first, first + num_steps + 1)
    return rw.Episode(
        observations={"n": numbers, "v": np.repeat(numbers[:, None], 2, axis=1).astype(np.float32)},
        actions=numbers[:-1] * 10,
        rewards=numbers[:-1] / 2,
        extra_model_outputs={"logp": -numbers[:-1].astype(np.float32)},
        len_lookback_buffer=0,
        **{"terminated": True, **options},
    )


def rows(nest: Any) -> list[Any]:
    return [np.asarray(leaf).tolist() for leaf in tree.flatten(nest)]


@pytest.mark.parametrize("mode", MODES)
def test_items_are_the_windows_of_the_episode(place: Place, mode: str) -> None:
    spec = rw.WindowSpec(4, 3, mode)
    episodes = [episode(n, first=10 * n) for n in (7, 1, 3, 9)]
    with rw.TrajectoryObserver(place.client, "a", 4, 3, end_of_episode=mode) as observer:
        for each in episodes:
            observer.write_episode(each)
    expected = [rows(window) for each in episodes for window in each.windows(spec)]
    assert [rows(item.data) for item in read(place.client, "a")] == expected


def test_whole_episodes_come_back(place: Place) -> None:
    episodes = [episode(5), episode(150, truncated=True, terminated=False), episode(1, terminated=False).cut()]
    episodes[2].add_env_step(
        {"n": 3, "v": np.zeros(2, np.float32)}, 7, 0.5, extra_model_outputs={"logp": np.float32(1)}
    )
    with rw.EpisodeObserver(place.client, "a", 200) as observer:
        for each in episodes:
            observer.write_episode(each)
    like = episodes[0].steps()
    for before, item in zip(episodes, read(place.client, "a"), strict=True):
        after = rw.Episode.from_steps(item.data, like=like)
        assert rows(after.get_observations()) == rows(before.observations.to_arrays())
        assert rows([after.get_actions(), after.get_rewards()]) == rows(
            [before.actions.to_arrays(), before.rewards.to_arrays()]
        )
        assert rows(after.get_extra_model_outputs("logp")) == rows(before.extra_model_outputs["logp"].to_arrays())
        assert (after.is_terminated, after.is_truncated) == (before.is_terminated, before.is_truncated)


def test_refused_episode_does_not_end_a_stream_that_spans_episodes(place: Place) -> None:
    with rw.SequenceObserver(place.client, "a", 4, 4) as observer:
        observer.write_episode(episode(2, first=1))
        with pytest.raises(rw.errors.StructureError, match="observation/n"):
            observer.write_episode(rw.Episode(observations=[0.5, 1], actions=[1], rewards=[1.0], len_lookback_buffer=0))
        observer.write_episode(episode(4, first=11))
    numbers = [item.data[5].tolist() for item in read(place.client, "a")]
    assert numbers == [[1, 2, 3, 11], [12, 13, 14, 15]]


def test_refused_episode_changes_nothing(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5) as observer:
        observer.write_episode(episode(3))
        with pytest.raises(rw.errors.SpecError, match="the episode has 6 steps, boundary"):
            observer.write_episode(episode(5))
        with pytest.raises(rw.errors.StructureError, match="observation/n"):
            observer.write_episode(rw.Episode(observations=[0.5, 1], actions=[1], rewards=[1.0], len_lookback_buffer=0))
        with pytest.raises(rw.errors.IncompleteError, match="an episode without a step"):
            observer.write_episode(rw.Episode())
        (step, _) = zip(*(leaf[:2] for leaf in tree.flatten(episode(1).steps())), strict=True)
        observer(tree.unflatten_as(episode(1).steps(), step))
        with pytest.raises(rw.errors.SpecError, match=r"in the middle of an episode, at step 1. Call `reset` first"):
            observer.write_episode(episode(1))
        observer.reset(discard=True)
        observer.write_episode(episode(4))
        stats = observer.stats()
    assert (stats.items, stats.episodes) == (2, 3)
    assert [len(item.data[0]) for item in read(place.client, "a")] == [4, 5]


def test_long_episode_is_bypassed_and_counted(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5, bypass_partial_episodes=True) as observer:
        for n in (9, 2):
            observer.write_episode(episode(n))
        assert observer.stats().dropped_steps == {"overflow": 10}
    assert [len(item.data[0]) for item in read(place.client, "a")] == [3]


def test_time_out_in_mid_episode_leaves_no_part_of_it(replay_server: Any) -> None:
    server = replay_server(rw.TableConfig("q", 3, "fifo", "fifo", max_times_sampled=1, rate_limiter=rw.Queue(3)))
    with rw.Client(server.address, timeout_s=60) as client:
        observer = rw.TrajectoryObserver(client, "q", 2, max_in_flight_items=4, timeout_s=0.5)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.write_episode(episode(4000))
        assert observer.stats().episodes == 1
        with pytest.raises(rw.errors.ReplayTimeoutError):  # and not that it is in the middle of one
            observer.write_episode(episode(1))
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close()
