"""What a learner asks of a dataset: transforms where it fetches, mixtures, the age of policies, what has arrived."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from call_forwarder import CallForwarder
from ports import free_port
from reading import Place, Serve, fifo
from server_process import StartServer
from threads import our_threads, soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.reading.views import window_transitions
from reverb_writer.transitions import one_per_window


def write(address: Any, table: str, numbers: Any, length: int = 2) -> None:
    """Write an item for each number: a window of `length` steps that all hold it."""
    with rw.TrajectoryObserver(address, table, length, length) as observer:
        for number in numbers:
            for step in range(length):
                observer({"n": np.int64(number)}, end_of_episode=step == length - 1)


def firsts(batch: rw.Batch) -> list[int]:
    """Return the number of each item of a batch of windows."""
    numbers: list[int] = batch.data["n"][:, 0].tolist()
    return numbers


def doubled(batch: rw.Batch) -> rw.Batch:
    return dataclasses.replace(batch, data={**batch.data, "n": 2 * batch.data["n"]})


def test_transform_runs_in_the_thread_that_fetches_while_the_learner_trains(place: Place) -> None:
    threads: list[str] = []

    def transform(batch: rw.Batch) -> rw.Batch:
        threads.append(threading.current_thread().name)
        return doubled(batch)

    write(place.client, "a", range(7))
    with rw.ReplayDataset(place.client, "a", 2, transform=transform, single_pass=True) as dataset:
        iter(dataset)  # begins to fetch
        eventually(lambda: len(threads) == 2)  # of the two batches ahead, before the learner asks for one
        batches = list(dataset)
    assert [firsts(batch) for batch in batches] == [[0, 2], [4, 6], [8, 10], [12]]
    assert set(threads) == {"reverb-writer-prefetch"}
    assert dataset.stats().samples == 7


def test_transform_may_return_anything_but_none(place: Place) -> None:
    write(place.client, "a", range(5))
    with rw.ReplayDataset(place.client, "a", 2, transform=firsts, single_pass=True) as dataset:
        assert list(dataset) == [[0, 1], [2, 3], [4]]
        assert (dataset.stats().batches, dataset.stats().samples) == (3, 5)
        write(place.client, "a", [5])
        with pytest.raises(rw.errors.SpecError, match="`transitions` needs a Batch, and `transform` returned list"):
            next(iter(dataset.transitions()))
        assert next(dataset, None) is None


def test_transitions_are_made_in_the_thread_that_fetches_once_they_are_asked_for(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers: list[str] = []

    make = one_per_window

    def noted(*args: Any, **kwargs: Any) -> Any:
        makers.append(threading.current_thread().name)
        return make(*args, **kwargs)

    monkeypatch.setattr(window_transitions, "one_per_window", noted)
    client = serve(rw.TableConfig("replay"))
    with rw.TrajectoryObserver(client, "replay", 2) as observer:
        for t in range(9):
            step = {"observation": np.float32(t), "action": np.int32(t), "reward": np.float32(t % 8)}
            observer({**step, "is_first": t == 0, "is_last": t == 8, "is_terminal": t == 8})
    with rw.ReplayDataset(client, "replay", 4) as dataset:
        batch = next(dataset)
        assert batch.data["observation"].shape == (4, 2)
        assert makers == []
        view = dataset.transitions()
        found = [next(view) for _ in range(8)]
        of_learner = makers.count(threading.current_thread().name)
        assert of_learner <= 3  # two batches and one that was being made were ahead as batches
        assert set(makers) == {"reverb-writer-prefetch", *[threading.current_thread().name] * of_learner}
        for transitions in found:
            np.testing.assert_array_equal(transitions.next_observation, transitions.observation + 1)
            np.testing.assert_array_equal(transitions.batch.data["observation"][:, 0], transitions.observation)
        assert next(dataset).data["observation"].shape == (4, 2)  # also of those that are ready as transitions
        assert next(dataset.transitions()).observation.shape == (4,)


def test_priorities_are_set_by_transitions(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", 100, rw.Prioritized(1.0)))
    step = {
        "observation": np.zeros((2, 3)),
        "action": np.zeros(2),
        "reward": np.ones(2),
        "discount": np.array([1.0, 0.0]),
    }
    client.insert({name: np.asarray(leaf) for name, leaf in step.items()}, {"replay": 1.0})
    with rw.ReplayDataset(client, "replay", 4) as dataset:
        view = dataset.transitions()
        found = next(view)
        view.update_priorities(found, np.full(4, 7.0))
        view.flush_priorities()
        assert next(client.sample("replay", 1)).info.priority == 7.0
        for without in (found._replace(reward=0), rw.to_transitions(found.batch)):
            with pytest.raises(rw.errors.SpecError, match="these transitions have no batch"):
                dataset.update_priorities(without, np.ones(4))
        with rw.MixedDataset([dataset]) as mixed:
            mixed.update_priorities(next(mixed.transitions()), np.full(4, 9.0))
            mixed.flush_priorities()
            assert next(client.sample("replay", 1)).info.priority == 9.0


def test_interrupt_while_the_last_batch_is_transformed_loses_no_samples(place: Place) -> None:
    main, seen = threading.main_thread().ident, threading.Event()
    assert main is not None

    def interrupt(*_: object) -> None:
        if not seen.is_set():
            seen.set()
            raise KeyboardInterrupt

    def transform(batch: rw.Batch) -> rw.Batch:
        while not seen.wait(0.01):  # again and again: the first may come just before the learner begins to wait
            signal.pthread_kill(main, signal.SIGVTALRM)
        return doubled(batch)

    former = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        with rw.ReplayDataset(place.client, "a", 4, transform=transform) as dataset:
            iter(dataset)  # begins to fetch
            write(place.client, "a", range(2))
            eventually(lambda: dataset.stats().ready_samples == 2)
            with pytest.raises(KeyboardInterrupt):
                dataset.poll()
            assert dataset.stats().ready_samples == 2
            batch = dataset.poll()
            assert batch is not None
            assert batch.data["n"].tolist() == [[0, 0], [2, 2]]
            write(place.client, "a", range(4))
            assert firsts(next(dataset)) == [0, 2, 4, 6]
    finally:
        signal.signal(signal.SIGVTALRM, former)


def test_dataset_that_is_forgotten_ends_also_if_its_own_thread_collects_it(place: Place) -> None:
    def transform(batch: rw.Batch) -> rw.Batch:
        gc.collect()
        return batch

    before = our_threads("reverb-writer-")
    gc.disable()
    try:
        cycle: list[Any] = [rw.ReplayDataset(place.address, "a", 2, transform=transform)]
        iter(cycle[0])  # begins to fetch
        gone = weakref.ref(cycle[0])
        cycle.append(cycle)
        del cycle
        write(place.client, "a", range(2))
        eventually(lambda: gone() is None)
    finally:
        gc.enable()
    eventually(lambda: our_threads("reverb-writer-") == before)


@pytest.mark.parametrize("kind", ["windows", "slices"])
def test_take_returns_what_has_arrived_and_ends_nothing(place: Place, kind: str) -> None:
    found: list[list[int]] = []

    def takes_all() -> bool:
        if (batch := dataset.poll(timeout_s=0)) is not None:
            found.append(batch.data["n"].ravel()[::2].tolist())
        return sum(map(len, found)) == 6

    dataset: Any = (
        rw.ReplayDataset(place.client, "a", 4)
        if kind == "windows"
        else rw.SliceDataset(place.client, "a", 4, 2, pool_size=2)
    )
    with dataset:
        assert dataset.poll() is None
        assert dataset.poll(timeout_s=0.05) is None
        write(place.client, "a", range(6))
        if kind == "windows":
            eventually(lambda: dataset.stats().ready_samples == 6)
        eventually(takes_all)  # once the server has told the structure, which may take a moment
        assert max(map(len, found)) <= 4  # no more than a batch
        assert sorted(itertools.chain(*found)) == [*range(6)]
        if kind == "windows":
            assert found == [[0, 1, 2, 3], [4, 5]]
        assert dataset.poll() is None
        write(place.client, "a", [7])
        batch = eventually(lambda: dataset.poll(timeout_s=0.5))
        assert batch.data["n"].ravel().tolist() == [7, 7]
        write(place.client, "a", range(4))
        assert sorted(next(dataset).data["n"].ravel()[::2].tolist()) == [0, 1, 2, 3]
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be >= 0 seconds, got -1"):
            dataset.poll(-1)


def test_a_batch_that_is_made_keeps_no_one_waiting(place: Place) -> None:
    may_end, num_begun = threading.Event(), itertools.count(1)

    def transform(batch: rw.Batch) -> rw.Batch:
        if next(num_begun) > 1:
            may_end.wait()
        return batch

    write(place.client, "a", range(4))
    with rw.ReplayDataset(place.client, "a", 2, transform=transform) as dataset:
        try:
            assert firsts(next(dataset)) == [0, 1]  # it was ready, and is handed out while another is made
            dataset.timeout_s = 0.5
            told = "its samples have arrived, and the batch is being made"
            with pytest.raises(rw.errors.ReplayTimeoutError, match=told):
                next(dataset)
            assert dataset.poll() is None
        finally:
            may_end.set()
        dataset.timeout_s = 60
        assert firsts(next(dataset)) == [2, 3]


def test_a_dataset_that_is_opened_before_the_actors_has_no_stale_batches(serve: Serve) -> None:
    client = serve(rw.TableConfig("replay", rate_limiter=rw.MinSize(1)))
    with rw.ReplayDataset(client, "replay", 4) as dataset:
        write(client, "replay", range(4))
        time.sleep(0.5)  # it could fetch them
        assert client.server_info()["replay"].rate_limiter.num_samples == 0
        client.reset("replay")
        write(client, "replay", range(10, 14))
        assert set(firsts(next(dataset))) <= set(range(10, 14))


def test_constructors_wait_as_long_as_their_client_does() -> None:
    openers: list[Callable[..., Any]] = [
        functools.partial(rw.ReplayDataset, batch_size=2),
        functools.partial(rw.SliceDataset, num_slices=2, slice_len=2),
        functools.partial(rw.TrajectoryObserver, sequence_length=2),
        functools.partial(rw.TrajectoryObserver, sequence_length=2, num_envs=2),
        rw.Variables,
    ]
    with rw.Client(f"127.0.0.1:{free_port()}", timeout_s=0.3) as client:
        for open_it in openers:
            with pytest.raises(rw.errors.ServerUnavailableError):  # it would wait for an hour
                open_it(client, "a", timeout_s=3600)


def test_client_waits_for_no_server_before_its_first_call_and_samples_take_their_own_time(place: Place) -> None:
    rw.Client(f"127.0.0.1:{free_port()}").close()
    with (
        rw.Client(place.address, timeout_s=60) as client,
        pickle.loads(pickle.dumps(client)) as another,  # noqa: S301  # our own bytes
        rw.ReplayDataset(another, "a", 1) as dataset,
    ):
        assert client.timeout_s == another.timeout_s == dataset.timeout_s == 60
        reads: list[Callable[[], Any]] = [lambda: next(another.sample("a")), lambda: next(dataset)]
        for read in reads:
            with soon(lambda: write(place.client, "a", [7]), after_s=1.5):
                assert read().data["n"].ravel().tolist() == [7, 7]


@pytest.fixture
def two(serve: Serve) -> rw.Client:
    """Queues of 12 items each, `online` with numbers from 0, `offline` from 100."""
    client = serve(fifo("online"), fifo("offline"), rw.TableConfig("rated", 100, rw.Prioritized(1.0)))
    write(client, "online", range(12))
    write(client, "offline", range(100, 112))
    return client


def test_mixture_has_a_batch_of_each_and_loses_nothing(two: rw.Client) -> None:
    online = rw.ReplayDataset(two, "online", 4, single_pass=True)
    offline = rw.ReplayDataset(two, "offline", 2, single_pass=True)
    with rw.MixedDataset([online, offline]) as dataset:
        batches = list(itertools.islice(dataset, 3))
    for i, batch in enumerate(batches):
        assert firsts(batch) == [*range(4 * i, 4 * i + 4), *range(100 + 2 * i, 102 + 2 * i)]
        assert np.asarray(batch.info.members).tolist() == [0] * 4 + [1] * 2
        assert len(batch.info) == 6


def test_mixture_routes_priorities_back_and_sets_none_of_a_batch_if_one_is_bad(serve: Serve) -> None:
    client = serve(*[rw.TableConfig(name, 100, rw.Prioritized(1.0)) for name in ("a", "b")])
    for table, number in (("a", 1), ("b", 2)):
        write(client, table, [number])
    one_is_bad = [2.0, 2.0, 2.0, float("nan")]
    with rw.MixedDataset([rw.ReplayDataset(client, table, 2) for table in "ab"]) as mixed:
        batch = next(mixed)
        for priorities, message in (
            (one_is_bad, "must be finite and >= 0, got nan"),
            (np.ones(3), r"has shape \(3,\), expected \(4,\)"),
        ):
            with pytest.raises(rw.errors.SpecError, match=message):
                mixed.update_priorities(batch, priorities)
        with pytest.raises(rw.errors.SpecError, match="must come from this dataset"):
            mixed.update_priorities(next(mixed.datasets[0]), np.ones(2))
        mixed.flush_priorities()
        assert mixed.stats().priority_updates == 0
        mixed.update_priorities(batch, 10.0 * batch.data["n"][:, 0])
        mixed.flush_priorities()
        next(mixed)
        assert [one.stats().priority_updates for one in mixed.datasets] == [1, 1]  # each item is twice in its batch
        stats = mixed.stats()
        # One more batch of the first dataset was taken above.
        assert (stats.priority_updates, stats.batches, stats.samples) == (2, 3, 2 * 3 + 2 * 2)
    assert [next(client.sample(table, 1)).info.priority for table in "ab"] == [10.0, 20.0]
    with rw.MixedDataset([rw.SliceDataset(client, table, 2, 1) for table in "ab"]) as slices:
        batch = next(slices)
        assert batch.slices.members.tolist() == [0, 0, 1, 1]
        with pytest.raises(rw.errors.SpecError, match="must be finite and >= 0, got nan"):
            slices.update_priorities(batch, one_is_bad)
    assert slices.stats().priority_updates == 0


def test_steps_that_are_lists_are_mixed_and_what_does_not_match_is_refused(two: rw.Client) -> None:
    for number in (1, 2):
        with rw.TrajectoryObserver(two, "rated", 1) as observer:
            observer([np.int64(number), np.float32(10 * number)], end_of_episode=True)
        with rw.MixedDataset([rw.ReplayDataset(two, "rated", 2) for _ in range(2)]) as dataset:
            assert [leaf.tolist() for leaf in next(dataset).data] == [[[number]] * 4, [[10 * number]] * 4]
        two.reset("rated")
    write(two, "rated", [1], length=3)
    other_length = r"leaf `n` int64 \[1, 3\], expected `n` int64 \[1, 2\] as in the first"
    with (
        rw.MixedDataset([rw.ReplayDataset(two, table, 1) for table in ("online", "rated")]) as dataset,
        pytest.raises(rw.errors.StructureError, match=other_length),
    ):
        next(dataset)
    online = rw.ReplayDataset(two, "online", 1)
    with online:
        for wrong in ([], online, ["online"], {online: 1}):
            with pytest.raises(rw.errors.SpecError, match="`datasets` must"):
                rw.MixedDataset(wrong)  # type: ignore[arg-type]


def test_take_waits_for_the_structure_of_the_table_as_long_as_for_its_samples(replay_server: StartServer) -> None:
    server = replay_server(fifo("queue"))
    write(server.address, "queue", range(2))
    with CallForwarder(server.port, delay_s=0.2) as slow, rw.ReplayDataset(slow.address, "queue", 2) as dataset:
        batch = dataset.poll(timeout_s=60)
    assert batch is not None
    assert firsts(batch) == [0, 1]


def test_mixture_goes_on_after_a_time_out_and_take_returns_what_has_arrived_of_each(serve: Serve) -> None:
    client = serve(fifo("online"), fifo("offline"))
    online, offline = (rw.ReplayDataset(client, table, 2) for table in ("online", "offline"))
    with rw.MixedDataset([online, offline]) as dataset:
        assert dataset.poll() is None
        assert dataset.poll(timeout_s=0.05) is None
        write(client, "online", range(3))
        found: list[list[int]] = []

        def takes(total: int) -> bool:
            if (batch := dataset.poll()) is not None:
                assert np.asarray(batch.info.members).tolist() == (batch.data["n"][:, 0] >= 100).tolist()
                found.append(firsts(batch))
            return sum(map(len, found)) == total

        eventually(lambda: takes(3))
        assert [*itertools.chain(*found)] == [0, 1, 2]
        assert max(map(len, found)) <= 2  # the share of `online`
        write(client, "online", range(3, 7))
        offline.timeout_s = 0.5
        with pytest.raises(rw.errors.ReplayTimeoutError, match="table `offline`"):
            next(dataset)
        offline.timeout_s = 30.0
        write(client, "offline", range(100, 104))
        batch = dataset.poll(timeout_s=60)  # waits for the whole shares
        assert batch is not None
        assert firsts(batch) == [3, 4, 100, 101]
        assert firsts(next(dataset)) == [5, 6, 102, 103]
        with pytest.raises(rw.errors.SpecError, match="`timeout_s` must be >= 0 seconds, got -1"):
            dataset.poll(-1)
