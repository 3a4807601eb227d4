"""What a local server holds, its streams, and what gRPC's handlers do with them. Without a network."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sampled
from store_messages import Inserter, ask, chunk, draw, item, store_of

from reverb_writer.background import in_background
from reverb_writer.local.grpc_service import Service
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import SharedChunks, encode_responses
from reverb_writer.local.streams import InsertStream, SampleStream
from reverb_writer.local.sum_tree import SumTree
from reverb_writer.protocol import messages
from reverb_writer.protocol.trajectory_parsing import parse_trajectory
from reverb_writer.tables import Prioritized, SampleToInsertRatio, Selector, TableConfig

NUM_DRAWS = 250_000


def chi_square_z(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """Return how many standard deviations chi-square is above its mean (Wilson-Hilferty)."""
    expected = probabilities * counts.sum()
    chosen = expected > 0
    assert not counts[~chosen].any()
    degrees = np.count_nonzero(chosen) - 1
    statistic = ((counts[chosen] - expected[chosen]) ** 2 / expected[chosen]).sum()
    return float(((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees)))


@pytest.mark.parametrize("selector", ["uniform", Prioritized(1.0), Prioritized(0.6)], ids=str)
def test_draws_agree_with_the_closed_form_after_updates_and_deletions(selector: Selector) -> None:
    rng = np.random.default_rng(3)
    store = store_of(TableConfig("replay", sampler=selector))
    inserter, table = Inserter(store), store.table("replay")
    priorities = rng.uniform(0, 10, 3000)
    inserter.insert(range(3000), priorities.tolist())
    priorities[::3] = rng.choice([0.0, 0.1, 50.0], 1000)
    table.update(dict(zip(range(0, 3000, 3), priorities[::3].tolist(), strict=True)), [])
    alive = np.ones(3000, bool)
    alive[::2] = False
    for key in range(0, 1500, 2):
        table.update({}, [key])
    table.update({}, range(1500, 3000, 2))
    alive[::10], priorities[::10] = True, 4.0
    inserter.insert(range(0, 3000, 10), [4.0] * 300)
    weights = alive.astype(float)
    if isinstance(selector, Prioritized):
        weights *= np.where(priorities > 0, priorities, 0) ** selector.exponent * (priorities > 0)
    expected = weights / weights.sum()
    counts = np.zeros(3000, np.int64)
    while counts.sum() < NUM_DRAWS:
        (answer,) = ask(store, 250)
        drawn = answer.samples.keys.astype(int)
        np.testing.assert_allclose(answer.samples.probabilities, expected[drawn])
        np.testing.assert_array_equal(answer.samples.priorities, priorities[drawn])
        assert [item.key for item in answer.samples] == drawn.tolist()
        counts += np.bincount(drawn, minlength=3000)
    assert abs(chi_square_z(counts, expected)) < 5


def test_a_sum_tree_never_finds_a_row_without_weight() -> None:
    tree = SumTree()
    tree.set(range(5000), [0.1 if row % 7 == 3 else 0.0 for row in range(5000)])
    points = np.append(np.linspace(0, tree.total, 10_000, endpoint=False), np.nextafter(tree.total, 0))
    found = tree.find(points)
    assert set(found % 7) == {3}
    assert (np.diff(found) >= 0).all()


def test_each_draw_of_an_item_is_counted_also_of_many_at_once() -> None:
    store = store_of(TableConfig("replay"))
    Inserter(store).insert([1, 2, 3])
    table, times = store.table("replay"), dict[int, list[int]]()
    for _ in range(2):
        (answer,) = ask(store, 50)
        assert len(answer.samples) > 3
        for key, count in zip(answer.samples.keys.tolist(), answer.samples.times_sampled.tolist(), strict=True):
            times.setdefault(key, []).append(count)
    assert times == {key: [*range(1, len(counts) + 1)] for key, counts in times.items()}
    assert table.num_samples == sum(map(len, times.values()))
    assert table.num_unique_samples == len(times)


def test_a_table_that_grows_keeps_the_numbers_of_its_items() -> None:
    store = store_of(TableConfig("replay", sampler="fifo", max_times_sampled=1))
    Inserter(store).insert(range(3000), range(3000))
    table, drawn = store.table("replay"), list[tuple[int, float]]()
    while len(table):
        (answer,) = ask(store, 3000)
        drawn += zip(answer.samples.keys.tolist(), answer.samples.priorities.tolist(), strict=True)
        assert [item.key for item in answer.samples] == answer.samples.keys.tolist()
    assert drawn == [(number, number) for number in range(3000)]


def test_large_samples_are_drawn_as_far_as_a_response_holds_them() -> None:
    store = store_of(TableConfig("replay"))
    large = messages.StoredRequest(chunks=[chunk(7, data=bytes(300_000))], items=[item(1, 7)])
    Inserter(store).stream.take(large.SerializeToString())
    (answer,) = ask(store, 50)
    assert len(answer.samples) == 4


def test_a_table_whose_priorities_are_all_zero_is_sampled_uniformly() -> None:
    store = store_of(TableConfig("replay", sampler=Prioritized(1.0)))
    Inserter(store).insert([1, 2], [0.0, 0.0])
    drawn = draw(store, 200)
    assert {key for key, _, _ in drawn} == {1, 2}
    assert {probability for _, probability, _ in drawn} == {0.5}


@pytest.mark.parametrize(
    ("sampler", "order"),
    [
        ("fifo", [0, 1, 2, 3, 4]),
        ("lifo", [4, 3, 2, 1, 0]),
        ("max_heap", [2, 4, 0, 1, 3]),
        ("min_heap", [1, 3, 0, 2, 4]),
    ],
)
def test_order_of_samples(sampler: Any, order: list[int]) -> None:
    store = store_of(TableConfig("replay", sampler=sampler, max_times_sampled=1))
    Inserter(store).insert([10, 11, 12, 13, 14], [2, 1, 9, 1, 9])
    assert [key - 10 for key, _, _ in draw(store, 9)] == order
    assert not store.table("replay").num_episodes


def test_remover_may_choose_the_new_item() -> None:
    store = store_of(TableConfig("replay", 3, "fifo", "max_heap"))
    Inserter(store).insert([0, 1, 2, 3, 4], [5, 1, 9, 2, 7])
    assert [item.key for item in store.table("replay")] == [0, 1, 3]


def test_memory_is_free_when_nothing_refers_to_it() -> None:
    store = store_of(TableConfig("replay", 10))
    inserter = Inserter(store)
    for first in range(0, 1000, 10):
        inserter.insert(range(first, first + 10))
    assert len(store.chunks) == 1
    store.table("replay").reset()
    assert len(store.chunks) == 1  # the stream keeps it
    inserter.stream.end()
    assert len(store.chunks) == store.chunks.num_bytes == 0


def test_the_memory_bound_is_told_and_nothing_is_lost() -> None:
    store = store_of(TableConfig("replay"), max_bytes=10_000)
    inserter = Inserter(store)
    inserter.insert([1, 2])
    request = messages.StoredRequest(chunks=[chunk(9, data=bytes(20_000))])
    with pytest.raises(Refusal, match="`max_bytes` 10000 bytes") as refusal:
        inserter.stream.take(request.SerializeToString())
    assert refusal.value.code() is Status.RESOURCE_EXHAUSTED
    with pytest.raises(Refusal, match="max_bytes"):
        inserter.insert(range(3, 1000))
    assert {key for key, _, _ in draw(store, 50)} == {1, 2}


def test_memory_of_an_item_of_many_slices_is_counted() -> None:
    trajectory = messages.FlatTrajectory()
    pieces = trajectory.columns.add().chunk_slices
    for number in range(1000):
        pieces.add(chunk_key=(1 << 40) + number, offset=300, length=400, index=0)
    flat = trajectory.SerializeToString()
    layout, (slices,) = parse_trajectory(flat)
    made = SharedChunks("replay", layout, [], 1, len(flat), len(slices))
    parsed = sys.getsizeof(slices) + sum(sum(map(sys.getsizeof, (one, *one))) for one in slices)
    assert made.item_bytes >= sys.getsizeof(flat) + parsed


def test_a_chunk_is_shared_by_streams() -> None:
    store = store_of(TableConfig("replay"))
    first, second = Inserter(store), Inserter(store)
    first.insert([1])
    second.insert([2])
    assert len(store.chunks) == 1
    first.stream.end()
    second.insert([3])
    assert len(draw(store, 3)) == 3


def test_inserts_wait_for_the_rate_limiter_in_turn() -> None:
    store = store_of(TableConfig("replay", rate_limiter=SampleToInsertRatio(1.0, 1, 2.0)))
    inserter = Inserter(store)
    inserter.insert(range(6))
    assert inserter.confirmed() == [0, 1, 2]
    assert store.table("replay").num_inserts == 3
    assert len(draw(store, 2)) == 2
    assert inserter.confirmed() == [3, 4]
    inserter.stream.end()
    assert len(draw(store, 100)) == 4  # down to min_diff -1, with nothing new
    assert inserter.confirmed() == []


def test_an_item_that_comes_again_also_waits_for_the_rate_limiter() -> None:
    store = store_of(TableConfig.queue("replay", 1))
    first, second = Inserter(store), Inserter(store)
    first.insert([1])
    second.insert([1])
    assert (first.confirmed(), second.confirmed()) == ([1], [])
    assert draw(store, 1) == [(1, 1.0, 1)]
    assert second.confirmed() == [1]  # as a new item, because the table no longer knows its key
    assert len(store.table("replay")) == 1


def test_a_sample_tells_whether_its_request_had_to_wait() -> None:
    store = store_of(TableConfig("replay"))
    late = ask(store, 1)
    Inserter(store).insert([1])
    prompt = ask(store, 1)
    for (answer,), waited in ((late, True), (prompt, False)):
        (response,) = encode_responses(answer.samples, rate_limited=answer.has_waited)
        (entry,) = messages.SampleStreamResponse.FromString(response).entries
        assert (entry.info.rate_limited, answer.has_waited) == (waited, waited)


def test_counters_are_those_of_the_draws() -> None:
    store = store_of(TableConfig("replay", max_times_sampled=3))
    Inserter(store).insert(range(50))
    drawn = draw(store, 1000)
    assert Counter(Counter(key for key, _, _ in drawn).values()) == {3: 50}
    table = store.table("replay")
    assert (table.num_samples, table.num_unique_samples, len(table), table.num_deleted_episodes) == (150, 50, 0, 1)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_that_cannot_be_is_refused_and_changes_nothing(priority: float) -> None:
    store = store_of(TableConfig("replay", sampler=Prioritized(1.0)))
    with pytest.raises(Refusal, match="must be finite and >= 0"):
        Inserter(store).insert([1, 2], [1.0, priority])
    assert not len(store.table("replay"))


def test_huge_priorities_stay_finite() -> None:
    store = store_of(TableConfig("replay", sampler=Prioritized(3.0)))
    Inserter(store).insert(range(20), [1e300] * 20)
    assert len({key for key, _, _ in draw(store, 500)}) == 20


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (messages.StoredRequest(items=[item(1, 8)]), "refers to chunk 8"),
        (messages.StoredRequest(chunks=[chunk(8)], items=[item(1, 8)], keep_chunk_keys=[9]), "refers to chunk 9"),
        (messages.StoredRequest(chunks=[b"\xff"]), "not an insert request"),
        (messages.StoredRequest(items=[b"\x08"]), "not an insert request"),
        (messages.StoredRequest(chunks=[chunk(8)], items=[item(1, 8, "other")]), "other was not found"),
        (
            messages.StoredRequest(chunks=[chunk(7)], items=[sampled.item(1, [[(7, 0, 1, 1)]]).SerializeToString()]),
            "item 1 refers to tensor 1 of chunk 7, which has 1",
        ),
    ],
    ids=["no chunk", "not kept", "damaged chunk", "damaged item", "no table", "no tensor"],
)
def test_an_impossible_request_inserts_nothing(request_: Any, text: str) -> None:
    store = store_of(TableConfig("replay"))
    inserter = Inserter(store)
    with pytest.raises(Refusal, match=text):
        inserter.stream.take(request_.SerializeToString())
    inserter.stream.end()
    assert not len(store.table("replay"))
    assert not len(store.chunks)


class ClientThatGoes:
    """The context of a call whose client goes as soon as the server wants to hear of it."""

    def add_callback(self, end: Callable[[], None]) -> bool:
        end()
        return True


@pytest.fixture
def store() -> Store:
    return store_of(TableConfig("replay"))


def test_samples_of_a_request_are_missing_until_they_are_delivered(store: Store) -> None:
    """A handler of gRPC that finds none missing, and none delivered, waits for the next request."""
    answers, early = [], []

    def deliver(answer: Any) -> None:
        is_asked = in_background(lambda: stream.is_asked)  # of the handler's thread
        early.append(is_asked.wait(0.2) and not is_asked.result())
        answers.append(answer)

    stream = SampleStream(store, deliver)
    stream.open()
    stream.feed(messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString())
    assert stream.is_asked
    Inserter(store).insert([1])
    assert (len(answers), early) == (1, [False])
    assert not stream.is_asked


@pytest.mark.parametrize("method", ["_insert", "_sample"])
def test_a_stream_whose_client_goes_while_it_is_opened_is_forgotten(store: Store, method: str) -> None:
    assert not [*getattr(Service(store), method)(iter([]), ClientThatGoes())]
    assert not store.streams


def test_a_stream_that_has_ended_keeps_no_messages(store: Store) -> None:
    """The writer may go on sending until it hears of the refusal."""
    answers: list[Any] = []
    stream = InsertStream(store, answers.append)
    stream.open()
    for _ in range(3):
        stream.feed(b"\x01")
    assert len(answers) == 1
    assert not stream._messages
