"""Insert requests made by hand, and a store to feed them to, without a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import encode_responses
from reverb_writer.local.streams import InsertStream
from reverb_writer.local.table import SampleRequest
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.tables import TableConfig


def store_of(*tables: TableConfig, max_bytes: int = 1 << 30) -> Store:
    return Store(tables, max_bytes)


def chunk(key: int, episode: int = 1, data: bytes = b"\0") -> bytes:
    """Return an encoded ChunkData with one tensor."""
    made = messages.ChunkData(chunk_key=key, data_tensors_len=1)
    made.sequence_range.episode_id = episode
    made.data.tensors.add(dtype=messages.DataType.DT_UINT8, tensor_content=data)
    encoded: bytes = made.SerializeToString()
    return encoded


def item(key: int, chunk_key: int, table: str = "replay", priority: float = 1.0) -> bytes:
    """Return an encoded PrioritizedItem of one row of one chunk."""
    made = messages.PrioritizedItem(key=key, table=table, priority=priority)
    made.flat_trajectory.columns.add().chunk_slices.add(chunk_key=chunk_key, offset=0, length=1, index=0)
    encoded: bytes = made.SerializeToString()
    return encoded


class Inserter:
    """An insert stream whose items all are of one chunk that it keeps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._confirmed: list[int] = []
        self.stream = InsertStream(store, self._deliver)
        self._has_chunk = False

    def insert(self, keys: Iterable[int], priorities: Iterable[float] = (), table: str = "replay") -> None:
        pairs = list(zip(keys, priorities or [1.0] * 1_000_000, strict=False))
        request = messages.StoredRequest(keep_chunk_keys=[7], items=[item(key, 7, table, p) for key, p in pairs])
        if not self._has_chunk:
            self._has_chunk = True
            request.chunks.append(chunk(7))
        with self._store.lock:
            self.stream.take(request.SerializeToString())

    def _deliver(self, answer: Any) -> None:
        self._confirmed += messages.InsertStreamResponse.FromString(answer).keys

    def confirmed(self) -> list[int]:
        """Return the keys confirmed since the last call."""
        keys = [*self._confirmed]
        self._confirmed.clear()
        return keys


def ask(store: Store, num_samples: int) -> list[UnencodedSamples]:
    """Request samples; return the list that gets them."""
    answers: list[UnencodedSamples] = []
    store.table("replay").request(SampleRequest(num_samples, answers.append))
    return answers


def draw(store: Store, num_samples: int, table: str = "replay") -> list[tuple[int, float, int]]:
    """Return key, probability and size of the table of as many samples as come at once."""
    drawn: list[tuple[int, float, int]] = []
    while len(drawn) < num_samples:
        answers: list[UnencodedSamples] = []
        request = SampleRequest(num_samples - len(drawn), answers.append)
        store.table(table).request(request)
        if not answers:
            store.table(table).withdraw(request)
            break
        for response in encode_responses(answers[0].samples, rate_limited=answers[0].has_waited):
            entries = messages.SampleStreamResponse.FromString(response).entries
            drawn += [(entry.info.item.key, entry.info.probability, entry.info.table_size) for entry in entries]
    return drawn
