"""An outbox of several servers that do not exist: nothing is sent, and a test says what they confirm and answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from reverb_writer.shards.outbox import Destination, ShardedOutbox
from reverb_writer.shards.targets import rank_shards
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.writing.stream_options import Books, DeliveryOptions

PATIENCE_S = 10.0


class Channel:
    """A connection to a server that answers a question when the test says so."""

    def __init__(self, address: str) -> None:
        self.address, self.last_response_at = address, 0.0
        self.questions: list[Callable[[Any], None]] = []

    def start_info(self, _timeout_s: float, deliver: Callable[[Any], None]) -> None:
        self.questions.append(deliver)

    def answer(self, *tables: str) -> None:
        """Answer all questions: the server has these tables."""
        self.last_response_at = time.monotonic()
        for deliver in self.questions:
            deliver(ServerInfo(1, dict.fromkeys(tables, SimpleNamespace()), self.last_response_at))  # type: ignore[arg-type]
        self.questions = []


@dataclass(eq=False)
class Episode:
    receiver: Any = None
    num_sent: int = 0


@dataclass(eq=False)
class Items:
    """Complete items of an episode."""

    origin: Episode
    num_items: int


class Episodes:
    """A source of episodes under way, which notes those that are cut."""

    def __init__(self, *, is_endless: bool = False) -> None:
        self.books, self.tables, self.items_per_call, self.is_endless = Books(), frozenset({"a"}), 1.0, is_endless
        self.open: list[Episode] = []
        self.cuts: list[tuple[Episode, str]] = []
        self._keys = itertools.count(1, 100_000)

    def needed_chunks(self) -> list[int]:
        return []

    def open_origins(self) -> Sequence[Episode]:
        return self.open

    def cut(self, is_cut: Callable[[Any], bool], reason: str) -> None:
        self.cuts += [(episode, reason) for episode in self.open if is_cut(episode)]
        self.open = [Episode() if is_cut(episode) else episode for episode in self.open]

    def requests(self, batches: Sequence[Items]) -> Iterator[InsertRequest]:
        for items in batches:
            yield InsertRequest(self.tables, next(self._keys), [np.zeros((items.num_items, 8), np.uint8)], {})


class Replay:
    """A target of servers, the outbox of a writer, and its source."""

    def __init__(self, *names: str, is_endless: bool = False, **options: Any) -> None:
        self.source = Episodes(is_endless=is_endless)
        self.shards = tuple(self._server(name) for name in names)
        self.num_refreshed = 0
        settings: Any = {"patience_s": PATIENCE_S, "max_in_flight_items": 4, **options}
        servers: Any = self
        source: Any = self.source
        self.outbox = ShardedOutbox(servers, DeliveryOptions(**settings), source, lambda work: work())

    @staticmethod
    def _server(name: str) -> Any:
        address = f"{name}:8000"
        return SimpleNamespace(name=name, address=address, state="up", channel=Channel(address))

    def refresh_soon(self) -> None:
        self.num_refreshed += 1

    def change(self, *names: str) -> None:
        """Change the target to servers of these names; known servers remain."""
        known = {server.name: server for server in self.shards}
        self.shards = tuple(known.get(name) or self._server(name) for name in names)

    def set_state(self, name: str, state: Any) -> None:
        (server,) = [server for server in self.shards if server.name == name]
        server.state = state

    def to(self, name: str) -> Destination:
        return self.outbox._destinations[name]

    def episode(self, num_items: int) -> Episode:
        """Begin an episode, and write its first items."""
        episode = Episode()
        self.source.open.append(episode)
        self.write(episode, num_items)
        return episode

    def write(self, episode: Episode, num_items: int) -> None:
        batch: Any = Items(episode, num_items)
        self.outbox.write([batch])

    def confirm(self, name: str) -> None:
        """Confirm all items of a server."""
        flight = self.to(name).delivery.flight
        first_keys = [request.first_key + n for request in flight._queued for n in range(request.num_items)]
        flight.take_message(1 << 30)
        flight.acknowledge(np.array(first_keys, np.uint64))
        self.to(name).shard.channel.last_response_at = time.monotonic()

    def pending(self) -> dict[str, int]:
        return {name: each.outbox.num_written for name, each in self.outbox._destinations.items()}

    @property
    def counts(self) -> dict[str, int]:
        return {name: self.source.books.counts[name] for name in ("lost_shards", "unconfirmed_items")}


def first(number: int, *names: str) -> str:
    """Return the server that is chosen for an episode, numbered from 1."""
    return rank_shards(f"actor/{number}", names)[0]
