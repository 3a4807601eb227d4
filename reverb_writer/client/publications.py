"""Which of several servers has a newer publication: told by their counts of inserts, without fetching any. Pure.

A publication goes to all servers, so their counts grow alike; a server whose count has grown further than what a reader
has taken has a newer one. A server that was down has missed some, and one that was started again may have any: so what
a reader has not seen of a server's present process counts as one publication, and its version decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Seen:
    """What a reader knows of one server."""

    state_id: int  # of the server's process
    num_inserts: int  # publications since its start
    num_taken: int  # of them, and of those that went to other servers alone, how many the reader needs no more
    is_unread: bool = False  # whether the reader has taken nothing from this process: what it has may be old or new

    @property
    def num_ahead(self) -> int:
        """How many publications of the server the reader has not taken."""
        return self.num_inserts - self.num_taken


@dataclass(frozen=True)
class Publications:
    """What a reader knows of all servers.

    >>> known = Publications({}).updated({"a": (7, 3), "b": (8, 3)})
    >>> known.newest(["b", "a"])
    'b'
    >>> known = known.taken("b").passed("a")
    >>> known.newest(["b", "a"]), known.updated({"a": (7, 4)}).newest(["b", "a"])
    (None, 'a')
    """

    servers: Mapping[str, Seen]  # by name

    def updated(self, now: Mapping[str, tuple[int, int]]) -> Publications:
        """Return this with the state ids and counts of inserts that some servers have told now."""
        servers = dict(self.servers)
        for name, (state_id, num_inserts) in now.items():
            before = servers.get(name)
            if before is None or state_id != before.state_id or num_inserts < before.num_inserts:
                servers[name] = Seen(state_id, num_inserts, max(num_inserts - 1, 0), is_unread=True)
            else:
                servers[name] = replace(before, num_inserts=num_inserts)
        return Publications(servers)

    def newest(self, order: Sequence[str]) -> str | None:
        """Return the server that is ahead furthest, of several the first in `order`; None if none is."""
        ahead = {name: self.servers[name].num_ahead for name in order if name in self.servers}
        most = max(ahead.values(), default=0)
        return next(name for name, num in ahead.items() if num == most) if most > 0 else None

    def taken(self, name: str) -> Publications:
        """Return this once the newest publication of a server was taken, and was newer than those before."""
        one = self.servers[name]
        servers = {
            other: seen if seen.is_unread else replace(seen, num_taken=seen.num_taken + one.num_ahead)
            for other, seen in self.servers.items()
        }
        return Publications({**servers, name: _read(one)})

    def passed(self, *names: str) -> Publications:
        """Return this once the newest publications of servers were read, and are not to be read again."""
        return Publications({**self.servers, **{name: _read(self.servers[name]) for name in names}})


def _read(seen: Seen) -> Seen:
    return replace(seen, num_taken=seen.num_inserts, is_unread=False)
