"""The second half of `make soak`: kills under writers, with damaged checkpoints; no confirmed item is lost uncounted.

    python -m soak.kills --kills 50 --seed 1

`kills.kill_at_random` checks a service, whose child, supervisor or both are killed, and a `LocalServer`. The exit code
is 1 if a confirmed item is missing and not counted, or is there twice.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

from kills import Local, Service, kill_at_random


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a server under its writers; see what is lost.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # each kill is a warning of each writer
    for kind in (Service, Local):
        with tempfile.TemporaryDirectory() as folder:
            line = kill_at_random(kind, Path(folder), arguments.kills, arguments.seed)
        print(f"{kind.__name__}, seed {arguments.seed}, {arguments.kills} kills: {line}", flush=True)


if __name__ == "__main__":
    main()
