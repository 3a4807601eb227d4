"""`observer.write_episode` and `extend`: many steps in one call are what they are one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from kinds import contents
from reading import Place, read

import reverb_writer as rw
from reverb_writer.leaves import padded_rows

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


def windows(of: rw.Episode, spec: rw.WindowSpec) -> list[Any]:
    """Return the rows of each window of an episode, padded with zeros."""
    padded = [padded_rows(leaf, 40) for leaf in tree.flatten(of.steps())]
    return [rows([leaf[start:stop] for leaf in padded]) for start, stop in spec.windows(len(of) + 1)]


@pytest.mark.parametrize("mode", MODES)
def test_items_are_the_windows_of_the_episode(place: Place, mode: str) -> None:
    spec = rw.WindowSpec(4, 3, mode)
    episodes = [episode(n, first=10 * n) for n in (7, 1, 3, 9)]
    with rw.TrajectoryObserver(place.client, "a", 4, 3, end_of_episode=mode) as observer:
        for each in episodes:
            observer.write_episode(each)
    expected = [window for each in episodes for window in windows(each, spec)]
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
        after = rw.Episode.from_steps(tree.unflatten_as(like, tree.flatten(item.data)))
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


# `extend`.


def feed_at_once(observer: Any, lengths: tuple[int, ...]) -> None:
    first = 1
    for n in lengths:
        middle = n // 2
        for numbers in (range(first, first + middle), range(first + middle, first + n - 1)):
            if numbers:
                observer.extend({"n": np.array(numbers, np.int64)})
        observer({"n": np.int64(first + n - 1)}, end_of_episode=True)
        first += n


def test_priority_functions_and_strings_and_numbers_go_one_by_one(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2, priority=lambda window: float(window["n"].sum())) as observer:
        feed_at_once(observer, (4,))
    assert [item.info.priority for item in read(place.client, "a")] == [3, 5, 7]
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        observer.extend({"text": np.array([b"x", b"yz"], object)})
    assert place.column("b") == [[b"x", b"yz"]]


def test_too_long_an_episode_and_other_steps_are_refused_as_by_a_call(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        feed_at_once(observer, (6, 2))
        assert observer.stats().dropped_steps == {"overflow": 6}
    assert place.column("a") == [[7, 8]]
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        observer.extend({"n": np.arange(2)})
        with pytest.raises(rw.errors.StructureError, match="step 2, leaf `n`: float32"):
            observer.extend({"n": np.zeros(2, np.float32)})
        observer.extend({"n": np.arange(2, 3)})
    assert place.column("b") == [[0, 1], [1, 2]]


@pytest.mark.parametrize("steps", [{"n": np.arange(3), "x": np.arange(2)}, {"n": np.int64(1), "x": np.arange(2)}, {}])
def test_steps_of_different_lengths_are_refused_before_any_is_written(place: Place, steps: Any) -> None:
    with rw.TrajectoryObserver(place.client, "a", 1) as observer:
        with pytest.raises(rw.errors.StructureError, match=r"leaves must be \[T, ...\] with one T for all, got shapes"):
            observer.extend(steps)
        assert observer.stats().steps == 0
        observer({"n": 1})
    assert place.column() == [[1]]


def test_no_steps_are_written_at_any_time_but_to_a_closed_observer(place: Place) -> None:
    """Also where the layout is known and no writer is there, as after `open`."""
    none = {"n": np.zeros(0, np.int64)}
    observer = rw.TrajectoryObserver(place.client, "a", 1)
    observer.extend(none)
    observer({"n": np.int64(1)}, end_of_episode=True)
    observer.extend(none)
    observer.close()
    with pytest.raises(rw.errors.ClosedError, match=r"the observer is closed. Call `open\(\)`"):
        observer.extend(none)
    observer.open()
    observer.extend(none)
    observer({"n": np.int64(2)}, end_of_episode=True)
    observer.close()
    assert place.column() == [[1], [2]]
