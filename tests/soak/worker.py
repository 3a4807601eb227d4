"""The soak's workers: an actor that writes down what was confirmed, and a learner. SIGTERM ends either.

    python -m soak.worker actor ADDRESS JOURNAL NUMBER
    python -m soak.worker learner ADDRESS

An item holds one number: the actor's, the start of this process, and a count, so that no two are alike.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import reverb_writer as rw

BATCH = 20
PAUSE_S = 0.02
PATIENCE_S = 60.0
_ended = threading.Event()


def act(address: str, journal: Path, number: int) -> None:
    """Write numbers; once a batch is confirmed, add a line with the time, the first and how many."""
    first = (number << 56) | (int(time.time() * 1000) << 12)
    with journal.open("a", buffering=1) as lines, rw.Client(address, timeout_s=PATIENCE_S) as client:
        observer = rw.TrajectoryObserver(client, "replay", sequence_length=1)
        while not _ended.is_set():
            for count in range(BATCH):
                observer({"number": np.int64(first + count)})
            observer.flush()
            lines.write(f"{time.time()} {first} {BATCH}\n")
            first += BATCH
            time.sleep(PAUSE_S)
        observer.close()


def learn(address: str) -> None:
    """Sample for ever, whatever happens to the server."""
    with rw.Client(address, timeout_s=PATIENCE_S) as client:
        while not _ended.is_set():
            with contextlib.suppress(rw.ReplayTimeoutError, rw.ServerUnavailableError):
                for _ in client.sample("replay", 10 * BATCH, timeout_s=5.0):
                    pass


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: _ended.set())
    role, address, *rest = sys.argv[1:]
    if role == "actor":
        act(address, Path(rest[0]), int(rest[1]))
    else:
        learn(address)
    os._exit(0)  # gRPC's threads are of no use any more


if __name__ == "__main__":
    main()
