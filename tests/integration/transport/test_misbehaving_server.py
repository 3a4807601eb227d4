"""What a server sends, asked for or not: nothing makes us wait beyond measure, grow, or raise what nobody expects."""

from __future__ import annotations

import gc
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from misbehaving import MisbehavingServer, server_info
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol import messages, responses
from reverb_writer.transport import loop
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream, Pipe
from reverb_writer.transport.sample_stream import SampleStream


@pytest.fixture
def server() -> Iterator[MisbehavingServer]:
    with MisbehavingServer() as server:
        yield server


def sample(*, chunks: int = 1, ends: bool = True) -> bytes:
    """Return a response with one sample, or a part of one, of empty chunks."""
    response = messages.SampleStreamResponse()
    entry = response.entries.add()
    entry.info.item.key, entry.info.item.table = 1, "replay"
    for _ in range(chunks):
        entry.data.add()
    entry.end_of_sequence = ends
    reply: bytes = response.SerializeToString()
    return reply


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (b"\x00" * (9 << 20), "larger than max"),
        (b"\x00" * (64 << 20), "larger than max"),
        (server_info(*map(str, range(10_001))), "10001 tables"),
        (b"\xff\xff", "not a ServerInfoResponse"),
    ],
    ids=["large", "very large", "many tables", "damaged"],
)
def test_server_info_beyond_all_measure_or_that_is_none_is_refused(
    server: MisbehavingServer, info: bytes, message: str
) -> None:
    server.info = info
    kind = rw.errors.ReverbWriterError if "larger" in message else rw.errors.FormatError
    with rw.Client(server.address, timeout_s=60) as client, pytest.raises(kind, match=message):
        client.server_info()


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (b"\xff\xff", "does not say .* not a ServerInfoResponse"),
        (b"\x00" * (9 << 20), "does not say .* larger than max"),
        (server_info(*map(str, range(9_999)), "replay"), "is slow"),
    ],
    ids=["damaged", "large", "many tables"],
)
def test_step_that_waits_keeps_its_time_whatever_the_server_tells(
    server: MisbehavingServer, info: bytes, words: str
) -> None:
    observer = rw.TrajectoryObserver(server.address, "replay", 1, max_delay_s=0.01, max_in_flight_items=1, timeout_s=3)
    observer({"n": np.int64(0)}, end_of_episode=False)
    time.sleep(0.5)  # the stream is open
    server.info = info
    began_at = time.monotonic()
    with pytest.raises(rw.errors.ReplayTimeoutError, match=words):
        observer({"n": np.int64(1)}, end_of_episode=False)
    assert time.monotonic() - began_at < 30  # it was more with answers of megabytes
    with pytest.raises(rw.errors.ReplayTimeoutError):
        observer.close(0.1)


def test_acknowledgement_that_is_none_is_named(server: MisbehavingServer) -> None:
    server.insert = lambda requests: (b"\xff\xff" for _ in requests)
    none = r"not a.* InsertStreamResponse"
    with rw.Client(server.address) as client:
        with pytest.raises(rw.errors.FormatError, match=none):
            client.insert({"n": np.zeros(1)}, {"replay": 1.0})
        observer = rw.TrajectoryObserver(client, "replay", 1, max_delay_s=0.01)
        observer({"n": np.int64(0)}, end_of_episode=False)
        with pytest.raises(rw.errors.FormatError, match=none):
            observer.flush()
        with pytest.raises(rw.errors.FormatError):
            observer.close()


def test_answer_to_a_checkpoint_that_is_none_is_named(server: MisbehavingServer) -> None:
    server.checkpoint = b"\xff\xff"
    with rw.Client(server.address) as client, pytest.raises(rw.errors.FormatError, match="not a CheckpointResponse"):
        client.checkpoint()


@pytest.mark.parametrize("num_asked", [0, 2])
def test_samples_that_nobody_asked_for_end_the_stream(server: MisbehavingServer, num_asked: int) -> None:
    server.sample = lambda _: itertools.repeat(sample())
    with Channel(server.address) as channel:
        info = channel.server_info(60.0)
        stream = SampleStream(channel, "replay", info, changed=lambda: None, removes_items=False)
        stream.proceed(time.monotonic(), 0, num_asked)
        for _ in range(num_asked):
            eventually(lambda: stream.has_unread)
            assert len(stream.read()) == 1
        eventually(lambda: stream.has_unread)
        with pytest.raises(rw.errors.FormatError, match="1 samples without being asked"):
            stream.read()
        assert stream.num_unasked == 1
        assert stream.num_in_flight == 0
        assert not stream.read()
        stream.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_stream_that_has_ended_is_freed_without_the_collector(server: MisbehavingServer, is_open: bool) -> None:
    """It refers to its channel, and the channel to the connection."""
    loop_is_busy, loop_may_go_on = threading.Event(), threading.Event()
    with Channel(server.address) as channel:
        gc.collect()
        gc.disable()
        try:
            if not is_open:  # the loop looks at the stream when it is closed already
                loop.submit(loop_is_busy.set)
                loop.submit(loop_may_go_on.wait, 30)
                assert loop_is_busy.wait(30)
            stream = ByteStream(channel, messages.SAMPLE_STREAM)
            alive = weakref.ref(stream)
            if is_open:
                pipe = stream._pipe
                assert isinstance(pipe, Pipe)
                eventually(lambda: pipe._call is not None)
            stream.cancel()
            del stream
            loop_may_go_on.set()
            eventually(lambda: alive() is None)
        finally:
            gc.enable()


def test_error_that_ends_a_stream_keeps_no_frames(server: MisbehavingServer) -> None:
    """They have gRPC's call, which keeps the connection as long as someone keeps the error."""
    met: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with Channel(server.address) as channel:
        pipe = Pipe(channel, messages.SAMPLE_STREAM, met.put)
        eventually(lambda: pipe._call is not None)
    error = met.get(timeout=30)
    assert isinstance(error, rw.errors.ClosedError)
    assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_samples_that_nobody_asked_for_do_not_pile_up_at_a_learner(server: MisbehavingServer) -> None:
    server.sample = lambda _: itertools.repeat(sample())
    with rw.ReplayDataset(server.address, "replay", 4, timeout_s=60) as dataset:
        for _ in range(3):
            with pytest.raises(rw.errors.FormatError):
                next(dataset)
        stats = dataset.stats()
        assert stats.ready_samples + stats.in_flight_samples <= 4 * 16
        eventually(lambda: dataset.stats().unasked_samples > 0)


def test_sample_that_has_no_end_is_refused_however_little_it_brings(
    server: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_PARTS", 10_000)
    for chunks in (0, 100):
        endless = sample(chunks=chunks, ends=False)
        server.sample = lambda _, endless=endless: itertools.repeat(endless)  # type: ignore[misc]  # bound in the loop
        with (
            rw.Client(server.address, timeout_s=60) as client,
            pytest.raises(rw.errors.FormatError, match="has no end"),
        ):
            next(client.sample("replay", 1))
