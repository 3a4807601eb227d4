"""What a batch is made of: lengths, nests, and what is left out because nobody should decode it, or nobody can."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_forwarder import CallForwarder
from kinds import contents
from numbered import QUEUE, first_numbers, insert_damaged, insert_numbers, insert_variant, write_numbers, write_steps
from reading import Serve
from server_process import HostedServer, StartServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec

pytestmark = contents


def test_items_of_different_lengths_are_refused_or_padded(serve: Serve) -> None:
    client = serve(QUEUE)
    for length in (2, 1, 3):
        client.insert({"x": np.arange(1, 1 + length), "y": np.ones((length, 2), np.float32)}, {"queue": 1.0})
    options: dict[str, Any] = {"batch_size": 3, "max_in_flight_batches": 1}
    with (
        rw.ReplayDataset(client, "queue", **options) as dataset,
        pytest.raises(rw.errors.StructureError, match=r"1 to 3 rows.*'pad'"),
    ):
        next(dataset)
    for length in (2, 1, 3):
        client.insert({"x": np.arange(1, 1 + length), "y": np.ones((length, 2), np.float32)}, {"queue": 1.0})
    with rw.ReplayDataset(client, "queue", collate="pad", **options) as dataset:
        batch = next(dataset)
    data, info = batch
    np.testing.assert_array_equal(data["x"], [[1, 2, 0], [1, 0, 0], [1, 2, 3]])
    np.testing.assert_array_equal(batch.mask, [[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    np.testing.assert_array_equal(data["y"], np.repeat(batch.mask[..., None], 2, axis=-1))
    assert info.lengths.tolist() == [2, 1, 3]


SQUEEZE = {"tokens": False, "version": True}


def insert_versions(client: rw.Client, versions: list[int], length: int = 2) -> None:
    """Insert items into a queue whose rows are equal to their version."""
    for version in versions:
        rows = np.full(length, version)
        client.insert({"tokens": rows, "version": np.int64(version)}, {"queue": 1.0}, squeeze=SQUEEZE)


def test_packed_samples_lie_end_to_end_and_scalars_one_per_sample(serve: Serve) -> None:
    client = serve(QUEUE)
    for version, length in ((4, 2), (5, 1), (6, 3), (7, 4)):
        insert_versions(client, [version], length)
    with rw.ReplayDataset(client, "queue", 8, collate="pack", max_rows=6, max_in_flight_batches=1) as dataset:
        batch = next(dataset)
        assert batch.data["tokens"].tolist() == [4, 4, 5, 6, 6, 6]
        assert batch.data["version"].tolist() == [4, 5, 6]
        assert batch.slices.offsets.tolist() == [0, 2, 3, 6]
        rest = dataset.poll(20.0) or dataset.poll()
        assert (rest.data["tokens"].tolist(), rest.info.lengths.tolist()) == ([7] * 4, [4])


def test_leaves_of_different_lengths_are_padded_and_not_packed(serve: Serve) -> None:
    client = serve(QUEUE)
    options: dict[str, Any] = {"batch_size": 2, "max_in_flight_batches": 1}
    for _ in range(2):
        for length in (1, 2):
            client.insert({"prompt": np.ones(length), "answer": np.ones(length + 1)}, {"queue": 1.0})
    with rw.ReplayDataset(client, "queue", collate="pad", **options) as dataset:
        data = next(dataset).data
    assert data["prompt"].tolist() == [[1, 0], [1, 1]]
    assert data["answer"].tolist() == [[1, 1, 0], [1, 1, 1]]
    with (
        rw.ReplayDataset(client, "queue", collate="pack", **options) as dataset,
        pytest.raises(rw.errors.StructureError, match=r"column [01].*`collate='pad'`"),
    ):
        next(dataset)


def test_no_batch_has_an_item_that_is_too_old_when_it_is_requested(serve: Serve) -> None:
    """The learner raises the version while samples wait that were fresh when they were fetched."""
    client = serve(QUEUE)
    insert_versions(client, [1, 2, 2, 3, 3, 4, 5, 5])
    with rw.ReplayDataset(client, "queue", 2, max_age=1, timeout_s=60) as dataset:
        assert dataset.version is None
        dataset.version = 2
        assert next(dataset).info.versions.tolist() == [1, 2]
        stats = dataset.stats()
        assert (stats.last_mean_age, stats.last_max_age, stats.too_old_samples) == (0.5, 1, 0)
        assert eventually(lambda: dataset.stats().ready_samples > 0)
        dataset.version = 5
        assert next(dataset).data["tokens"].tolist() == [[4, 4], [5, 5]]
        assert dataset.stats().too_old_samples == 3
        dataset.version = 6
        assert dataset.poll(0.2).data["version"].tolist() == [5]  # a smaller batch
        assert dataset.poll() is None
        insert_versions(client, [4, 6])
        assert eventually(lambda: dataset.stats().received_samples == 10)
        assert dataset.poll().data["version"].tolist() == [6]
        assert dataset.stats().too_old_samples == 4


def test_items_that_are_all_too_old_are_named_in_the_time_out(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay"))
    client.insert({"tokens": np.zeros(2), "version": np.int64(1)}, {"replay": 1.0}, squeeze=SQUEEZE)
    with rw.ReplayDataset(client, "replay", 4, max_age=0, timeout_s=1.0) as dataset:
        dataset.version = 2
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"were older than `max_age`"):
            next(dataset)
        dataset.version = 1  # the learner has loaded older weights
        assert next(dataset).info.versions.tolist() == [1] * 4


Step = collections.namedtuple("Step", ["obs", "extras"])  # noqa: PYI024


def test_learner_gets_the_nest_of_the_actor(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay"), rw.TableConfig("steps"))
    step = Step(obs={"z": np.zeros(3), "a": [np.float32(1), (np.int8(2),)]}, extras=())
    trajectory = rw.Trajectory(np.int32(1), np.zeros(4), np.int64(0), (), np.int32(1), np.float32(0), np.float32(1))
    with rw.TrajectoryObserver(client, "replay", 2) as observer:
        for _ in range(3):
            observer(step)
    with rw.TrajectoryObserver(client, "steps", 2) as observer:
        for _ in range(3):
            observer(trajectory)
    with rw.ReplayDataset(client, "replay", 2) as dataset:
        data = next(dataset).data
    (sample,) = client.sample("replay")
    assert (type(data).__name__, data._fields, data.extras) == ("Step", Step._fields, ())
    assert (data.obs["z"].shape, sample.data.obs["z"].shape) == ((2, 2, 3), (2, 3))
    assert data.obs["a"][1][0].dtype == np.int8
    with rw.ReplayDataset(client, "steps", 2) as dataset:
        batch = next(dataset)
        found = batch.data
    assert isinstance(found, rw.Trajectory)
    assert found.observation.shape == (2, 2, 4)
    assert batch.mask.all()


def test_items_of_another_structure_are_left_out_counted_and_named_once(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve(rw.TableConfig("replay"))
    write_steps(client.address, "replay", 8)  # items of 4 steps: 5
    with rw.ReplayDataset(client, "replay", 8, max_in_flight_batches=1) as dataset:
        assert next(dataset).data.keys() == {"a", "b"}
        with rw.TrajectoryObserver(client, "replay", 4) as observer:
            for number in range(10):
                observer({"a": np.int64(number), "b": np.zeros(2)})  # float64, not float32
        for _ in range(20):
            batch = next(dataset)
            assert {name: leaf.dtype for name, leaf in batch.data.items()} == {"a": np.int64, "b": np.float32}
            assert len(batch.info) == 8
        foreign, received = dataset.stats().foreign_items, dataset.stats().received_samples
        assert 20 < foreign < received
        client.reset("replay")
        client.insert({"m": np.zeros(1)}, {"replay": 1.0})
        dataset.timeout_s = 3.0
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"left out: `Client\.reset` table `replay`, or open"):  # noqa: PT012
            for _ in range(10):  # those that were on their way come first
                next(dataset)
    (warning,) = [record.getMessage() for record in caplog.records if "another structure" in record.getMessage()]
    assert "The first item has a int64 (), b float32 (2,); the other one has a int64 (), b float64 (2,)." in warning


def test_client_samples_each_item_as_the_nest_of_its_own_spec(serve: Serve) -> None:
    client = serve(QUEUE)
    steps: list[Any] = [{"a": np.int64(0)}, [np.float32(1), np.zeros(2)], {"a": np.int64(2)}, {"b": np.int64(3)}]
    for step in steps:
        with rw.TrajectoryObserver(client, "queue", 1) as observer:
            observer(step, end_of_episode=True)
    client.insert([np.array([4])], {"queue": 1.0})
    found = [sample.data for sample in client.sample("queue", 5)]
    assert [type(data) for data in found] == [dict, list, dict, dict, tuple]
    assert [data["a"].tolist() for data in (found[0], found[2])] == [[0], [2]]
    assert (found[1][0].tolist(), found[3]["b"].tolist(), found[4][0].tolist()) == ([1], [3], [4])


def test_items_without_a_spec_and_other_kinds_of_nodes_are_not_foreign(serve: Serve) -> None:
    client = serve(QUEUE)
    for step in ({"pair": (np.int64(1), np.int64(2))}, {"pair": [np.int64(3), np.int64(4)]}):
        with rw.TrajectoryObserver(client, "queue", 1) as observer:
            observer(step, end_of_episode=True)
    client.insert([np.array([5]), np.array([6])], {"queue": 1.0})
    with rw.ReplayDataset(client, "queue", 3) as dataset:
        assert [leaf.tolist() for leaf in next(dataset).data["pair"]] == [[[1], [3], [5]], [[2], [4], [6]]]
        assert dataset.stats().foreign_items == 0


def test_samples_keep_their_nest_when_the_table_is_reset_under_running_actors(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay"))
    with (
        rw.TrajectoryObserver(client, "replay", 2, chunk_length=2) as observer,
        rw.ReplayDataset(client, "replay", 2, max_in_flight_batches=1) as dataset,
    ):
        for first in range(0, 60, 20):
            for number in range(first, first + 20):
                observer({"n": np.int64(number)}, end_of_episode=number % 10 == 9)
            observer.flush()
            assert next(dataset).data["n"].shape == (2, 2)
            assert next(client.sample("replay")).data["n"].shape == (2,)
            client.reset("replay")
        write_numbers(observer, (60, 61))
        observer.flush()
        assert next(client.sample("replay")).data["n"].tolist() == [60, 61]
        with rw.ReplayDataset(client, "replay", 1) as another:
            assert next(another).data["n"].tolist() == [[60, 61]]


def test_signature_of_the_table_counts(serve: Serve) -> None:
    client = serve(rw.TableConfig("typed", signature={"n": ArraySpec((None,), np.dtype(np.int64))}))
    insert_numbers(client.address, "typed", [7])
    with rw.ReplayDataset(client, "typed", 1) as dataset:
        np.testing.assert_array_equal(next(dataset).data["n"], [[7]])


@pytest.mark.parametrize("skip_unsafe", [False, True])
def test_variant_is_refused_or_skipped_and_counted_and_reading_goes_on(serve: Serve, skip_unsafe: bool) -> None:
    client = serve(QUEUE)
    insert_variant(client, "queue")
    with pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
        next(client.sample("queue"))
    insert_numbers(client.address, "queue", [1])
    insert_variant(client, "queue")
    insert_numbers(client.address, "queue", [2, 3])
    with rw.ReplayDataset(client, "queue", 3, skip_unsafe=skip_unsafe) as dataset:
        if not skip_unsafe:
            with pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
                next(dataset)
        assert first_numbers(next(dataset)) == [1, 2, 3]
        assert dataset.stats().skipped_samples == skip_unsafe
        assert dataset.stats().received_samples == 4


def test_damaged_sample_is_skipped_and_counted_too_if_asked_for(serve: Serve) -> None:
    client = serve(QUEUE)
    for number in range(1, 6):
        client.insert([np.array([number])], {"queue": 1.0})
        insert_damaged(client, "queue")
    with rw.ReplayDataset(client, "queue", 1, skip_unsafe=True, single_pass=True) as dataset:
        assert [first_numbers(batch) for batch in dataset] == [[1], [2], [3], [4], [5]]
        assert dataset.stats().skipped_samples == 5


def test_damaged_item_that_would_settle_the_structure_loses_no_other(serve: Serve) -> None:
    """Not even of a queue, whose items come once; and it does not decide what the others look like."""
    client = serve(QUEUE)
    insert_damaged(client, "queue")
    write_steps(client.address, "queue", 4, length=1)
    with rw.ReplayDataset(client, "queue", 2, single_pass=True) as dataset:
        with pytest.raises(rw.errors.FormatError):
            next(dataset)
        found = [number for batch in dataset for number in batch.data["a"][:, 0].tolist()]
        stats = dataset.stats()
    assert found == [0, 1, 2, 3]
    assert (stats.received_samples, stats.samples, stats.lost_samples) == (5, 4, 0)


def test_variants_that_nobody_takes_are_bounded_as_samples_are_and_skipped_ones_take_no_room(serve: Serve) -> None:
    client = serve(rw.TableConfig("mixed", 10))
    insert_variant(client, "mixed")
    with rw.ReplayDataset(client, "mixed", 2, max_in_flight_batches=3) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: dataset.stats().received_samples >= 6)
        for num_taken in range(1, 9):
            with pytest.raises(rw.errors.UnsafeDataError, match="DT_VARIANT"):
                next(dataset)
            eventually(lambda: dataset.stats().received_samples == 6 + num_taken)  # noqa: B023  # called at once
    client.insert([np.array([1])], {"mixed": 1.0})
    with rw.ReplayDataset(client, "mixed", 2, max_in_flight_batches=1, skip_unsafe=True) as dataset:
        for _ in range(10):
            assert first_numbers(next(dataset)) == [1, 1]
        assert dataset.stats().skipped_samples > 2


def test_sample_above_the_bound_is_refused(serve: Serve) -> None:
    client = serve(QUEUE)
    client.insert([np.zeros((100, 1000))], {"queue": 1.0})
    client.insert([np.ones((1, 1000))], {"queue": 1.0})
    with rw.ReplayDataset(client, "queue", 1, max_sample_bytes=799_999) as dataset:
        with pytest.raises(rw.errors.UnsafeDataError, match="max_"):
            next(dataset)
        assert next(dataset).data[0].shape == (1, 1, 1000)


# Messages that something between a learner and its server has damaged.


DAMAGED = b"\xff" * 8


def damage_first(num_messages: int) -> Callable[[bytes], bytes]:
    """Damage the first messages of all streams together."""
    left = [DAMAGED] * num_messages

    def change(message: bytes) -> bytes:
        return left.pop() if left else message

    return change


@pytest.fixture
def three(replay_server: StartServer) -> HostedServer:
    """A table with the items 0, 1, 2."""
    server = replay_server(rw.TableConfig("replay"))
    insert_numbers(server.address, "replay", range(3))
    return server


@pytest.mark.parametrize("skip_unsafe", [False, True])
def test_damaged_messages_are_an_error_each_or_skipped_and_counted(three: HostedServer, skip_unsafe: bool) -> None:
    with (
        CallForwarder(three.port, change=damage_first(2)) as relay,
        rw.ReplayDataset(relay.address, "replay", 4, skip_unsafe=skip_unsafe) as dataset,
    ):
        for _ in range(0 if skip_unsafe else 2):
            with pytest.raises(rw.errors.FormatError, match="not a SampleStreamResponse"):
                next(dataset)
        for batch in itertools.islice(dataset, 5):
            assert set(first_numbers(batch)) <= {0, 1, 2}
        assert dataset.stats().skipped_samples == 2 * skip_unsafe
        assert dataset.stats().lost_samples >= 2


def test_damage_without_end_is_told_once_a_call_or_at_the_time_out_and_keeps_no_one_busy(three: HostedServer) -> None:
    with CallForwarder(three.port, change=lambda _: DAMAGED) as relay:
        with (
            rw.ReplayDataset(relay.address, "replay", 4, skip_unsafe=True, timeout_s=1.0) as skipping,
            pytest.raises(rw.errors.ReplayTimeoutError, match=r"0 of 4 samples have arrived. \d+ were unsafe or damag"),
        ):
            next(skipping)
        with rw.ReplayDataset(relay.address, "replay", 4) as dataset:
            relay.calls.clear()
            for num_told in range(1, 6):
                with pytest.raises(rw.errors.FormatError):
                    next(dataset)
                assert relay.verbs.count("SampleStream") <= num_told + 1
            before = relay.verbs.count("SampleStream")
            time.sleep(0.5)
            assert relay.verbs.count("SampleStream") <= before + 1


@pytest.mark.parametrize("num_left", [0, 3])
def test_single_pass_ends_although_a_message_was_damaged(replay_server: StartServer, num_left: int) -> None:
    server = replay_server(QUEUE)
    insert_numbers(server.address, "queue", range(5))
    with (
        CallForwarder(server.port, change=damage_first(1)) as relay,
        rw.Client(server.address) as client,
        rw.ReplayDataset(relay.address, "queue", 2, single_pass=True, max_in_flight_batches=1 + num_left) as dataset,
    ):
        iter(dataset)  # begins to fetch
        eventually(lambda: dataset.stats().lost_samples > 0)
        with pytest.raises(rw.errors.FormatError):
            next(dataset)
        found = [number for batch in dataset for number in first_numbers(batch)]
        lost = dataset.stats().lost_samples
        assert found == list(range(lost, 5))
        assert client.server_info()["queue"].current_size == 0
