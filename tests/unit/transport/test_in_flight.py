"""What is sent, sent again and given up, by the messages that the real protobuf parser reads back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from reverb_writer.protocol.item_encoding import encode_chunk
from reverb_writer.protocol.messages import InsertStreamRequest, PrioritizedItem
from reverb_writer.transport.in_flight import InFlight, InsertRequest


def request(first_key: int, num_items: int, *chunk_keys: int) -> InsertRequest:
    """Return a request with a block of rows for each item."""
    items = (PrioritizedItem(key=key, table="replay") for key in range(first_key, first_key + num_items))
    rows = [np.frombuffer(InsertStreamRequest(items=[item]).SerializeToString(), np.uint8)[None] for item in items]
    chunks = {key: encode_chunk(key, 0, 0, [np.zeros(1)]) for key in chunk_keys}
    return InsertRequest(frozenset(["replay"]), first_key, rows, chunks)


def size_of(request: InsertRequest) -> int:
    """Return the bytes of a request and all its chunks."""
    return sum(rows.nbytes for rows in request.rows) + sum(map(len, request.chunks.values()))


def keys(of: Iterable[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(list(of), np.uint64)


def sent(flight: InFlight) -> tuple[list[int], list[int], list[int]]:
    """Take all there is as one message; return its item keys, its chunk keys and the chunks that it keeps."""
    message = InsertStreamRequest.FromString(flight.take_message(1 << 30))
    items, chunks = [item.key for item in message.items], [chunk.chunk_key for chunk in message.chunks]
    return items, chunks, sorted(message.keep_chunk_keys)


def test_lost_connection_sends_what_was_not_acknowledged_again_with_its_chunks_and_nothing_else() -> None:
    flight = InFlight()
    first, second, third = request(10, 3, 7), request(20, 2, 8), request(30, 1, 9)
    for each in (first, second, third):
        flight.add(each)
    sent(flight)
    flight.acknowledge(keys([11, 20, 21]))
    assert (flight.pending, flight.pending_bytes, flight.has_sent) == (3, size_of(first) + size_of(third), True)
    flight.requeue()
    assert sent(flight) == ([10, 12, 30], [7, 9], [])
    flight.acknowledge(keys([30, 12, 10]))
    assert (flight.pending, flight.pending_bytes, flight.has_sent) == (0, 0, False)


def test_chunk_counts_once_and_until_the_last_request_that_holds_it_is_confirmed() -> None:
    flight = InFlight()
    first, second = request(10, 1, 7, 8), request(20, 1, 8, 9)
    flight.add(first)
    flight.add(second)
    assert flight.pending_bytes == size_of(first) + size_of(second) - len(first.chunks[8])
    sent(flight)
    flight.acknowledge(keys([10]))
    assert flight.pending_bytes == size_of(second)
    flight.acknowledge(keys([20]))
    assert flight.pending_bytes == 0


@pytest.mark.parametrize("unknown", [[0], [9], [13], [2**63], [2**64 - 1]])
def test_keys_that_are_not_on_their_way_are_ignored(unknown: list[int]) -> None:
    flight = InFlight()
    flight.add(request(10, 3, 7))
    sent(flight)
    flight.acknowledge(keys([*unknown, 10, 10]))
    assert (flight.acknowledged, flight.pending) == (1, 2)
