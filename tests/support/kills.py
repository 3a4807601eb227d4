"""Writers on a server that is killed at random: is each confirmed item there, once, or counted as uncovered?"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tensor_codec import decode

import reverb_writer as rw
from reverb_writer.files.saved_replay import open_saved
from reverb_writer.protocol import messages

EPISODE = 20
PATIENCE_S = 120.0


class Writer:
    """A thread that writes one number per item, and remembers the numbers that the server has confirmed."""

    def __init__(self, address: str, table: str, first: int, pause_s: float, **options: object) -> None:
        self.confirmed: list[int] = []
        self.stats = rw.ObserverStats()
        self._address, self._table, self._next, self._pause_s = address, table, first, pause_s
        self._options = options
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001  # `end` raises it
            self._error = error

    def _write(self) -> None:
        with (
            rw.Client(self._address, timeout_s=PATIENCE_S) as client,
            rw.TrajectoryObserver(client, self._table, 1, timeout_s=PATIENCE_S, **self._options) as observer,  # type: ignore[arg-type]
        ):
            while not self._ended.is_set():
                numbers = range(self._next, self._next + EPISODE)
                self._next += EPISODE
                for number in numbers:
                    observer({"number": np.int64(number)}, end_of_episode=number == numbers[-1])
                observer.flush()
                self.confirmed += numbers
                time.sleep(self._pause_s)
            observer.flush()
            self.stats = observer.stats()

    def end(self) -> None:
        """End the thread, with everything confirmed; the observer then closes."""
        self._ended.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def writers(address: str, number: int, table: str = "replay", pause_s: float = 0.01) -> Iterator[list[Writer]]:
    """Start writers whose numbers differ, and end them with the block."""
    made = [Writer(address, table, first << 32, pause_s) for first in range(number)]
    try:
        yield made
    finally:
        for one in made:
            one.end()


def numbers_in(folder: Path, table: str = "replay") -> Counter[int]:
    """Return how often each number is in a table of the newest checkpoint of a folder."""
    saved = open_saved(folder)
    chunks = {chunk.chunk_key: decode(chunk.data.tensors[0]) for chunk, _ in saved.chunks()}
    found: Counter[int] = Counter()
    for item in saved.parsed_items(messages.PrioritizedItem):
        if item.table == table:
            for part in item.flat_trajectory.columns[0].chunk_slices:
                found.update(chunks[part.chunk_key][part.offset : part.offset + part.length].ravel().tolist())
    return found


def check(there: Counter[int], made: list[Writer]) -> str:
    """Check that each confirmed number is there once or counted; return the books as a line."""
    confirmed = [number for one in made for number in one.confirmed]
    missing = [number for number in confirmed if not there[number]]
    uncovered = sum(one.stats.uncovered_items for one in made)
    recovered = sum(one.stats.recovered_items for one in made)
    restarts = sum(one.stats.server_restarts for one in made)
    line = (
        f"{len(confirmed):,} confirmed, {len(missing):,} missing, {uncovered:,} uncovered, {recovered:,} sent again, "
        f"{restarts} restarts seen"
    )
    assert len(set(confirmed)) == len(confirmed)
    assert max(there.values(), default=1) == 1, line
    assert len(missing) <= uncovered, line
    return line
