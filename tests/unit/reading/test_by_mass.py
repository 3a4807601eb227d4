"""Whose samples come next when servers are sampled as one: each draw is given, and its outcome worked by hand."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from waiting import eventually

import reverb_writer as rw
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.shards.by_mass import ByMass

UNIFORM = rw.TableConfig("replay", 100)
PRIORITIZED = rw.TableConfig("replay", 100, rw.Prioritized(1.0))
READ_ONCE = rw.TableConfig("replay", 100, max_times_sampled=1)
NOW = 1000.0


class Draws:
    """Draws what it is given, in the place of a random generator."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[float]]] = []  # samples and shares of each draw
        self.next: list[list[int]] = []

    def multinomial(self, num_samples: int, shares: Sequence[float]) -> npt.NDArray[np.int64]:
        self.seen.append((num_samples, [*shares]))
        return np.array(self.next.pop(0))

    def permutation(self, num_samples: int) -> npt.NDArray[np.int64]:
        return np.arange(num_samples)[::-1]


def take(mixer: ByMass, num_samples: int) -> Any:
    """Take the samples that have arrived."""
    return mixer.take(num_samples, NOW, any_server=True)


@contextlib.contextmanager
def mixed(
    monkeypatch: pytest.MonkeyPatch, config: rw.TableConfig, *sizes: int, num_waiting: int = 4
) -> Iterator[tuple[ByMass, Any, Draws]]:
    """Mix servers with so many items of priority 1 in batches of 4; some samples of each have arrived."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(rw.LocalServer([config])) for _ in sizes]
        client = stack.enter_context(rw.Client([server.address for server in servers]))
        for shard, size in zip(client.shards, sizes, strict=True):
            with rw.Client(shard.address) as one:
                for number in range(size):
                    one.insert([np.array([number])], {"replay": 1.0})
        infos = {shard.name: shard.channel.server_info(60.0) for shard in client.shards}
        table, draws = infos[client.shards[0].name].tables["replay"], Draws()
        with monkeypatch.context() as patch:
            patch.setattr(np.random, "default_rng", lambda: draws)
            mixer = ByMass(client, infos, table, 4, ReadOptions(), lambda *_: None)  # at most 8 samples are held

        def have_arrived() -> bool:
            mixer.proceed(time.monotonic(), 0)
            wanted = [min(num_waiting, size if config is READ_ONCE else num_waiting * (size > 0)) for size in sizes]
            return [len(source.waiting) for source in mixer.sources] == wanted

        eventually(have_arrived)
        for source in mixer.sources:
            source.told_at = NOW
        yield mixer, mixer.sources, draws
        mixer.close()


def test_drawn_samples_are_due_until_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 3, 1) as (mixer, (one, other), draws):
        draws.next = [[3, 1], [3, 1]]
        first = take(mixer, 4)
        assert draws.seen == [(4, [0.75, 0.25])]
        assert first.probabilities.tolist() == [0.25] * 4
        assert first.table_sizes.tolist() == [4] * 4
        # Twice the 8 samples that are held, by the share: 12 and 4; and two deviations and one more.
        assert (one.max_samples, other.max_samples) == (20, 9)
        assert len(take(mixer, 4)) == 2  # `one` has only one of its three
        assert (one.due, other.due, len(one.waiting), len(other.waiting)) == (2, 0, 0, 2)
        one.waits_since = NOW - 0.05
        assert len(take(mixer, 2)) == 0  # it is not slow yet, so both are awaited
        one.waits_since = NOW - 0.2
        draws.next = [[0, 2]]
        assert len(take(mixer, 2)) == 2  # others give samples in its place, and it still owes them
        assert (one.due, other.due) == (2, 0)
        draws.next = [[2, 0]]
        assert len(take(mixer, 4)) == 0  # no more than a batch is owed
        assert (draws.seen[-1][0], one.due, other.due) == (2, 4, 0)
        assert len(take(mixer, 4)) == 0
        assert len(draws.seen) == 4


def test_batch_is_given_when_it_is_whole_and_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 3, 1) as (mixer, (one, other), draws):
        missing = one.take(9)[:3]
        draws.next = [[3, 1]]
        assert len(mixer.take(4, NOW)) == 0  # the sample of `other` is drawn, and three of `one` have not arrived
        assert (one.due, other.due, len(other.waiting)) == (3, 0, 3)
        assert (mixer.num_waiting, mixer.num_for_batch) == (4, 4)  # three of `other` wait for another draw
        one.waiting = missing
        of_one = missing.keys.tolist()
        found = mixer.take(4, NOW).keys.tolist()
        assert found[:3] == of_one[::-1]  # `Draws` reverses the order
        assert found[3] not in of_one
        assert (len(mixer._drawn), one.due, other.due) == (0, 0, 0)


def test_slow_server_is_drawn_once_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 2, 2) as (mixer, (one, _), draws):
        one.take(9)
        one.waits_since, draws.next = NOW - 0.2, [[1, 0]]
        assert len(take(mixer, 1)) == 0
        assert (one.due, len(draws.seen)) == (1, 1)


def test_no_more_samples_than_wanted_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 2, 2) as (mixer, (one, other), draws):
        one.due = other.due = 2
        assert [len(take(mixer, 1)) for _ in range(4)] == [1] * 4
        assert (one.due, other.due, len(one.waiting), len(other.waiting)) == (0, 0, 2, 2)
        assert draws.seen == []


def test_late_and_lost_servers_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 2, 2) as (mixer, (one, other), draws):
        other.is_late = True
        assert len(take(mixer, 4)) == 4
        assert (len(one.waiting), len(other.waiting), draws.seen) == (0, 4, [])


def test_servers_without_items_and_servers_of_unknown_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, PRIORITIZED, 2, 0) as (mixer, _, draws):
        assert len(take(mixer, 4)) == 4
        assert draws.seen == []
    with mixed(monkeypatch, PRIORITIZED, 2, 2) as (mixer, (one, other), draws):
        other.mean = None
        assert len(take(mixer, 4)) == 0
        assert (one.due, other.due, draws.seen) == (0, 0, [])
    with mixed(monkeypatch, UNIFORM, 2, 0) as (mixer, _, draws):
        draws.next = [[4, 0]]
        assert len(take(mixer, 4)) == 4
    with mixed(monkeypatch, UNIFORM, 0, 0) as (mixer, _, draws):
        assert len(take(mixer, 4)) == 0
        assert draws.seen == []


@pytest.mark.parametrize(
    ("config", "age_s", "is_late", "num_dropped"),
    [
        (PRIORITIZED, 1.0, False, 0),
        (PRIORITIZED, 1.5, False, 1),
        (PRIORITIZED, 1.5, True, 0),  # the only server that is left
        (UNIFORM, 1.5, False, 0),
    ],
)
def test_old_sample_makes_room_for_one_that_tells_the_mass(
    monkeypatch: pytest.MonkeyPatch, config: rw.TableConfig, age_s: float, is_late: bool, num_dropped: int
) -> None:
    with mixed(monkeypatch, config, 2, 2) as (mixer, (one, other), draws):
        draws.next, other.is_late = [[1, 0]], is_late
        one.told_at = NOW - age_s
        assert len(take(mixer, 1)) == 1
        assert (one.num_dropped, other.num_dropped, len(one.waiting)) == (num_dropped, 0, 3 - num_dropped)


@pytest.mark.parametrize(
    ("config", "sizes", "num_dropped"),
    [(UNIFORM, (2, 2), 4), (UNIFORM, (2,), 0), (READ_ONCE, (4, 4), 0)],  # no one else gets the last ones
)
def test_samples_of_a_server_that_returns_are_dropped_if_others_were_sampled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, config: rw.TableConfig, sizes: Sequence[int], num_dropped: int
) -> None:
    num_waiting = 8 // len(sizes)
    with mixed(monkeypatch, config, *sizes, num_waiting=num_waiting) as (mixer, (one, *_), _):
        mixer._note_connection(one, was_lost=True)
        assert (one.num_dropped, len(one.waiting)) == (num_dropped, num_waiting - num_dropped)


def test_mean_of_a_server_that_has_started_again_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, PRIORITIZED, 2, 2) as (mixer, (one, other), _):
        other.state_id = None
        for source, mean in ((one, 1.0), (other, None)):
            mixer._note_connection(source, was_lost=True)
            assert source.mean == mean


def test_samples_that_no_one_else_gets_are_taken_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, READ_ONCE, 3, 2) as (mixer, _, draws):
        mixer.stop_requests()
        assert [len(take(mixer, 4)) for _ in range(3)] == [4, 1, 0]
        assert draws.seen == []
    with mixed(monkeypatch, UNIFORM, 3, 2) as (mixer, (one, other), draws):
        mixer.stop_requests()
        assert len(take(mixer, 4)) == 0
        assert (len(one.waiting), len(other.waiting), draws.seen) == (4, 4, [])


def test_the_only_server_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with mixed(monkeypatch, UNIFORM, 3, num_waiting=8) as (mixer, (one,), draws):
        assert [len(take(mixer, 5)) for _ in range(2)] == [5, 3]
        assert (draws.seen, one.due) == ([], 0)
