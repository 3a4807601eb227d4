"""The rate limiter of a local server beside dm-reverb's: the same inserts and samples, and the same get through."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import ServerProcess
from store_messages import chunk, item

import reverb_writer as rw
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream

pytestmark = pytest.mark.only_server("reverb", "it compares dm-reverb with a local server of its own")

TIMEOUT_S = 60.0
SETTLED_S = 0.02
Counts = tuple[int, int, int]


class Ends:
    """An insert stream and sample streams of one server, which never wait for its answers."""

    def __init__(self, address: str, table: str) -> None:
        self._table = table
        self._channel = Channel(address)
        self._streams = [ByteStream(self._channel, messages.INSERT_STREAM)]
        self._keys = itertools.count(1)
        self._has_chunk = False

    def insert(self) -> None:
        request = messages.StoredRequest(items=[item(next(self._keys), 7, self._table)], keep_chunk_keys=[7])
        if not self._has_chunk:
            self._has_chunk = True
            request.chunks.append(chunk(7))
        self._streams[0].send(request.SerializeToString())

    def sample(self) -> None:
        request = messages.SampleStreamRequest(table=self._table, num_samples=1).SerializeToString()
        self._streams.append(ByteStream(self._channel, messages.SAMPLE_STREAM))
        self._streams[-1].send(request)

    def counts(self) -> Counts:
        table = self._channel.server_info(TIMEOUT_S).tables[self._table]
        return table.rate_limiter.num_inserts, table.rate_limiter.num_samples, table.current_size

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()
        self._channel.close()


@st.composite
def limiters(draw: st.DrawFn) -> Any:
    ratio = draw(st.sampled_from([0.5, 1.0, 2.0, 3.5]))
    min_size = draw(st.integers(1, 4))
    extra = draw(st.sampled_from([0.0, 1.0, 2.5]))
    return rw.SampleToInsertRatio(ratio, min_size, max(1.0, ratio) + extra)


@st.composite
def tables(draw: st.DrawFn) -> rw.TableConfig:
    limiter = draw(limiters() | st.builds(rw.MinSize, st.integers(1, 4)))
    sampler: Any = draw(st.sampled_from(["fifo", "uniform", "lifo"]))
    # It depends on chance how many items a uniform sampler has drawn twice.
    times = [0, 1] if sampler == "uniform" else [0, 1, 2]
    return rw.TableConfig(
        "replay",
        draw(st.sampled_from([4, 6, 100])),
        sampler,
        rate_limiter=limiter,
        max_times_sampled=draw(st.sampled_from(times)),
    )


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
@pytest.mark.filterwarnings("ignore:`error_buffer`")
@given(table=tables(), turns=st.lists(st.sampled_from(["insert", "insert", "sample"]), min_size=1, max_size=25))
def test_the_same_inserts_and_samples_get_through(
    shared_process: ServerProcess, table: rw.TableConfig, turns: list[str]
) -> None:
    theirs = shared_process.start(table)
    try:
        with rw.LocalServer([table]) as ours, pair(theirs.address, ours.address) as ends:
            for number, turn in enumerate(turns):
                for end in ends:
                    getattr(end, turn)()
                assert settled(*ends), (number, [end.counts() for end in ends])
    finally:
        theirs.stop()


@contextlib.contextmanager
def pair(*addresses: str) -> Iterator[list[Ends]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Ends(address, "replay"))) for address in addresses]


def settled(theirs: Ends, ours: Ends) -> bool:
    """Wait until both agree, and go on agreeing for a while."""
    until = time.monotonic() + TIMEOUT_S / 4
    while time.monotonic() < until:
        counts = theirs.counts(), ours.counts()
        if counts[0] == counts[1]:
            time.sleep(SETTLED_S)
            if (theirs.counts(), ours.counts()) == counts:
                return True
    return False
