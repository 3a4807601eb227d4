"""`EpisodeObserver`, `write_episode` and `extend` on a real server: whole episodes, and many steps in one call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tree
from episodes import feed
from kinds import contents
from reading import Place, Serve, read

import reverb_writer as rw
from reverb_writer.rows import ACTION, LAST

pytestmark = contents


def test_overflow_is_refused_once_its_steps_are_checked_and_the_next_episode_is_written(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 3) as observer:
        for numbers in (range(1, 6), range(6, 10)):
            for i, number in enumerate(numbers):
                overflow = pytest.raises(ValueError, match="longer than max_sequence_length=3 steps, boundary step")
                with overflow if i == 3 else contextlib.nullcontext():
                    observer({"n": np.int64(number)}, end_of_episode=number == numbers[-1])
        feed(observer, [3], first=10)
        stats = observer.stats()
        assert (stats.steps, stats.episodes, stats.dropped_steps) == (12, 3, {"overflow": 9})
    assert place.column() == [[10, 11, 12]]
    with rw.EpisodeObserver(place.client, "a", 1, bypass_partial_episodes=True) as observer:
        for number, options in ((1, {}), (2, {"end_of_episode": True})):
            observer({"n": np.int64(number)})
            for _ in range(2):
                with pytest.raises(rw.errors.StructureError, match=f"step {number}, leaf `n`"):
                    observer({"n": 0.5}, **options)
        observer({"n": np.int64(3)}, end_of_episode=True)
        assert observer.stats().dropped_steps == {"overflow": 3}


def test_priority_of_episodes_can_be_changed(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5, priority=1) as observer:
        observer.update_priority(2)
        feed(observer, [1])
        observer({"n": np.int64(2)})
        observer.update_priority(3.5)
        for bad in (-1, float("nan"), lambda episode: episode["n"].sum()):
            with pytest.raises(rw.errors.SpecError, match="`priority` must be a finite number >= 0"):
                observer.update_priority(bad)
        observer({"n": np.int64(3)}, end_of_episode=True)
        observer.update_priority(9)
        feed(observer, [2], first=4)
        observer.update_priority(7)
        feed(observer, [1], first=6)
        observer.close()
        observer.open()
        feed(observer, [1], first=7)
    assert [(item.data[0].tolist(), item.info.priority) for item in read(place.client, "a")] == [
        ([1], 2),
        ([2, 3], 3.5),
        ([4, 5], 9),
        ([6], 7),
        ([7], 7),
    ]


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


def test_refused_episode_does_not_end_a_stream_that_spans_episodes(place: Place) -> None:
    with rw.SequenceObserver(place.client, "a", 4, 4) as observer:
        observer.write_episode(episode(2, first=1))
        with pytest.raises(rw.errors.StructureError, match="observation/n"):
            observer.write_episode(OTHER)
        observer.write_episode(episode(4, first=11))
    numbers = [item.data[2].tolist() for item in read(place.client, "a")]
    assert numbers == [[1, 2, 3, 11], [12, 13, 14, 15]]


OTHER = rw.Episode(observations=[0.5, 1], actions=[1], rewards=[1.0], len_lookback_buffer=0)


def test_refused_episode_changes_nothing(place: Place) -> None:
    with rw.EpisodeObserver(place.client, "a", 5) as observer:
        observer.write_episode(episode(3))
        with pytest.raises(rw.errors.SpecError, match="the episode has 6 steps, boundary"):
            observer.write_episode(episode(5))
        with pytest.raises(rw.errors.StructureError, match="observation/n"):
            observer.write_episode(OTHER)
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


def test_time_out_in_mid_episode_leaves_no_part_of_it(serve: Serve) -> None:
    client = serve(rw.TableConfig.queue("q", 3))
    observer = rw.TrajectoryObserver(client, "q", 2, max_in_flight_items=4, timeout_s=0.5)
    for each in (episode(4000), episode(1)):  # and not that the second one comes in the middle of an episode
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.write_episode(each)
        assert observer.stats().episodes == 1
    with pytest.raises(rw.errors.ReplayTimeoutError):
        observer.close()


def feed_at_once(observer: Any, lengths: Sequence[int]) -> None:
    first = 1
    for n in lengths:
        middle = n // 2
        for numbers in (range(first, first + middle), range(first + middle, first + n - 1)):
            if numbers:
                observer.extend({"n": np.array(numbers, np.int64)})
        observer({"n": np.int64(first + n - 1)}, end_of_episode=True)
        first += n


def feed_as_episodes(observer: Any, lengths: Sequence[int]) -> None:
    for n in lengths:
        observer.write_episode(episode(n - 1))


WAYS: dict[str, Callable[..., None]] = {"call": feed, "extend": feed_at_once, "write_episode": feed_as_episodes}


@pytest.mark.parametrize("way", WAYS)
def test_overflow_is_bypassed_counted_and_logged(place: Place, caplog: pytest.LogCaptureFixture, way: str) -> None:
    with rw.EpisodeObserver(place.client, "a", 3, bypass_partial_episodes=True) as observer:
        WAYS[way](observer, [5, 3, 4, 2])
        assert observer.stats().dropped_steps == {"overflow": 9}
    assert [len(item.data[0]) for item in read(place.client, "a")] == [3, 2]
    assert len([record for record in caplog.records if "max_sequence_length=3" in record.message]) == 2


def test_priority_functions_and_strings_and_numbers_go_one_by_one(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "a", 2, priority=lambda window: float(window["n"].sum())) as observer:
        feed_at_once(observer, (4,))
    assert [item.info.priority for item in read(place.client, "a")] == [3, 5, 7]
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        observer.extend({"text": np.array([b"x", b"yz"], object)})
    assert place.column("b") == [[b"x", b"yz"]]


def test_other_steps_are_refused_as_by_a_call_before_any_is_written(place: Place) -> None:
    with rw.TrajectoryObserver(place.client, "b", 2) as observer:
        for wrong in ({"n": np.arange(3), "x": np.arange(2)}, {"n": np.int64(1), "x": np.arange(2)}, {}):
            with pytest.raises(rw.errors.StructureError, match=r"must be \[T, ...\] with one T for all, got shapes"):
                observer.extend(wrong)
        assert observer.stats().steps == 0
        observer.extend({"n": np.arange(2)})
        with pytest.raises(rw.errors.StructureError, match="step 2, leaf `n`: float32"):
            observer.extend({"n": np.zeros(2, np.float32)})
        observer.extend({"n": np.arange(2, 3)})
    assert place.column("b") == [[0, 1], [1, 2]]


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


def test_extend_is_bounded_by_episodes_in_flight_and_not_by_their_rows(serve: Serve) -> None:
    """Two items in the queue and three in flight; the rows before the last of them need only space."""
    client = serve(rw.TableConfig.queue("queue", 2))
    kinds = np.full(3000, ACTION, np.uint8)
    kinds[-1] |= LAST
    with rw.EpisodeObserver(
        client, "queue", 3000, max_in_flight_items=3, on_block="raise", max_delay_s=0.01
    ) as observer:
        for number in itertools.count():
            with contextlib.suppress(rw.errors.ReplayTimeoutError):
                observer.extend({"n": np.full(3000, number)}, kinds)
                continue
            break
        num_items = observer.stats().items
        assert 3 <= num_items <= 5
        assert observer.num_steps == 3000 * num_items
        got = [sample.data["n"] for sample in client.sample("queue", num_items)]
        observer.extend({"n": np.full(3000, 7)}, kinds)
        observer.flush()
        assert observer.stats().items == num_items + 1
    assert [values.tolist() for values in got] == [[number] * 3000 for number in range(num_items)]
