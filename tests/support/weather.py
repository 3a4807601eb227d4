"""Connections that are cut and muted at random while a test writes or reads."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence

from forwarder import Forwarder
from server_process import StartServer

from reverb_writer.tables import TableConfig


def first_seed() -> int:
    """Return the seed of REVERB_WRITER_SEED or of the time, and print it."""
    seed = int(os.environ.get("REVERB_WRITER_SEED", "") or time.time_ns() % 1_000_000)
    print(f"REVERB_WRITER_SEED={seed}")
    return seed


class Weather:
    """Cuts and mutes connections at random until it is closed."""

    def __init__(self, lines: Sequence[Forwarder], chance: random.Random) -> None:
        """Begin, in a thread."""
        self._lines, self._chance = lines, chance
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._chance.uniform(0.05, 0.8)):
            line = self._chance.choice(self._lines)
            if self._chance.random() < 0.15:
                line.mute()
            else:
                line.cut()

    def close(self) -> None:
        """Cut and mute nothing more."""
        self._ended.set()
        self._thread.join()


@contextlib.contextmanager
def lines_to(
    start: StartServer, tables: Sequence[TableConfig], num_servers: int
) -> Iterator[tuple[list[str], list[Forwarder]]]:
    """Yield the addresses of servers, and a forwarder to each."""
    with contextlib.ExitStack() as stack:
        servers = [start(*tables) for _ in range(num_servers)]
        yield (
            [server.address for server in servers],
            [stack.enter_context(Forwarder(server.port)) for server in servers],
        )
