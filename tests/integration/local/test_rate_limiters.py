"""A local server's rate limiter beside dm-reverb's: the same inserts and samples, and the same get through."""

from __future__ import annotations

import contextlib
import itertools
import time
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
            stream.close()
        self._channel.close()


@st.composite
def tables(draw: st.DrawFn) -> rw.TableConfig:
    ratio, min_size = draw(st.sampled_from([0.5, 1.0, 2.0, 3.5])), draw(st.integers(1, 4))
    by_ratio = rw.SampleToInsertRatio(ratio, min_size, max(1.0, ratio) + draw(st.sampled_from([0.0, 1.0, 2.5])))
    sampler: Any = draw(st.sampled_from(["fifo", "uniform", "lifo"]))
    # It depends on chance how many items a uniform sampler has drawn twice.
    times = draw(st.sampled_from([0, 1] if sampler == "uniform" else [0, 1, 2]))
    limiter: Any = draw(st.sampled_from([by_ratio, rw.MinSize(min_size)]))
    max_size = draw(st.sampled_from([4, 6, 100]))
    return rw.TableConfig("replay", max_size, sampler, rate_limiter=limiter, max_times_sampled=times)


@pytest.mark.only_server("reverb", "it compares dm-reverb with a local server of its own")
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@pytest.mark.filterwarnings("ignore:`error_buffer`")
@given(table=tables(), turns=st.lists(st.sampled_from(["insert", "insert", "sample"]), min_size=1, max_size=25))
def test_the_same_inserts_and_samples_get_through(
    shared_process: ServerProcess, table: rw.TableConfig, turns: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        theirs, ours = shared_process.start(table), stack.enter_context(rw.LocalServer([table]))
        stack.callback(theirs.stop)
        ends = [stack.enter_context(contextlib.closing(Ends(one.address, "replay"))) for one in (theirs, ours)]
        for number, turn in enumerate(turns):
            for end in ends:
                getattr(end, turn)()
            assert settled(*ends), (number, [end.counts() for end in ends])


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
