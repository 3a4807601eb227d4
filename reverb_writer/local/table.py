"""One table: its items, its rate limiter, and the inserts and requests that wait.

    insert ---> [inserts that wait] --limiter--> items --limiter--> [requests that wait] ---> samples
                                                   |
                                   remover, `max_times_sampled`, delete

Both queues are first in, first out. No method waits: each change inserts and samples as far as the limiter allows, and
calls the functions of finished inserts and requests. Not thread-safe: `Store` has the lock.

Source: Reverb 0.14 (behaviour of `table.cc` and `rate_limiter.cc`, measured side by side).
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reverb_writer.local.chunk_store import Chunk, ChunkStore
from reverb_writer.local.item_rows import ItemRows
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.selectors import Rows, make_chooser
from reverb_writer.local.stored_items import Item
from reverb_writer.protocol.responses import Samples, UnencodedSamples
from reverb_writer.tables import TableConfig

_DRAW_BYTES = 1 << 20  # size of the samples that are drawn at once: one response
_MAX_DRAWS = 256

Confirm = Callable[[list[int]], object]
"""Gets the keys of items that were inserted."""


@dataclass(eq=False)
class SampleRequest:
    """A request that waits for samples."""

    num_samples: int
    # Called when samples are drawn, maybe fewer, in the thread that draws them and with the lock of the store. It must
    # not wait.
    ready: Callable[[UnencodedSamples], object]
    has_waited: bool = False  # whether the rate limiter made it wait


class Table:
    """The items of one table.

    Attributes:
        config: configuration of the table.
        num_inserts, num_samples: counts since the start or the last reset.
        num_unique_samples: items that were sampled at least once, since the same time.
        num_deleted_episodes: episodes whose items were all removed, since the same time.
        worker_time_s: time spent in each state, by the names of `TableInfo`, in seconds.
    """

    def __init__(self, config: TableConfig, chunks: ChunkStore, rng: np.random.Generator) -> None:
        """Begin empty."""
        self.config = config
        self.worker_time_s = {"sleeping": 0.0, "waiting_for_sampling": 0.0, "waiting_for_inserts": 0.0}
        self._state, self._since = "sleeping", time.monotonic()
        self._balance = config.rate_limiter.balance
        self._chunks, self._rng = chunks, rng
        self._inserts: collections.deque[tuple[Item, Confirm]] = collections.deque()
        self._requests: collections.deque[SampleRequest] = collections.deque()
        self._is_advancing = False
        self._inserted_at = 0  # time of the last item
        self._sample_bytes = float(_DRAW_BYTES)  # mean size of the last samples
        self._clear()

    def _clear(self) -> None:
        self._rows: Rows = collections.OrderedDict()  # after deletions, a dict finds its first key slowly
        self._sampler = make_chooser(self.config.sampler, self._rows, self._rng)
        self._remover = make_chooser(self.config.remover, self._rows, self._rng)
        self._items = ItemRows()
        self._episodes: collections.Counter[int] = collections.Counter()
        self.num_inserts = self.num_samples = 0
        self.num_unique_samples = self.num_deleted_episodes = 0

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Item]:
        """Return the items, the oldest first."""
        return map(self._items.items.__getitem__, self._rows.values())

    def encoded_items(self) -> list[bytes]:
        """Return the PrioritizedItem of each item, the oldest first."""
        rows = [*self._rows.values()]
        numbers = (self._items.priorities[rows].tolist(), self._items.times_sampled[rows].tolist())
        return [item.encode(priority, times) for item, priority, times in zip(self, *numbers, strict=True)]

    @property
    def num_episodes(self) -> int:
        """Number of episodes of the items."""
        return len(self._episodes)

    def check_priority(self, key: int, priority: float) -> None:
        """Refuse a priority that an item cannot have.

        Raises:
            Refusal: names the priority and the reason.
        """
        reason = self._sampler.refuses(priority) or self._remover.refuses(priority)
        if reason:
            text = f"table `{self.config.name}`: the priority of item {key} {reason}, got {priority:g}."
            raise Refusal(Status.INVALID_ARGUMENT, text)

    def insert(self, items: Iterable[Item], confirm: Confirm) -> None:
        """Queue items.

        Args:
            items: new items, whose chunks count a reference for them, with priorities that `check_priority` accepts.
            confirm: gets their keys when they are in the table.
        """
        self._inserts.extend([(item, confirm) for item in items])
        self._advance()

    def request(self, request: SampleRequest) -> None:
        """Queue a request for samples; `request.ready` may be called before this returns."""
        self._requests.append(request)
        self._advance()

    def withdraw(self, request: SampleRequest) -> None:
        """Remove a request that waits."""
        self._requests.remove(request)
        self._advance()

    def withdraw_inserts(self, confirm: Confirm) -> None:
        """Drop the waiting items of `confirm`."""
        given_up = [item for item, whose in self._inserts if whose == confirm]
        self._inserts = collections.deque(pair for pair in self._inserts if pair[1] != confirm)
        self._forget(given_up)
        self._advance()

    def update(self, updates: Mapping[int, float], deletes: Iterable[int]) -> None:
        """Change priorities, then delete items; unknown keys are ignored.

        Raises:
            Refusal: no item can have one of the priorities; nothing has changed.
        """
        for key, priority in updates.items():
            self.check_priority(key, priority)
        self._set({self._rows[key]: priority for key, priority in updates.items() if key in self._rows})
        if rows := [self._rows[key] for key in dict.fromkeys(deletes) if key in self._rows]:
            self._delete(rows)
        self._advance()

    def reset(self) -> None:
        """Delete all items and reset the counts; waiting inserts and requests stay."""
        items = [*self]
        self._clear()
        self._forget(items)
        self._advance()

    def _advance(self) -> None:
        """Insert and sample as far as the rate limiter allows.

        The called functions may insert and request more; then the outer of two nested calls continues.
        """
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self._move():
                pass
        finally:
            self._is_advancing = False
        if self._requests:
            for request in self._requests:
                request.has_waited = True
        self.measure()

    def _move(self) -> bool:
        """Insert and sample once, and call the functions of finished items; return whether anything was done."""
        confirmed: dict[Confirm, list[int]] = {}
        moves = False
        while count := self._num_inserts_allowed():
            moves = True
            inserts = [self._inserts.popleft() for _ in range(count)]
            self._insert([item for item, _ in inserts])
            for item, confirm in inserts:
                confirmed.setdefault(confirm, []).append(item.key)
        while self._requests and (answer := self._serve(self._requests[0])) is not None:
            self._requests.popleft().ready(answer)
            moves = True
        for confirm, keys in confirmed.items():
            confirm(keys)
        return moves

    def _num_inserts_allowed(self) -> int:
        """Return how many waiting items may be inserted at once: several new items, or one item with a known key."""
        if not self._inserts:
            return 0
        allowed = self._balance.num_inserts_allowed(len(self._rows), self.num_inserts, self.num_samples)
        if self._inserts[0][0].key in self._rows:  # it does not count, but waits as any other
            return int(min(allowed, 1))
        keys = [item.key for item, _ in itertools.islice(self._inserts, None if math.isinf(allowed) else int(allowed))]
        if self._rows.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            return len(keys)
        new: set[int] = set()
        for key in keys:
            if key in self._rows or key in new:
                break
            new.add(key)
        return len(new)

    def measure(self) -> None:
        """Bring `worker_time_s` up to date."""
        now = time.monotonic()
        self.worker_time_s[self._state] += now - self._since
        self._since = now
        if self._inserts:
            self._state = "waiting_for_sampling"
        else:
            self._state = "waiting_for_inserts" if self._requests else "sleeping"

    def restore(self, item: Item, times_sampled: int) -> None:
        """Take an item of a saved table; the caller sets the counters."""
        self._place([item])
        self._items.times_sampled[len(self) - 1] = times_sampled

    def _insert(self, items: Sequence[Item]) -> None:
        """Insert new items, or a single item with a known key."""
        known = self._rows.get(items[0].key)
        if known is not None:  # the item was sent again: its content stays, and it does not count
            self._set({known: items[0].priority})
            self._forget(items)
            return
        # Times are unique, because a real server restores items in the order of their times.
        self._inserted_at = max(time.time_ns(), self._inserted_at)
        for item in items:
            self._inserted_at += 1
            item.inserted_at = self._inserted_at
        self.num_inserts += len(items)
        rest = items
        while rest:
            # A remover may choose the new item, so a full table inserts one at a time, unless it removes the oldest.
            room = max(self.config.max_size - len(self._rows), 1)
            count = len(rest) if self.config.remover == "fifo" else room
            self._place(rest[:count])
            rest = rest[count:]
            if (excess := len(self._rows) - self.config.max_size) > 0:
                self._delete(self._remover.first(excess))

    def _place(self, items: Sequence[Item]) -> None:
        """Put new items into the next rows."""
        rows = range(len(self._rows), len(self._rows) + len(items))
        self._items.place(slice(rows.start, rows.stop), items)
        self._rows.update(zip([item.key for item in items], rows, strict=True))
        self._set(dict(zip(rows, [item.priority for item in items], strict=True)))
        for item in items:
            shared = item.shared
            if not shared.num_stored:
                self._episodes.update([chunk.episode_id for chunk in shared.chunks])
            shared.num_stored += 1

    def _set(self, priorities: Mapping[int, float]) -> None:
        """Set the priorities of rows."""
        rows, values = [*priorities], [*priorities.values()]
        self._items.priorities[rows] = values
        self._sampler.set(rows, values)
        self._remover.set(rows, values)

    def _delete(self, rows: Sequence[int]) -> None:
        """Remove the items of rows; the items of the last rows take their places."""
        size = len(self._rows) - len(rows)
        last = set(range(size, len(self._rows))).difference(rows)
        moves = dict(zip(last, [row for row in rows if row < size], strict=True))
        items = self._items.remove(rows, moves)
        for row in moves.values():
            self._rows[self._items.items[row].key] = row
        self._sampler.delete(rows, moves)
        self._remover.delete(rows, moves)
        for item in items:
            del self._rows[item.key]
            item.shared.num_stored -= 1
            if not item.shared.num_stored:
                self._forget_episodes(item.shared.chunks)
        self._forget(items)

    def _forget_episodes(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self._episodes[chunk.episode_id] -= 1
            if not self._episodes[chunk.episode_id]:
                del self._episodes[chunk.episode_id]
                self.num_deleted_episodes += 1

    def _forget(self, items: Iterable[Item]) -> None:
        """Free the memory of items that are not in the table."""
        for item in items:
            item.shared.num_items -= 1
            if not item.shared.num_items:
                self._chunks.release(item.shared.chunks)
        self._chunks.give_back(sum([item.shared.item_bytes for item in items]))

    def _serve(self, request: SampleRequest) -> UnencodedSamples | None:
        """Draw samples for a request, as many as a response holds and the limiter allows; None if it allows none."""
        parts: list[Samples] = []
        num_drawn = num_bytes = 0
        most = min(request.num_samples, _MAX_DRAWS)
        while num_drawn < most and num_bytes < _DRAW_BYTES:
            allowed = self._balance.num_samples_allowed(len(self._rows), self.num_inserts, self.num_samples)
            if not allowed:
                break
            wanted = min(most - num_drawn, allowed)
            # The number of samples that probably fit.
            num_draws = int(min(wanted, math.ceil((_DRAW_BYTES - num_bytes) / self._sample_bytes)))
            rows, probabilities = self._sampler.draw(1 if self.config.max_times_sampled else num_draws)
            parts.append(self._items.draw(rows, probabilities, len(self._rows)))
            part_bytes = int(self._items.sample_bytes[rows].sum())
            self._note(rows, parts[-1].times_sampled)
            self._sample_bytes = max(part_bytes / len(rows), 1.0)
            num_drawn += len(rows)
            num_bytes += part_bytes
        return UnencodedSamples(Samples.joined(parts), num_bytes, request.has_waited) if parts else None

    def _note(self, rows: npt.NDArray[np.intp], times_sampled: npt.NDArray[np.int32]) -> None:
        """Count the samples of rows; if the table samples an item for the last time, delete the item."""
        self.num_samples += len(rows)
        self.num_unique_samples += int(np.count_nonzero(times_sampled == 1))
        if times_sampled[0] == self.config.max_times_sampled:  # then it is the only row
            self._delete(rows.tolist())
