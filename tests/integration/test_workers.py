"""Batches that processes of the learner's fetch and decode: what comes, and what is told of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from certificates import OPENSSL, make_identity, server_context
from forwarder import Forwarder
from numbered import QUEUE, first_numbers, insert_numbers, insert_variant, write_steps
from reading import eventually
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.wire.signatures import ArraySpec

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")

StartServer = Callable[..., HostedServer]

REPLAY = rw.TableConfig("replay", 10_000)
SESAME = "open"
FRAMES = (3, 84, 84)  # of an item; 21,168 bytes


@pytest.fixture
def address(replay_server: StartServer) -> str:
    """A table of items 0 to 39: three frames that are full of the number, and the number squared."""
    server = replay_server(rw.TableConfig("replay", 1000, rw.Prioritized(1.0)))
    with rw.Client(server.address) as client:
        for number in range(40):
            item = {"frames": np.full(FRAMES, number, np.uint8), "square": np.array([number**2])}
            client.insert(item, {"replay": float(number + 1)})
    return server.address


def check_frames(batch: rw.Batch) -> list[int]:
    """Check that all rows of a batch are of one item each; return their numbers."""
    frames, squares = batch.data
    numbers = frames[:, 0, 0, 0].astype(np.int64)
    assert (frames.dtype, frames.shape, squares.shape) == (np.uint8, (len(numbers), *FRAMES), (len(numbers), 1))
    np.testing.assert_array_equal(frames, np.broadcast_to(numbers[:, None, None, None], frames.shape))
    np.testing.assert_array_equal(squares[:, 0], numbers**2)
    return [int(number) for number in numbers]


def message_of_time_out(dataset: rw.ReplayDataset) -> str:
    with pytest.raises(rw.ReplayTimeoutError) as caught:
        next(dataset)
    return str(caught.value)


# What comes.


def test_every_item_comes_with_what_the_server_tells_of_it(address: str) -> None:
    seen: dict[int, int] = {}

    def all_seen() -> bool:
        batch = next(dataset)
        numbers = np.array(check_frames(batch))
        np.testing.assert_array_equal(batch.info.priorities, numbers + 1.0)
        np.testing.assert_allclose(batch.info.probabilities, (numbers + 1) / 820)  # 1 + 2 + ... + 40
        assert batch.info.table_sizes.tolist() == [40] * 8
        assert batch.info.lengths.tolist() == [3] * 8
        assert batch.info.server == address
        for number, key in zip(numbers.tolist(), batch.info.keys.tolist(), strict=True):
            assert seen.setdefault(number, key) == key
        return len(seen) == 40

    with rw.ReplayDataset(address, "replay", 8, num_workers=2) as dataset:
        assert eventually(all_seen, 60)
    assert len(set(seen.values())) == 40


def test_batches_belong_to_the_caller(address: str) -> None:
    with rw.ReplayDataset(address, "replay", 8, num_workers=1) as dataset:
        first = next(dataset)
        numbers = check_frames(first)
        for _ in range(20):
            for array in next(dataset).data:
                assert array.flags.writeable
                array[...] = 255
        assert check_frames(first) == numbers


def test_batch_stays_until_the_next_is_asked_for(address: str) -> None:
    options: dict[str, Any] = {"reuse_buffers": True, "max_in_flight_batches": 1, "num_workers": 1}
    with rw.ReplayDataset(address, "replay", 8, **options) as dataset:
        places = set()
        for _ in range(12):
            batch = next(dataset)
            numbers = check_frames(batch)
            places.add(batch.data[0].__array_interface__["data"][0])
            assert eventually(lambda: dataset.stats().ready_samples == 16)  # one batch ahead there, and one here
            assert check_frames(batch) == numbers
        assert len(places) == 3


def test_batch_stays_also_if_it_is_not_waited_for(address: str) -> None:
    options: dict[str, Any] = {"reuse_buffers": True, "max_in_flight_batches": 1, "num_workers": 1}
    with rw.ReplayDataset(address, "replay", 8, on_timeout="stop", **options) as dataset:
        check_frames(next(dataset))
        dataset.timeout_s = 1e-4
        sizes = set()
        for _ in range(100):
            batch = next(iter(dataset), None)
            if batch is not None:
                numbers = check_frames(batch)
                sizes.add(len(numbers))
                assert eventually(lambda: dataset.stats().ready_samples > 8)  # all ahead there, and some here
                assert check_frames(batch) == numbers
                for _ in range(10):  # so that one is on its way
                    dataset._turns.rest()
        assert sizes


def test_reused_buffers_are_right_when_they_are_handed_out(address: str) -> None:
    with rw.ReplayDataset(address, "replay", 8, num_workers=2, reuse_buffers=True) as dataset:
        found = [tuple(check_frames(next(dataset))) for _ in range(50)]
    assert len(set(found)) > 10


def test_nests_strings_and_single_values_come_as_they_were_written(replay_server: StartServer) -> None:
    server = replay_server(REPLAY)
    item = {
        "names": np.array([b"a", b"", b"\0bc"], object),
        "inner": [np.zeros((3, 0)), {"big": np.arange(60_000, dtype=np.float32).reshape(3, 200, 100)}],
        "one": np.full((100, 60), 7, np.int32),
    }
    whole, single = (None,), ()
    spec = {
        "names": ArraySpec(whole, np.dtype(object)),
        "inner": [ArraySpec((*whole, 0), np.dtype(float)), {"big": ArraySpec((*whole, 200, 100), np.dtype("f4"))}],
        "one": ArraySpec((*single, 100, 60), np.dtype("i4")),
    }
    squeeze = {"names": False, "inner": [False, {"big": False}], "one": True}
    with rw.Client(server.address) as client:
        client.insert(item, {"replay": 1.0}, squeeze=squeeze, spec=spec)
    with rw.ReplayDataset(server.address, "replay", 2, num_workers=1) as dataset:
        for _ in range(6):
            data = next(dataset).data
            assert data["names"].tolist() == [[b"a", b"", b"\0bc"]] * 2
            assert data["inner"][0].shape == (2, 3, 0)
            np.testing.assert_array_equal(data["inner"][1]["big"], [item["inner"][1]["big"]] * 2)  # type: ignore[index]
            np.testing.assert_array_equal(data["one"], np.full((2, 100, 60), 7))


@pytest.mark.parametrize("how", ["pad", "list", "flat"])
def test_items_of_different_lengths(replay_server: StartServer, how: Any) -> None:
    server = replay_server(REPLAY)
    with rw.Client(server.address) as client:
        for length in (1, 2, 3):
            client.insert({"x": np.full((length, 3000), length)}, {"replay": 1.0})
    with rw.ReplayDataset(server.address, "replay", 6, num_workers=2, collate=how) as dataset:
        for _ in range(10):
            (data, info) = next(dataset)
            lengths = info.lengths.tolist()
            samples = data
            if how == "pad":
                assert info.mask is not None
                samples = [(x[real],) for x, real in zip(data[0], info.mask, strict=True)]
                assert not data[0][~info.mask].any()
            elif how == "flat":
                samples = [(x,) for x in np.split(data[0], np.cumsum(lengths)[:-1])]
            assert [x.shape for (x,) in samples] == [(length, 3000) for length in lengths]
            assert all((x == length).all() for (x,), length in zip(samples, lengths, strict=True))


def test_samples_are_cut_into_pieces(replay_server: StartServer) -> None:
    server = replay_server(REPLAY)
    write_steps(server.address, "replay", 50, length=6)
    with rw.ReplayDataset(server.address, "replay", 7, num_workers=1, num_steps=2) as dataset:
        for _ in range(10):
            a = next(dataset).data["a"]
            np.testing.assert_array_equal(a, a[:, :1] + np.arange(2))
            assert a.shape == (7, 2)


def test_slices_of_contiguous_batches(replay_server: StartServer) -> None:
    server = replay_server(REPLAY)
    write_steps(server.address, "replay", 50, length=20)
    with rw.ContiguousDataset(server.address, "replay", 8, 5, num_workers=2) as dataset:
        for _ in range(10):
            batch = next(dataset)
            a = batch.data["a"].reshape(8, 5)
            np.testing.assert_array_equal(a, a[:, :1] + np.arange(5))
            np.testing.assert_array_equal(batch.data["b"][:, 0], 10 * batch.data["a"])
        assert sum(stats.received_samples for stats in dataset.stats()) >= 80


def test_batches_may_grow_and_outgrown_memory_goes(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay", 1))  # each item displaces the one before
    options: dict[str, Any] = {"num_workers": 1, "collate": "flat", "reuse_buffers": True}
    with rw.Client(server.address) as client, rw.ReplayDataset(client, "replay", 4, **options) as dataset:
        for length in (1, 30, 300, 1000):
            client.insert([np.repeat(np.arange(length)[:, None], 500, axis=1)], {"replay": 1.0})

            def is_there(length: int = length) -> bool:
                (rows,), info = next(dataset)
                expected = np.concatenate([np.arange(of_one) for of_one in info.lengths])
                np.testing.assert_array_equal(rows, np.repeat(expected[:, None], 500, axis=1))
                return bool((info.lengths == length).all())

            assert eventually(is_there, 60)
        for _ in range(20):
            assert is_there()
        maps = psutil.Process().memory_maps(grouped=False)
        sizes = [mapping.size for mapping in maps if "reverb-writer" in mapping.path]
    # Four buffers of 16 MB, of up to twice what is needed, and one of which the end is not told yet.
    assert len(sizes) <= 5
    assert sum(sizes) <= 5 * 2 * 16_000_000


# Nothing comes.


def test_empty_table_is_named_and_the_next_call_goes_on(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("replay", rate_limiter=rw.MinSize(3)))
    with rw.ReplayDataset(server.address, "replay", 2, timeout_s=0.3, num_workers=2) as dataset:
        assert eventually(lambda: "is empty" in message_of_time_out(dataset))
        insert_numbers(server.address, "replay", range(2))
        assert "waits for 1 more" in message_of_time_out(dataset)
        insert_numbers(server.address, "replay", [2])
        dataset.timeout_s = 30.0
        assert set(first_numbers(next(dataset))) <= {0, 1, 2}


def test_last_batch_is_smaller_if_the_iteration_is_to_stop(replay_server: StartServer) -> None:
    # 2 x 2 - 5 = -1: five samples are let out.
    server = replay_server(rw.TableConfig("replay", rate_limiter=rw.SampleToInsertRatio(2.0, 2, (-1, 100))))
    insert_numbers(server.address, "replay", range(2))
    options: dict[str, Any] = {"timeout_s": 1.0, "on_timeout": "stop", "max_in_flight_batches": 3, "num_workers": 1}
    with rw.ReplayDataset(server.address, "replay", 2, **options) as dataset:
        assert eventually(lambda: dataset.stats().received_samples == 5)
        assert [len(first_numbers(batch)) for batch in dataset] == [2, 2, 1]
        assert list(dataset) == []
        insert_numbers(server.address, "replay", [2])
        assert eventually(lambda: dataset.stats().received_samples == 7)
        assert sum(len(first_numbers(batch)) for batch in dataset) == 2


@pytest.mark.parametrize("skip", [False, True])
def test_unsafe_item_is_an_error_of_its_own_or_counted(replay_server: StartServer, skip: bool) -> None:
    server = replay_server(REPLAY)
    insert_numbers(server.address, "replay", [1, 2, 3])
    with rw.Client(server.address) as client:
        insert_variant(client, "replay")
    good = errors = 0
    with rw.ReplayDataset(server.address, "replay", 4, num_workers=2, skip_unsafe=skip) as dataset:
        for _ in range(60):
            try:
                assert set(first_numbers(next(dataset))) <= {1, 2, 3}
                good += 1
            except rw.UnsafeDataError as error:
                errors += "DT_VARIANT" in str(error)
        skipped = dataset.stats().skipped_samples
    assert good + errors == 60
    assert good > 0
    assert (errors == 0, skipped > 0) == (skip, skip)


# What is told.


def test_counters_are_sums_and_workers_share_the_cache(address: str) -> None:
    with rw.ReplayDataset(address, "replay", 4, num_workers=2, max_cache_bytes=500_000) as dataset:
        # Two batches ahead in each process, and one of each here.
        assert eventually(lambda: dataset.stats().ready_samples == 24)
        stats = dataset.stats()
        assert stats.received_samples >= 24
        assert stats.decoded_chunks > 0
        for _ in range(40):
            check_frames(next(dataset))
            stats = dataset.stats()
            assert 0 < stats.cache_bytes <= 500_000  # of 840,000 that the items take
        assert (stats.batches, stats.samples) == (40, 160)
    stats = dataset.stats()
    assert stats.received_samples >= 160
    assert stats.undelivered_samples == stats.ready_samples > 0


def test_two_servers_and_two_workers_for_each(replay_server: StartServer) -> None:
    servers = [replay_server(rw.TableConfig("replay", 100, rw.Prioritized(1.0))) for _ in range(2)]
    for number, server in enumerate(servers):
        insert_numbers(server.address, "replay", [number] * 3)
    addresses = [server.address for server in servers]
    keys: dict[str, set[int]] = {address: set() for address in addresses}
    with rw.Client(addresses) as client, rw.ReplayDataset(client, "replay", 4, num_workers=2) as dataset:

        def both_seen() -> bool:
            batch = next(dataset)
            assert set(first_numbers(batch)) == {addresses.index(batch.info.server)}
            keys[batch.info.server] |= set(batch.info.keys.tolist())
            dataset.update_priorities(batch.info.keys, np.full(4, 5.0))
            return all(keys.values())

        assert eventually(both_seen)
        dataset.flush_priorities()
        for one in client.each():
            infos = [sample.info for sample in one.sample("replay", 30)]
            assert {info.priority for info in infos if info.key in keys[one.address]} <= {5.0}


# Refused.


@pytest.mark.parametrize("single_pass", [False, True])
def test_table_that_gives_items_away_is_refused(replay_server: StartServer, single_pass: bool) -> None:
    address = replay_server(QUEUE).address
    with pytest.raises(rw.SpecError, match=r"`num_workers` must be 0 for `queue`.* sampled 1 times, got 2"):
        rw.ReplayDataset(address, "queue", 2, num_workers=2, single_pass=single_pass)


def test_negative_number_is_refused(replay_server: StartServer) -> None:
    with pytest.raises(rw.SpecError, match=r"`num_workers` must be .*-1"):
        rw.ReplayDataset(replay_server(REPLAY).address, "replay", 2, num_workers=-1)


def test_system_without_shared_memory_is_named(replay_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = replay_server(REPLAY).address
    monkeypatch.delattr(os, "memfd_create")
    before = psutil.Process().children()
    with pytest.raises(rw.SpecError, match=r"`num_workers` must be 0 here, got 1: worker processes need Linux"):
        rw.ReplayDataset(address, "replay", 2, num_workers=1)
    assert psutil.Process().children() == before


# The way there.


def test_server_that_was_started_again_is_found(lone_server: StartServer) -> None:
    server = lone_server(REPLAY)
    insert_numbers(server.address, "replay", [1])
    with rw.ReplayDataset(server.address, "replay", 2, num_workers=2, timeout_s=60) as dataset:
        assert first_numbers(next(dataset)) == [1, 1]
        assert eventually(lambda: dataset.stats().ready_samples == 12)  # both are there
        server.process.kill()
        server.process.restart()
        insert_numbers(server.address, "replay", [2])
        assert eventually(lambda: first_numbers(next(dataset)) == [2, 2])
        assert eventually(lambda: dataset.stats().server_restarts >= 1)  # 2, had the other worker started by then
        assert dataset.stats().reconnects >= 1


def test_server_that_is_gone_is_named(lone_server: StartServer) -> None:
    server = lone_server(REPLAY)
    with rw.ReplayDataset(server.address, "replay", 2, num_workers=1) as dataset:
        server.process.kill()
        dataset.timeout_s = 0.3

        def message() -> str:
            with pytest.raises((rw.ServerUnavailableError, rw.ReplayTimeoutError)) as caught:
                next(dataset)
            return f"{type(caught.value).__name__}: {caught.value}"

        assert eventually(lambda: message().startswith("ServerUnavailableError"))
        assert "is gone, last heard of" in message()
        server.process.restart()
        insert_numbers(server.address, "replay", [2])
        dataset.timeout_s = 60.0
        assert first_numbers(next(dataset)) == [2, 2]


@pytest.mark.skipif(OPENSSL is None, reason="the openssl command, which makes the certificates, is missing")
def test_certificates_and_tokens_are_used_there_too(address: str, tmp_path: Path) -> None:
    gateway, learner = make_identity(tmp_path, "gateway"), make_identity(tmp_path, "learner")
    tls = rw.TLS(gateway.certificate, learner.certificate, learner.private_key)
    with (
        Forwarder(int(address.rpartition(":")[2]), tls=server_context(gateway, learner)) as forwarder,
        rw.Client(forwarder.address, tls=tls, token=SESAME, timeout_s=60) as client,
    ):
        client.server_info()
        connections = forwarder.accepted
        with rw.ReplayDataset(client, "replay", 8, num_workers=1) as dataset:
            assert len(check_frames(next(dataset))) == 8
        assert forwarder.accepted > connections
        gateway.certificate.unlink()  # read by each process for itself
        with rw.ReplayDataset(client, "replay", 8, num_workers=1) as dataset:
            with pytest.raises(rw.SpecError, match="cannot use the PEM files"):
                next(dataset)
            assert list(dataset) == []
