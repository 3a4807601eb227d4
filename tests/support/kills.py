"""Writers on a server that is killed at random: is each confirmed item there, once, or counted as uncovered?

python kills.py FOLDER PORT EVERY_S     a `LocalServer` with a table `replay`, which saves, until SIGTERM
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ports import free_port
from service_process import ServiceProcess, flip, kept
from tensor_codec import decode

import reverb_writer as rw
from reverb_writer.files.saved_replay import open_saved
from reverb_writer.protocol import messages

EPISODE = 20
PATIENCE_S = 120.0
DAMAGED = 0.3  # share of the kills after which the newest checkpoint is damaged, or the save is deleted
MAX_SIZE = 10_000_000
CONFIGURATION = """
[checkpoints]
directory = "{folder}/checkpoints"
every_s = 1
keep = 4
safe_after = 2
[tables.replay]
max_size = {size}
"""


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


class Service:
    """`reverb-writer-server`, of which the child, the supervisor or both are killed."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._process = ServiceProcess(folder, CONFIGURATION.format(folder=folder, size=MAX_SIZE))
        self._process.wait_ready()
        self.address, self.saved, self.life_s = self._process.address, folder / "checkpoints", 6.0

    def kill(self) -> None:
        """Kill it, damage its newest checkpoint now and then, and start it again."""
        victims = [self._process.child(), self._process.process.pid]
        for victim in self._chance.choice([victims[:1], victims[1:], victims]):
            os.kill(victim, signal.SIGKILL)
        self._process.process.wait(PATIENCE_S)
        found = kept(self._folder)
        if len(found) > 1 and self._chance.random() < DAMAGED:
            flip(self.saved / "kept" / found[-1] / "items.tfrecord")
        self._process.restart()

    def end(self) -> None:
        """End it with a last checkpoint."""
        assert self._process.end() == 0, self._process.log()

    def close(self) -> None:
        self._process.close()


class Local:
    """A `LocalServer` in a process of its own, which is killed."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._chance, self.saved, self._port = chance, folder / "saved", free_port()
        self.address, self.life_s = f"127.0.0.1:{self._port}", 2.5
        self._start()

    def _start(self) -> None:
        line = [sys.executable, __file__, str(self.saved), str(self._port), "0.3"]
        self._process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """Kill it, delete its save now and then, and start it again."""
        self._process.kill()
        self._process.communicate()
        if self._chance.random() < DAMAGED / 3:
            shutil.rmtree(self.saved, ignore_errors=True)
        self._start()

    def end(self) -> None:
        """End it with a last save."""
        self._process.terminate()
        assert self._process.wait(PATIENCE_S) == 0

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def kill_at_random(kind: type[Service | Local], folder: Path, num_kills: int, seed: int) -> str:
    """Kill a server under three writers again and again, check its items, and return the books as a line."""
    chance = random.Random(seed)  # noqa: S311  # no secrets
    with contextlib.closing(kind(folder, chance)) as server:
        with writers(server.address, 3) as made:
            for _ in range(num_kills):
                time.sleep(chance.uniform(0.1, server.life_s))
                server.kill()
        server.end()
        return check(numbers_in(server.saved), made)


def _serve_local() -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    folder, port, every_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    try:
        server = rw.LocalServer.restore(folder, port)
    except rw.errors.FormatError:
        server = rw.LocalServer([rw.TableConfig("replay", MAX_SIZE)], port)
    print("ready", flush=True)
    with server:
        while not ended.wait(every_s):
            server.save(folder)
        server.save(folder)


if __name__ == "__main__":
    _serve_local()
