"""`make soak`: a server, four actors and two learners, killed, paused and restarted at random; the books balance.

    confirmed = in the table + removed by its own rule + lost with the time since the last checkpoint

Each item is followed by name. It is in the last checkpoint; or older than all that are there, and the table counts as
many removals; or it was confirmed after the checkpoint began from which the next server came back. Anything else is an
error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverb_writer_server.checkpoint import Checkpoint, inspect
from reverb_writer_server.checkpoints import checkpoints_in
from reverb_writer_server.records import CHUNKS, ITEMS, read_records
from service_process import ServiceProcess

from reverb_writer.wire import messages, tensors

MAX_SIZE = 20_000
CHECKPOINT_EVERY_S = 5
SLACK_S = 5  # from a confirmation to the line that says so, in an actor that may be paused between
END_WITHIN_S = 120
HERE = Path(__file__).parent.parent
CONFIGURATION = """
[checkpoints]
directory = "{folder}/checkpoints"
every_s = {every}
[tables.replay]
max_size = {max_size}
"""


@dataclass
class Worker:
    """An actor or a learner, which is started again and again."""

    line: Sequence[str]
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen([sys.executable, "-m", "soak.worker", *self.line], env=environment)

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        self.process.wait(END_WITHIN_S)


@dataclass(frozen=True)
class Confirmed:
    """A batch that an actor wrote down."""

    at: float
    numbers: range


@dataclass(frozen=True)
class Loss:
    """A server that was killed: what was confirmed within this time may be lost."""

    since: float
    until: float


def soak(minutes: float, seed: int, folder: Path) -> str:
    """Run it, and return the books as text."""
    chance = random.Random(seed)  # noqa: S311  # no secrets
    text = CONFIGURATION.format(folder=folder, every=CHECKPOINT_EVERY_S, max_size=MAX_SIZE)
    server = ServiceProcess(folder, text)
    server.wait_ready()
    actors = [Worker(["actor", server.address, str(folder / f"actor-{i}"), str(i)]) for i in range(4)]
    learners = [Worker(["learner", server.address]) for _ in range(2)]
    victims: list[ServiceProcess | Worker] = [server, server, server, *actors, *learners]
    losses: list[Loss] = []
    deeds = {"kill": 0, "pause": 0, "restart": 0}
    try:
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            time.sleep(chance.uniform(1, 4))
            deed = chance.choice([*deeds])
            victim = chance.choice(victims)
            deeds[deed] += 1
            _do(deed, victim, folder, losses)
        for worker in [*actors, *learners]:
            worker.end(signal.SIGTERM)
            if worker.process.returncode not in (0, -signal.SIGTERM):  # the latter if it had only just been started
                raise RuntimeError(f"{worker.line} ended with {worker.process.returncode}")
        if server.end() != 0:
            raise RuntimeError(f"the server ended with {server.process.returncode}:\n{server.log()}")
    finally:
        for worker in [*actors, *learners]:
            worker.process.kill()
        server.close()
    summary = ", ".join(f"{count} x {deed}" for deed, count in deeds.items())
    return f"{minutes:g} minutes, {summary}, {len(losses)} of them a server killed\n{_books(folder, losses)}"


def _do(deed: str, victim: ServiceProcess | Worker, folder: Path, losses: list[Loss]) -> None:
    if deed == "pause":
        numbers = [victim.process.pid, *([victim.child()] if isinstance(victim, ServiceProcess) else [])]
        for number in numbers:
            os.kill(number, signal.SIGSTOP)
        time.sleep(2)
        for number in numbers:
            os.kill(number, signal.SIGCONT)
    elif isinstance(victim, Worker):
        victim.end(signal.SIGKILL if deed == "kill" else signal.SIGTERM)
        victim.start()
    else:
        victim.end(signal.SIGKILL if deed == "kill" else signal.SIGTERM)
        killed_at = time.time()
        victim.restart()
        if deed == "kill":
            losses.append(Loss(_began(_restored(victim.log(), folder)), killed_at))


def _restored(log: str, folder: Path) -> Path:
    """Return the checkpoint that the last server came back from."""
    lines = [line for line in log.splitlines() if "restored checkpoint" in line or "nothing to restore" in line]
    if "nothing" in lines[-1]:
        return folder
    return folder / "checkpoints/kept" / lines[-1].partition("restored checkpoint ")[2].split()[0]


def _began(checkpoint: Path) -> float:
    """Return when the tables of a checkpoint were captured, or a little earlier; 0 for a folder without one."""
    tables = checkpoint / "tables.tfrecord"  # finished just after
    return tables.stat().st_mtime - SLACK_S if tables.exists() else 0.0


def _books(folder: Path, losses: Sequence[Loss]) -> str:
    newest = checkpoints_in(folder / "checkpoints")[0]
    contents = inspect(newest)
    (table,) = (table for table in contents.tables if table.name == "replay")
    there = set(_numbers(newest))
    confirmed = [batch for journal in folder.glob("actor-*") for batch in _journal(journal)]
    oldest_at = min(batch.at for batch in confirmed if not there.isdisjoint(batch.numbers))
    held = removed = lost = 0
    for batch in confirmed:
        for number in batch.numbers:
            if number in there:
                held += 1
            elif any(loss.since <= batch.at <= loss.until + SLACK_S for loss in losses):
                lost += 1
            elif batch.at <= oldest_at + SLACK_S:
                removed += 1
            else:
                raise RuntimeError(f"item {number}, confirmed at {batch.at}, is neither there, nor removed, nor lost")
    total = sum(len(batch.numbers) for batch in confirmed)
    if removed > table.deletes or len(there) != contents.items["replay"]:
        raise RuntimeError(f"{removed} items removed, the table counts {table.deletes}")
    return (
        f"confirmed {total:,} = in the table {held:,} + removed {removed:,} + lost with a kill {lost:,}\n"
        f"in the table and not confirmed: {len(there) - held:,}; removals that the table counts: {table.deletes:,}"
    )


def _journal(path: Path) -> Iterator[Confirmed]:
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):  # the actor was killed in the middle of it
            at, first, count = line.split()
            yield Confirmed(float(at), range(int(first), int(first) + int(count)))


def _numbers(checkpoint: Checkpoint) -> Iterator[int]:
    chunks: dict[int, Any] = {}
    for record in read_records(checkpoint.path / CHUNKS):
        chunk = messages.ChunkData.FromString(record)
        chunks[chunk.chunk_key] = tensors.decode(chunk.data.tensors[0])
    for record in read_records(checkpoint.path / ITEMS):
        item = messages.PrioritizedItem.FromString(record)
        for part in item.flat_trajectory.columns[0].chunk_slices if item.table == "replay" else ():
            yield from chunks[part.chunk_key][part.offset : part.offset + part.length].ravel().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill, pause and restart server, actors and learners at random.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    arguments = parser.parse_args()
    print(f"soak: seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        print(soak(arguments.minutes, arguments.seed, Path(folder)))


if __name__ == "__main__":
    main()
