"""The soak's books: what workers write down, and whether it balances with what the server's last checkpoint holds.

    of each table:  confirmed = there + sampled for the last time + removed by its own rule + lost, by name

Each confirmed item is followed by name. An item that was confirmed was inserted between the first step of its batch and
the end of the flush. So it may be

- there: in the last checkpoint;
- sampled: a learner of the queue has written it down;
- removed: older than all that are there, in a table that counts as many removals;
- removed later, or lost with a server that was killed: inserted after the checkpoint began from which the next server
  came back. `soak.kills` shows that none is lost while its writer lives; here writers are killed, too;
- lost with a learner of the queue: as many as the datasets count as `lost_samples` and `ready_samples`, and the
  batches whose `next` was interrupted.

Anything else is an error, as are an item that no actor can have written, and whatever a worker calls a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverb_writer_server.checkpoints.contents import Checkpoint, inspect
from tensor_codec import decode

from reverb_writer.files.tfrecord import CHUNKS, ITEMS, read_records
from reverb_writer.protocol import messages

LENGTH = 4


@dataclass(frozen=True)
class Loss:
    """A server that was killed: what was inserted in this time may be lost."""

    since: float
    until: float


class Journal:
    """A worker's lines, each complete: `kind|...`. Any process may be killed in the middle of one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._file.write("\n")  # ends the line in which an earlier process was killed

    def confirmed(self, since: float, at: float, first_numbers: Iterable[int]) -> None:
        """Items whose first step was taken after `since`, and whose flush ended at `at`."""
        self._file.write(f"confirmed|{since}|{at}|{' '.join(map(str, first_numbers))}|\n")

    def sampled(self, at: float, windows: Any) -> None:
        """Items [B, LENGTH] sampled from a queue."""
        self._file.write(f"sampled|{at}|{' '.join(map(str, map(_name, windows.tolist())))}|\n")

    def lost(self, with_connections: int, undelivered: int, at_interrupts: int) -> None:
        """Samples that a dataset of a queue counts as not delivered."""
        self._file.write(f"lost|{with_connections}|{undelivered}|{at_interrupts}|\n")

    def fault(self, text: str) -> None:
        self._file.write(f"fault|{' '.join(text.split()).replace('|', '/')}|\n")


@dataclass
class Books:
    since: dict[int, float] = field(default_factory=dict)
    at: dict[int, float] = field(default_factory=dict)
    sampled: Counter[int] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Books:
        books = cls()
        for path in sorted([*folder.glob("actor-*"), *folder.glob("learner-*")]):
            for kind, *rest in _lines(path):
                if kind == "confirmed":
                    for name in map(int, rest[2].split()):
                        books.since[name], books.at[name] = float(rest[0]), float(rest[1])
                elif kind == "sampled":
                    books.sampled.update(map(int, rest[1].split()))
                elif kind == "lost":
                    names = ("with a connection", "undelivered at a close", "at an interrupt")
                    books.lost.update(dict(zip(names, map(int, rest), strict=True)))
                else:
                    books.faults.append(f"{path.name}: {rest[0]}")
        return books

    def balance(self, checkpoint: Checkpoint, kills: Sequence[Loss]) -> list[str]:
        """Return the books as lines; differences are added to `faults`."""
        contents = inspect(checkpoint)
        deletes = {table.table_name: table.rate_limiter.delete_count for table in contents.tables}
        items = _items(checkpoint)
        lines = []
        for table, there in items.items():
            oldest_at = min((self.at[name] for name in there if name in self.at), default=0.0)
            fates: Counter[str] = Counter()
            missing = []
            for name, since in self.since.items():
                if name in there:
                    fates["there"] += 1
                elif table == "queue" and name in self.sampled:
                    fates["sampled"] += 1
                elif any(kill.since <= self.at[name] and since <= kill.until for kill in kills):
                    fates["confirmed near a kill and not there: removed later, or lost"] += 1
                elif table == "replay" and since <= oldest_at:
                    fates["removed by its rule"] += 1
                else:
                    missing.append(name)
            self._explain(table, missing, fates)
            if fates["removed by its rule"] > deletes[table]:
                self.faults.append(
                    f"{table}: {fates['removed by its rule']} removed, the table counts {deletes[table]}"
                )
            for name in there:
                if name % LENGTH or name < 0:
                    self.faults.append(f"{table}: the numbers of an item begin with {name}: no actor wrote that")
            parts = " + ".join(f"{fate} {count:,}" for fate, count in fates.items() if count)
            lines.append(
                f"{table}: confirmed {len(self.since):,} = {parts}; there without being confirmed: "
                f"{len(there - self.since.keys()):,}"
            )
        strangers = [name for name in self.sampled if name % LENGTH or name < 0]
        self.faults += [f"a learner got an item that begins with {name}: no actor wrote that" for name in strangers]
        twice = sum(count - 1 for count in self.sampled.values())
        return [*lines, f"sampled again from the queue, after a server came back or a connection was lost: {twice:,}"]

    def _explain(self, table: str, missing: list[int], fates: Counter[str]) -> None:
        """Missing items of a queue must be among those that its learners have counted."""
        counted = sum(self.lost.values()) if table == "queue" else 0
        if len(missing) <= counted:
            causes = ", ".join(f"{count:,} {cause}" for cause, count in self.lost.items())
            fates[f"counted as lost by learners ({causes})"] = len(missing)
            return
        missing.sort(key=self.at.__getitem__)
        some = ", ".join(f"{name} (confirmed at {self.at[name]:.3f})" for name in missing[:3])
        self.faults.append(
            f"{table}: {len(missing):,} confirmed items are neither there, nor sampled, nor removed, nor lost; "
            f"{counted:,} are counted as lost. The first: {some}"
        )


def _lines(path: Path) -> Iterator[list[str]]:
    for line in path.read_text().splitlines():
        if line.endswith("|"):
            yield line[:-1].split("|")


def _name(window: Sequence[int]) -> int:
    """Return the first number, or -1 for a window whose numbers do not follow each other."""
    whole = list(window) == list(range(window[0], window[0] + LENGTH))
    return window[0] if whole else -1


def _items(checkpoint: Checkpoint) -> dict[str, set[int]]:
    chunks: dict[int, Any] = {}
    for record in read_records(checkpoint.path / CHUNKS):
        chunk = messages.ChunkData.FromString(record)
        chunks[chunk.chunk_key] = decode(chunk.data.tensors[0])
    items: dict[str, set[int]] = {"replay": set(), "queue": set()}
    for record in read_records(checkpoint.path / ITEMS):
        item = messages.PrioritizedItem.FromString(record)
        if item.table in items:
            parts = item.flat_trajectory.columns[0].chunk_slices
            window = [
                number
                for part in parts
                for number in chunks[part.chunk_key][part.offset : part.offset + part.length].ravel().tolist()
            ]
            items[item.table].add(_name(window))
    return items
