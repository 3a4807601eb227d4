"""Damaged requests to a local server: refused, and the next one is answered. `make fuzz` reads a million."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from damage import damaged
from store_messages import Inserter, chunk, item, store_of

import reverb_writer as rw
from reverb_writer.local.refusals import Refusal
from reverb_writer.local.streams import InsertStream
from reverb_writer.protocol import messages

NUM_REQUESTS = int(os.environ.get("REVERB_WRITER_FUZZ", "10000"))
OVER_NETWORK = 20  # of so many requests, one goes over gRPC, which takes most of the time
MAX_BYTES = 1 << 20
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
INSERT = messages.StoredRequest(
    chunks=[chunk(3), chunk(4)], items=[item(1, 3), item(2, 4, priority=2.0)], keep_chunk_keys=[3, 4]
).SerializeToString()
SAMPLE = messages.SampleStreamRequest(table="replay", num_samples=2).SerializeToString()
MUTATE = messages.MutatePrioritiesRequest(
    table="replay", updates=[messages.KeyWithPriority(key=1, priority=2.0)], delete_keys=[2]
).SerializeToString()
RESET = messages.ResetRequest(table="replay").SerializeToString()


def test_damaged_insert_requests_are_refused_and_the_next_is_answered() -> None:
    rng = random.Random(5)  # noqa: S311  # no secret
    store = store_of(rw.TableConfig("replay", 100, rw.Prioritized(1.0), "min_heap"), max_bytes=MAX_BYTES)
    num_refused = 0
    for _ in range(NUM_REQUESTS):
        stream = InsertStream(store, lambda _: None)
        try:
            stream.take(damaged(INSERT, rng))
        except Refusal:
            num_refused += 1
        stream.end()
    assert NUM_REQUESTS / 2 < num_refused < NUM_REQUESTS
    assert store.chunks.num_bytes <= MAX_BYTES
    store.table("replay").reset()
    assert store.chunks.num_bytes == len(store.chunks) == 0
    inserter = Inserter(store)
    inserter.insert([1])
    assert inserter.confirmed() == [1]


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    tables = [rw.TableConfig("replay", 100, rw.Prioritized(1.0), "min_heap")]
    with rw.LocalServer(tables, max_bytes=MAX_BYTES) as server, grpc.insecure_channel(server.address) as channel:
        yield channel


def test_damaged_requests_over_the_network_are_answered_and_so_is_the_next(channel: grpc.Channel) -> None:
    rng = random.Random(6)  # noqa: S311  # no secret
    answers = set()
    for number in range(max(NUM_REQUESTS // OVER_NETWORK, 200)):
        method, message = rng.choice(
            [
                (messages.INSERT_STREAM, INSERT),
                (messages.SAMPLE_STREAM, SAMPLE),
                (messages.MUTATE_PRIORITIES, MUTATE),
                (messages.RESET, RESET),
            ]
        )
        assert stream(channel, messages.INSERT_STREAM, INSERT) is grpc.StatusCode.OK, number
        request = damaged(message, rng)
        if method in (messages.INSERT_STREAM, messages.SAMPLE_STREAM):
            answer = stream(channel, method, request)
        else:
            try:
                call: Any = channel.unary_unary(method)
                call(request, timeout=60)
                answer = grpc.StatusCode.OK
            except grpc.RpcError as error:
                answer = error.code()
        answers.add(answer)
        assert answer in ANSWERS, (method, request.hex())
    assert grpc.StatusCode.INVALID_ARGUMENT in answers
    server_info: Any = channel.unary_unary(messages.SERVER_INFO)
    assert b"replay" in server_info(b"", timeout=60)


def stream(channel: grpc.Channel, method: str, request: bytes) -> grpc.StatusCode:
    """Send one request by a stream and read one response; return the status, OK if one came."""
    start: Any = channel.stream_stream(method)
    call = start(iter([request]), timeout=60)
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code()
    else:
        return grpc.StatusCode.OK
    finally:
        call.cancel()
