"""`make soak`: a server and its users, killed, paused, restarted, interrupted and forked at random; the books balance.

    a fault every few seconds  kill, pause (SIGSTOP) or restart of the server or a worker, or a fork inside a worker;
                               of the server, both of its processes or only the one with Reverb
    about ten times a second   SIGINT to a worker

`soak.books` checks what must balance; `soak.worker` is the workers' program. A seed gives the same faults again, but
not at the same moments. The exit code is 1 if the books do not balance, or if there was an unexpected error.
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reverb_writer_server.checkpoints.folder import checkpoints_in
from service_process import ServiceProcess
from waiting import eventually

from soak.books import Books, Loss

CHECKPOINT_EVERY_S = 5
SLACK_S = 5  # from the begin of a checkpoint to its tables' file
PAUSED_S = (0.5, 6.0)
END_WITHIN_S = 120
REVERB_DIED = 4  # the service's exit code
NUM_ACTORS, NUM_LEARNERS = 3, 2
HERE = Path(__file__).parents[1] / "support"
CONFIGURATION = """
[checkpoints]
directory = "{folder}/checkpoints"
every_s = {every}
[tables.replay]
max_size = 20_000
sampler = "prioritized"
[tables.queue]
max_size = 4_000
rate_limiter = "queue"
"""


@dataclass
class Worker:
    """An actor or a learner, which is restarted repeatedly."""

    line: Sequence[str]
    seed: str
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        line = [sys.executable, "-m", "soak.worker", *self.line, self.seed]
        self.process = subprocess.Popen(
            line, env=environment, start_new_session=True
        )  # with the children that it forks

    def send(self, number: signal.Signals) -> None:
        if _takes_signals(self.process.pid):
            self.process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        """End the process, and return its exit code; 0 for one that had just been started."""
        if number is signal.SIGKILL:
            self.kill()
        self.process.send_signal(number)
        code = self.process.wait(END_WITHIN_S)
        return 0 if code == -number else code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Soak:
    """A server, its workers, and the faults that were injected."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._chance = random.Random(seed)  # noqa: S311  # no secrets
        self.server = ServiceProcess(folder, CONFIGURATION.format(folder=folder, every=CHECKPOINT_EVERY_S))
        self.server.wait_ready()
        self.actors = [self._worker("actor", number) for number in range(NUM_ACTORS)]
        self.learners = [self._worker("learner", number) for number in range(NUM_LEARNERS)]
        self.num_injected: Counter[str] = Counter()
        self.kills: list[Loss] = []
        self.faults: list[str] = []
        self._started = time.monotonic()

    @property
    def workers(self) -> list[Worker]:
        return [*self.actors, *self.learners]

    def run(self, minutes: float) -> None:
        """Inject a fault every few seconds; then end the workers and the server."""
        while time.monotonic() < self._started + 60 * minutes:
            self._interrupt_for(self._chance.uniform(0.5, 3))
            deed = self._chance.choice([self._kill, self._pause, self._restart, self._fork])
            deed()
        for worker in self.workers:  # the actors first: they need learners to end
            self._end(worker)
        if self.server.end() != 0:
            raise RuntimeError(f"the server ended with {self.server.process.returncode}:\n{self.server.log()}")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.process.wait(END_WITHIN_S)
        self.server.close()

    def balance(self) -> tuple[list[str], list[str]]:
        """Return the books as lines, and the faults found."""
        books = Books.read(self._folder)
        lines = books.balance(checkpoints_in(self._folder / "checkpoints")[0], self.kills)
        return lines, [*self.faults, *books.faults]

    def _worker(self, role: str, number: int) -> Worker:
        return Worker([role, self.server.address, str(self._folder), str(number)], f"{self._seed} {role} {number}")

    def _interrupt_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(self._chance.uniform(0.02, 0.2))
            self._chance.choice(self.workers).send(signal.SIGINT)
            self.num_injected["SIGINT"] += 1

    def _kill(self) -> None:
        """Kill the server or an actor. Learners are not killed, because their samples would be lost uncounted."""
        victim = self._victim(self.actors)
        self._count("kill", victim)
        if isinstance(victim, Worker):
            victim.end(signal.SIGKILL)
            victim.start()
            return
        if self._chance.random() < 1 / 2:
            os.kill(victim.child(), signal.SIGKILL)
            if victim.process.wait(END_WITHIN_S) != REVERB_DIED:
                self.faults.append(f"the server ended with {victim.process.returncode} when Reverb was killed")
        else:
            victim.end(signal.SIGKILL)
        killed_at = time.time()
        victim.restart()
        self.kills.append(Loss(_began(_restored(victim.log(), self._folder)), killed_at))

    def _restart(self) -> None:
        victim = self._victim(self.workers)
        self._count("restart", victim)
        if isinstance(victim, Worker):
            self._end(victim)
            victim.start()
        else:
            victim.end(signal.SIGTERM)
            victim.restart()

    def _pause(self) -> None:
        victim = self._victim(self.workers)
        self._count("pause", victim)
        if isinstance(victim, ServiceProcess):
            numbers = self._chance.choice([[victim.process.pid, victim.child()], [victim.child()]])
        else:
            numbers = [victim.process.pid]
        for number in numbers:
            os.kill(number, signal.SIGSTOP)
        self._interrupt_for(self._chance.uniform(*PAUSED_S))
        for number in numbers:
            os.kill(number, signal.SIGCONT)
        if isinstance(victim, ServiceProcess):
            eventually(lambda: victim.get("/readyz")[0] == 200, "the server is ready again")
            if victim.get("/livez")[0] != 200:
                self.faults.append("the server was paused and is ready again, and /livez fails")

    def _fork(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGUSR1)
            self._count("fork", worker)

    def _victim(self, workers: Sequence[Worker]) -> ServiceProcess | Worker:
        """Return the server or, half of the time, a worker."""
        return self.server if self._chance.random() < 1 / 2 else self._chance.choice(workers)

    def _count(self, deed: str, victim: ServiceProcess | Worker) -> None:
        name = f"{deed} {victim.line[0] if isinstance(victim, Worker) else 'server'}"
        self.num_injected[name] += 1
        print(f"{time.monotonic() - self._started:5.0f} s  {name}", flush=True)

    def _end(self, worker: Worker) -> None:
        name = f"{worker.line[0]} {worker.line[-1]}"
        try:
            code = worker.end(signal.SIGTERM)
        except subprocess.TimeoutExpired:
            self.faults.append(f"{name} did not end within {END_WITHIN_S} s of SIGTERM")
            worker.process.send_signal(signal.SIGUSR2)  # where it is
            time.sleep(1)
            worker.kill()
            worker.process.wait(END_WITHIN_S)
        else:
            if code:
                self.faults.append(f"{name} ended with {code}")

    def summary(self) -> str:
        return ", ".join(f"{count} x {deed}" for deed, count in sorted(self.num_injected.items()))


def _takes_signals(number: int) -> bool:
    """Return whether a process has its signal handlers: without them a signal would end it."""
    caught = next(line for line in Path(f"/proc/{number}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def _restored(log: str, folder: Path) -> Path:
    """Return the checkpoint that the last server has restored."""
    lines = [line for line in log.splitlines() if "restored checkpoint" in line or "nothing to restore" in line]
    if "nothing" in lines[-1]:
        return folder
    return folder / "checkpoints/kept" / lines[-1].partition("restored checkpoint ")[2].split()[0]


def _began(checkpoint: Path) -> float:
    """Return when the tables of a checkpoint were captured, or a little earlier; 0 for a folder without one."""
    tables = checkpoint / "tables.tfrecord"  # finished just after
    return tables.stat().st_mtime - SLACK_S if tables.exists() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill, pause, interrupt and fork at random; see what is lost.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("soak: stopped"))  # and all that it has started
    print(f"soak: seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), arguments.seed)
        with contextlib.closing(soak):
            soak.run(arguments.minutes)
        lines, faults = soak.balance()
    print("\n".join([f"{arguments.minutes:g} minutes: {soak.summary()}", *lines]))
    for fault, count in Counter(faults).items():
        print(f"FAULT {count} x {fault}")
    if faults:
        sys.exit(f"soak: {len(faults)} faults; seed {arguments.seed}")


if __name__ == "__main__":
    main()
