"""The replay server of the demo (dm-reverb's server or `LocalServer`), with the tables of actors and learner.

    python examples/server.py --port 8000

| table       | written by | read by | an item                                              |
| ----------- | ---------- | ------- | ---------------------------------------------------- |
| `cartpole`  | actors     | learner | a window of steps                                    |
| `variables` | learner    | actors  | the newest weights of the Q-network                  |
| `returns`   | actors     | demo    | return and length of an episode; each is read once   |
"""

from __future__ import annotations

import argparse
import importlib.util
import signal
import threading
from contextlib import AbstractContextManager
from typing import Any

from reverb_writer import LocalServer, SampleToInsertRatio, TableConfig

# The learner samples each window about 48 times. No side runs ahead by more than 480 samples, or 10 windows. Otherwise
# actors would fill the table with data of an old policy, or the learner would overfit to a few windows.
RATIO = SampleToInsertRatio(samples_per_insert=48, min_size=50, error_buffer=480)

TABLES = [
    TableConfig("cartpole", max_size=5_000, rate_limiter=RATIO),
    TableConfig.variables("variables"),
    TableConfig.returns("returns"),
]


def has_reverb() -> bool:
    """Return whether dm-reverb and `reverb_writer_server` are installed."""
    return all(importlib.util.find_spec(package) for package in ("reverb", "reverb_writer_server"))


def start(port: int) -> AbstractContextManager[Any]:
    """Start dm-reverb's server if it is installed, otherwise a `LocalServer`."""
    if has_reverb():
        from reverb_writer_server import ReplayServer

        return ReplayServer(TABLES, port)
    return LocalServer(TABLES, port)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the tables of the demo until SIGINT or SIGTERM.")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()

    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    with start(arguments.port) as server:
        print(f"serving at {server.address}", flush=True)
        while not stopping.wait(0.5):  # on Windows, Ctrl-C arrives only between two waits
            pass


if __name__ == "__main__":
    main()
