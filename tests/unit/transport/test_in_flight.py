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
    return InsertRequest(frozenset(["replay"]), first_key, rows, chunks, 100)


def keys(of: Iterable[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    return np.array(list(of), np.uint64)


def sent(flight: InFlight) -> tuple[list[int], list[int], list[int]]:
    """Take all there is as one message; return its item keys, its chunk keys and the chunks that it keeps."""
    message = InsertStreamRequest.FromString(flight.take_message(1 << 30))
    items, chunks = [item.key for item in message.items], [chunk.chunk_key for chunk in message.chunks]
    return items, chunks, sorted(message.keep_chunk_keys)


def test_lost_connection_sends_what_was_not_acknowledged_again_with_its_chunks_and_nothing_else() -> None:
    flight = InFlight()
    flight.add(request(10, 3, 7))
    flight.add(request(20, 2, 8))
    flight.add(request(30, 1, 9))
    sent(flight)
    flight.acknowledge(keys([11, 20, 21]))
    assert (flight.pending, flight.pending_bytes, flight.sent_items) == (3, 200, 3)
    flight.requeue()
    assert sent(flight) == ([10, 12, 30], [7, 9], [])
    flight.acknowledge(keys([30, 12, 10]))
    assert (flight.pending, flight.pending_bytes, flight.sent_items) == (0, 0, 0)


@pytest.mark.parametrize("unknown", [[0], [9], [13], [2**63], [2**64 - 1]])
def test_keys_that_are_not_on_their_way_are_ignored(unknown: list[int]) -> None:
    flight = InFlight()
    flight.add(request(10, 3, 7))
    sent(flight)
    flight.acknowledge(keys([*unknown, 10, 10]))
    assert (flight.acknowledged, flight.pending) == (1, 2)
