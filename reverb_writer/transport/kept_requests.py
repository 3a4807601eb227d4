"""Confirmed requests that their writer keeps until a restart of the server cannot lose them. No I/O, no threads.

    confirmed --add--> kept --answered---> released    (a checkpoint has them, or their tables have dropped them)
                       kept --add--------> released    (no room: uncovered)
                       kept --restarted--> sent again  (in order, before all others)

Three rules release a request:

- A save that began later is safe. The server counts its saves (`tables.saves`): a request that was confirmed before
  save number n began is in its checkpoint. `n` is one more than the number seen after the confirmation.
- All its tables have dropped it. A table that removes its oldest item, and samples items any number of times, has
  dropped an item after `max_size` further inserts; a table that samples its oldest item has given out its first n
  items after n times `max_times_sampled` samples. Items that a client deletes make both rules late or early.
- The kept requests have more than `max_bytes`: the oldest go. They are counted in `uncovered_items`, as are items
  that a checkpoint had which the restarted server has not restored.

The kept items of a table that was reset are never sent again. A reset shows in a count that is lower than in
the answer before, to which the items are added that were sent since. So it shows at the next question, unless other
writers have inserted more since the reset than all had before.

Not thread-safe: its owner calls it from one thread.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from reverb_writer.tables.saves import NO_SAVE, Saves
from reverb_writer.tables.table_info import ServerInfo, TableInfo
from reverb_writer.transport.in_flight import InsertRequest, Memory

_MAX_NUMBERS = 64  # saves whose numbers of inserts are remembered

_Inserts = Mapping[str, int]
"""The number of inserts of each table."""


@dataclass(eq=False)
class _Mark:
    """The state of the server after the confirmation of some requests."""

    save: int | None  # number of the first save that has them; None if the server does not count saves
    inserts: _Inserts  # of the tables of any kept request
    num_released: int = 0  # items released because save number `save` has them


@dataclass(eq=False)
class _Kept:
    request: InsertRequest
    mark: _Mark | None = None  # None until the first answer to a later question


class KeptRequests:
    """Confirmed requests that a restart of the server could lose.

    Attributes:
        max_bytes: bound on the memory of the requests, in bytes; 0 to keep none.
        saves: the server's saves in the newest answer; None if it does not count them.
    """

    def __init__(self, max_bytes: int, counts: collections.Counter[str]) -> None:
        """Keep nothing yet; raise counters of `ObserverStats` in `counts`."""
        self.max_bytes, self._counts = max_bytes, counts
        self.saves: Saves | None = None
        self._kept: collections.deque[_Kept] = collections.deque()
        self._num_asked = 0  # kept requests that were confirmed before the open question
        self._memory = Memory()
        self._tables: set[str] = set()
        self._before: Mapping[str, TableInfo] = {}  # tables of the newest answer
        self._answered_at = 0.0  # `time.monotonic()` of the newest answer
        self._at_saves: dict[int, _Inserts] = {}  # by save: inserts that its checkpoint has at least
        self._in_checkpoints: collections.deque[_Mark] = collections.deque()  # marks of released items
        self._since: dict[str, int] = {}  # by table: inserts that a restarted server had restored
        self._num_again: collections.Counter[str] = collections.Counter()  # items sent again since the last answer

    def __len__(self) -> int:
        """Return the number of kept requests."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Memory of the kept requests."""
        return self._memory.num_bytes

    @property
    def num_items(self) -> int:
        """Number of kept items."""
        return sum(kept.request.num_kept for kept in self._kept)

    def add(self, request: InsertRequest) -> int:
        """Keep a request that the server has just confirmed; return the number of items released for `max_bytes`."""
        if not self.max_bytes:
            return 0
        self._tables |= request.tables
        if request.is_again:
            self._num_again.update({table: request.count(table) for table in request.tables})
            request.is_again = False
        self._kept.append(_Kept(request))
        self._memory.add(request)
        num_items = 0
        while self.num_bytes > self.max_bytes:
            num_items += self._release().request.num_kept
        self._counts["uncovered_items"] += num_items
        return num_items

    def asked(self) -> None:
        """Note that the server is asked for its tables now."""
        self._num_asked = len(self._kept)

    def answered(self, info: ServerInfo) -> None:
        """Take the answer to the last question: release safe requests, leave out items of tables that were reset."""
        for name in self._tables & info.tables.keys() & self._before.keys():
            if _was_reset(self._before[name], info.tables[name], self._num_sent_since_answer(name)):
                self._leave_out(name)
        self._note(info)
        mark = _Mark(
            None if info.saves is None else info.saves.begun + 1,
            {name: info.tables[name].rate_limiter.num_inserts for name in self._tables & info.tables.keys()},
        )
        for kept in [self._kept[number] for number in range(self._num_asked)]:
            kept.mark = kept.mark or mark
        self._num_asked = 0
        while self._kept and (first := self._kept[0]).mark is not None:
            if self._is_safe(first.mark):
                if not self._in_checkpoints or self._in_checkpoints[-1] is not first.mark:
                    self._in_checkpoints.append(first.mark)
                first.mark.num_released += first.request.num_kept
            elif not _is_dropped(first.mark, info, first.request.tables):
                break
            self._release()
        while self._in_checkpoints and _is_dropped(self._in_checkpoints[0], info, self._tables):
            self._in_checkpoints.popleft()

    def restarted(self, info: ServerInfo) -> list[InsertRequest]:
        """Return the requests that the restarted server lacks, in order, and keep the others; `info` is its answer.

        A table that removes its oldest item gets as many items as it has room for beside the items that were inserted
        since the restart: no item pushes out a newer one. The rest is counted in `uncovered_items`.
        """
        restored = self._restored_number(info)
        while self._in_checkpoints and (self._in_checkpoints[-1].save or 0) > restored:
            self._counts["uncovered_items"] += self._in_checkpoints.pop().num_released
        requests = []
        while self._kept and ((mark := self._kept[-1].mark) is None or mark.save is None or mark.save > restored):
            requests.append(self._release(-1).request)
        requests.reverse()
        self._num_asked = 0
        self._since = {table: self._restored_inserts(table, info, restored) for table in info.tables}
        for name in self._tables & info.tables.keys():
            table, since = info.tables[name], self._since[name]
            if not _drops_oldest(table):
                continue
            room = max(table.max_size - (table.rate_limiter.num_inserts - since), 0)
            for request in reversed(requests):
                self._counts["uncovered_items"] += request.leave_out(name, room)
                room = max(room - request.count(name), 0)
        for request in requests:
            for name in request.tables & info.tables.keys():
                if info.tables[name].max_times_sampled:
                    self._counts["repeatable_items"] += request.count(name)
        self._at_saves = {restored: self._since}
        self._before, self._answered_at, self.saves = info.tables, info.at, info.saves
        return requests

    def seen(self, info: ServerInfo) -> None:
        """Take the first answer of a server, before anything was confirmed."""
        self._note(info)

    def close(self) -> int:
        """Keep nothing any more; return the number of items that were kept."""
        num_items = self.num_items
        self._kept.clear()
        self._memory, self._num_asked = Memory(), 0
        return num_items

    # ----------------------------------------------------------------------------------------------------------------

    def _is_safe(self, mark: _Mark) -> bool:
        return self.saves is not None and mark.save is not None and mark.save <= self.saves.safe <= self.saves.begun

    def _release(self, end: Literal[0, -1] = 0) -> _Kept:
        """Remove the oldest kept request, or the newest one."""
        kept = self._kept.pop() if end else self._kept.popleft()
        self._num_asked = max(self._num_asked - 1, 0)
        self._memory.remove(kept.request)
        return kept

    def _num_sent_since_answer(self, table: str) -> int:
        """Return the number of a table's items that were sent after the last answer, once, and confirmed since."""
        asked = itertools.islice(self._kept, self._num_asked)
        new = (kept.request for kept in asked if (kept.request.sent_at or 0) > self._answered_at)
        return sum(request.count(table) for request in new if table in request.tables)

    def _leave_out(self, table: str) -> None:
        """Leave out a table's items that were confirmed before the open question, because the table was reset.

        Items since the last answer may have been inserted after the reset: they count as uncovered.
        """
        for number in range(self._num_asked):
            kept = self._kept[number]
            num_items = kept.request.leave_out(table)
            if kept.mark is None:
                self._counts["uncovered_items"] += num_items

    def _note(self, info: ServerInfo) -> None:
        """Remember the numbers of an answer."""
        saves, known = info.saves, self.saves
        earlier = info.tables if known is None else self._before
        if saves is not None and known is not None and saves.begun < known.begun:  # the reserved table was reset
            for kept in self._kept:
                kept.mark = None
            self._at_saves.clear()
            self._in_checkpoints.clear()
        elif saves is not None and (known is None or saves.begun > known.begun):
            inserts = {name: table.rate_limiter.num_inserts for name, table in earlier.items()}
            first = saves.begun if known is None else max(known.begun + 1, saves.begun - _MAX_NUMBERS)
            for number in range(first, saves.begun + 1):
                self._at_saves.setdefault(number, inserts)
            while len(self._at_saves) > _MAX_NUMBERS:
                del self._at_saves[next(iter(self._at_saves))]
        self.saves = saves
        for name in self._num_again.keys() & self._before.keys() & info.tables.keys():
            before, now, since = self._before[name], info.tables[name], self._since.get(name, 0)
            if _drops_oldest(now):
                num_newer = _num_pushed_out(now, since) - _num_pushed_out(before, since)
                self._counts["displaced_items"] += min(self._num_again[name], max(num_newer, 0))
        self._num_again.clear()
        self._before, self._answered_at = info.tables, info.at

    def _restored_number(self, info: ServerInfo) -> int:
        """Return the number of the save that a restarted server has restored; 0 for none of the life known here."""
        if info.saves is None or self.saves is None or not self.saves.life:
            return 0
        life, number = info.saves.restored
        return number if life == self.saves.life else 0

    def _restored_inserts(self, table: str, info: ServerInfo, restored: int) -> int:
        """Return the inserts of a table that a restarted server had restored, as far as it is known."""
        now = info.tables[table].rate_limiter.num_inserts
        if info.saves is not None and info.saves.life and info.saves.restored == NO_SAVE:
            return 0
        if self.saves is not None and restored > self.saves.begun and table in self._before:
            return min(self._before[table].rate_limiter.num_inserts, now)  # the save began after the newest answer
        return min(self._at_saves.get(restored, {}).get(table, now), now)


def _drops_oldest(table: TableInfo) -> bool:
    return table.remover == "fifo" and not table.max_times_sampled


def _num_pushed_out(table: TableInfo, since: int) -> int:
    """Return how many items a full table has removed of those that were inserted after the first `since` ones."""
    return max(table.rate_limiter.num_inserts - since - table.max_size, 0)


def _is_dropped(mark: _Mark, info: ServerInfo, tables: set[str] | frozenset[str]) -> bool:
    """Return whether all tables have dropped the items that they had at the mark."""
    for name in tables:
        if name not in mark.inserts or name not in info.tables:
            return False
        table, inserts = info.tables[name], mark.inserts[name]
        limiter = table.rate_limiter
        if _drops_oldest(table):
            if limiter.num_inserts - inserts < table.max_size:
                return False
        elif table.sampler != "fifo" or limiter.num_samples < inserts * (table.max_times_sampled or math.inf):
            return False
    return True


def _was_reset(before: TableInfo, now: TableInfo, num_own: int) -> bool:
    """Return whether a table was reset between two answers, in which time `num_own` items were inserted at least."""
    has_too_few = now.rate_limiter.num_inserts < before.rate_limiter.num_inserts + num_own
    return has_too_few or any(a > b for a, b in zip(_counts(before), _counts(now), strict=True))


def _counts(table: TableInfo) -> tuple[int, ...]:
    limiter = table.rate_limiter
    return limiter.num_inserts, limiter.num_samples, table.num_deleted_episodes, table.num_unique_samples
