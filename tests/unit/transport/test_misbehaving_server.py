"""What a server sends, asked for or not: nothing makes us wait beyond measure, grow, or raise what nobody expects."""

from __future__ import annotations

import gc
import itertools
import queue
import re
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import sampled
from misbehaving import MisbehavingServer, server_info
from numbered import first_numbers
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer.protocol import messages, responses
from reverb_writer.transport import loop
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream, Pipe
from reverb_writer.transport.sample_stream import SampleStream


@pytest.fixture
def misbehaving() -> Iterator[MisbehavingServer]:
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
        (b"\xff\xff", "not a ServerInfoResponse"),
        (b"\x00" * (9 << 20), "larger than max"),
        (b"\x00" * (64 << 20), "larger than max"),
        (server_info(*map(str, range(10_001))), "10001 tables"),
        (server_info(*map(str, range(9_999)), "replay"), ""),
    ],
    ids=["damaged", "large", "very large", "too many tables", "many tables"],
)
def test_server_info_beyond_measure_is_refused_and_a_waiting_step_keeps_its_time(
    misbehaving: MisbehavingServer, info: bytes, message: str
) -> None:
    options: Any = {"max_delay_s": 0.01, "max_in_flight_items": 1, "timeout_s": 3}
    observer = rw.TrajectoryObserver(misbehaving.address, "replay", 1, **options)
    observer({"n": np.int64(0)}, end_of_episode=False)
    time.sleep(0.5)  # the stream is open
    misbehaving.info = info
    began_at = time.monotonic()
    told = f"does not say .* {message}" if message else "is slow"
    with pytest.raises(rw.errors.ReplayTimeoutError, match=told):
        observer({"n": np.int64(1)}, end_of_episode=False)
    assert time.monotonic() - began_at < 30  # it was more with answers of megabytes
    with pytest.raises(rw.errors.ReplayTimeoutError):
        observer.close(0.1)
    if message:
        kind = rw.errors.ReverbWriterError if "larger" in message else rw.errors.FormatError
        with rw.Client(misbehaving.address, timeout_s=60) as client, pytest.raises(kind, match=message):
            client.server_info()


def test_acknowledgement_and_answer_to_a_checkpoint_that_are_none_are_named(misbehaving: MisbehavingServer) -> None:
    misbehaving.insert = lambda requests: (b"\xff\xff" for _ in requests)
    misbehaving.checkpoint = b"\xff\xff"
    none = r"not a.* InsertStreamResponse"
    with rw.Client(misbehaving.address) as client:
        with pytest.raises(rw.errors.FormatError, match="not a CheckpointResponse"):
            client.checkpoint()
        with pytest.raises(rw.errors.FormatError, match=none):
            client.insert({"n": np.zeros(1)}, {"replay": 1.0})
        observer = rw.TrajectoryObserver(client, "replay", 1, max_delay_s=0.01)
        observer({"n": np.int64(0)}, end_of_episode=False)
        with pytest.raises(rw.errors.FormatError, match=none):
            observer.flush()
        with pytest.raises(rw.errors.FormatError):
            observer.close()


def test_refusal_that_ends_an_idle_stream_is_over_when_the_server_accepts_again(
    misbehaving: MisbehavingServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first stream is refused, when nothing is in flight."""
    refuse = threading.Event()
    streams = itertools.count()

    def confirm(requests: Iterator[bytes]) -> Iterator[bytes]:
        is_first = not next(streams)
        for request in requests:
            keys = [item.key for item in messages.InsertStreamRequest.FromString(request).items]
            yield messages.InsertStreamResponse(keys=keys).SerializeToString()
            if is_first:
                refuse.wait(60)
                raise PermissionError("the token is renewed")

    misbehaving.insert = confirm
    with rw.TrajectoryObserver(misbehaving.address, "replay", 1, max_delay_s=0.01, timeout_s=60) as observer:
        observer({"n": np.int64(0)}, end_of_episode=False)
        observer.flush()
        refuse.set()
        eventually(lambda: "the token is renewed" in caplog.text)
        observer({"n": np.int64(1)}, end_of_episode=False)
        observer.flush()
        assert observer.stats().acknowledged_items == 2


@pytest.mark.parametrize("num_asked", [0, 2])
def test_unasked_samples_end_the_stream_and_do_not_pile_up(misbehaving: MisbehavingServer, num_asked: int) -> None:
    misbehaving.sample = lambda _: itertools.repeat(sample())
    with Channel(misbehaving.address) as channel:
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
    with rw.ReplayDataset(misbehaving.address, "replay", 4, timeout_s=60) as dataset:
        for _ in range(3):
            with pytest.raises(rw.errors.FormatError):
                next(dataset)
        stats = dataset.stats()
        assert stats.ready_samples + stats.in_flight_samples <= 4 * 16
        eventually(lambda: dataset.stats().unasked_samples > 0)


@pytest.mark.parametrize("is_open", [False, True])
def test_stream_that_has_ended_is_freed_without_the_collector(misbehaving: MisbehavingServer, is_open: bool) -> None:
    """It refers to its channel, and the channel to the connection."""
    loop_is_busy, loop_may_go_on = threading.Event(), threading.Event()
    with Channel(misbehaving.address) as channel:
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
            stream.close()
            del stream
            loop_may_go_on.set()
            eventually(lambda: alive() is None)
        finally:
            gc.enable()


def test_error_that_ends_a_stream_keeps_no_frames(misbehaving: MisbehavingServer) -> None:
    """They have gRPC's call, which keeps the connection as long as someone keeps the error."""
    met: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel = Channel(misbehaving.address)
    for end, kind, text in (
        (partial(channel.redirect, misbehaving.address), rw.errors.ServerUnavailableError, "the server has moved to "),
        (channel.close, rw.errors.ClosedError, "is closed"),
    ):
        pipe = Pipe(channel, messages.SAMPLE_STREAM, met.put)
        eventually(lambda pipe=pipe: pipe._call is not None)  # type: ignore[misc]  # a default
        end()
        error = met.get(timeout=30)
        assert type(error) is kind
        assert re.search(text, str(error))
        assert (error.__traceback__, error.__context__, error.__cause__) == (None, None, None)


def test_stream_that_is_closed_while_the_loop_opens_it_leaves_no_call_at_the_server(
    misbehaving: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes between the loop's two steps: the stream is asked for, and its call begins."""
    met: queue.SimpleQueue[Any] = queue.SimpleQueue()
    channel, spawn, opened = Channel(misbehaving.address), loop.spawn, list[str]()
    open_call, closed = channel.open, threading.Event()

    def close_first(work: Any) -> Any:
        pipe.close()
        closed.set()
        return spawn(work)

    def note(method: str) -> Any:
        opened.append(method)
        return open_call(method)

    monkeypatch.setattr(channel, "open", note)
    monkeypatch.setattr(loop, "spawn", close_first)
    held = threading.Event()
    loop.submit(lambda: held.wait(30))  # until `pipe` has its name
    pipe = Pipe(channel, messages.SAMPLE_STREAM, met.put)
    held.set()
    assert closed.wait(30)
    monkeypatch.setattr(loop, "spawn", spawn)
    done = threading.Event()
    loop.submit(lambda: loop.submit(lambda: loop.submit(done.set)))
    assert done.wait(30)
    assert not opened
    channel.close()


def test_sample_that_has_no_end_is_refused_however_little_it_brings(
    misbehaving: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_PARTS", 10_000)
    for chunks in (0, 100):
        endless = sample(chunks=chunks, ends=False)
        misbehaving.sample = lambda _, endless=endless: itertools.repeat(endless)  # type: ignore[misc]  # bound in the loop
        with (
            rw.Client(misbehaving.address, timeout_s=60) as client,
            pytest.raises(rw.errors.FormatError, match="has no end"),
        ):
            next(client.sample("replay", 1))


def test_samples_in_flight_are_read_when_a_dataset_is_closed(
    misbehaving: MisbehavingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reverb_writer.reading.table_reader._MAX_SILENCE_S", 30.0)
    may_come = threading.Event()

    def answer(requests: Iterator[bytes]) -> Iterator[bytes]:
        next(requests)
        may_come.wait(30)
        yield sampled.response((sampled.item(1, [[(7, 0, 1, 0)]]), [sampled.chunk(7, [np.arange(5, 6)])]))

    misbehaving.info, misbehaving.sample = server_info("replay", max_times_sampled=1), answer
    with rw.ReplayDataset(misbehaving.address, "replay", 1, timeout_s=60) as dataset:
        iter(dataset)
        eventually(lambda: dataset.stats().in_flight_samples == 1)
        dataset.reader._prefetcher._feed.heard_at -= 60  # the silence counts from the end on
        with soon(may_come.set):
            dataset.close()
        assert [first_numbers(batch) for batch in dataset] == [[5]]
