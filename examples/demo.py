"""A server, actors and a learner on CartPole-v1, each in its own process, with live figures in the terminal.

    make demo
    python examples/demo.py --actors 3 --seed 0

Ends when the mean return passes the goal, or time is up; Ctrl-C ends it at once. The processes are the
scripts beside this one, started as by hand.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

import reverb_writer as rw
from server import has_reverb

GOAL = 150.0
NUM_LAST = 20  # episodes that the mean return is taken over
TICK_S = 0.25
RATE_S = 3.0  # the span that rates are taken over
LINE_S = 5.0  # where there is no terminal, a line this often
STOP_S = 5.0  # patience with a process that should end

PR_SET_PDEATHSIG = 1


class ChildEndedError(RuntimeError):
    """A process ended unexpectedly."""


class Processes:
    """Scripts of this folder, each in its own process; all end with the `with` block."""

    def __init__(self) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="reverb-writer-demo-")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, script: str, *arguments: object) -> None:
        """Run a script in its own session, so that Ctrl-C reaches only the demo, which ends the others."""
        with self._log(name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # the matrices are small, and the cores are shared
                preexec_fn=end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  # no other thread yet
            )

    def check(self) -> None:
        """Raise if one has ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                how = f"ended with exit code {process.returncode}"
                if process.returncode < 0:
                    how = f"was killed by {signal.Signals(-process.returncode).name}"
                lines = self._log(name).read_text(errors="replace").splitlines()[-15:]
                raise ChildEndedError("\n".join([f"{name} {how}. The end of its output:", *(lines or ["(none)"])]))

    def stop(self) -> None:
        """End all processes, the last started first, so that clients end before the server."""
        for process in reversed(self._running.values()):
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._logs.cleanup()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _log(self, name: str) -> Path:
        return Path(self._logs.name, name)


class Progress:
    """The progress of the run, as reported by the server."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.num_episodes = self.num_steps = self.num_items = self.num_samples = self.num_variables = 0
        self._returns: collections.deque[float] = collections.deque(maxlen=NUM_LAST)
        self._counts: collections.deque[tuple[float, int, int, int]] = collections.deque()
        self._count()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_at

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last 20 episodes; None while there are fewer."""
        return sum(self._returns) / NUM_LAST if len(self._returns) == NUM_LAST else None

    def passes(self, goal: float) -> bool:
        """Return whether the mean return is above `goal`."""
        return self.mean_return is not None and self.mean_return > goal

    @property
    def ratio(self) -> float:
        """Samples per insert."""
        return self.num_samples / max(1, self.num_items)

    @property
    def rates(self) -> tuple[float, float, float]:
        """Recent rates of steps, items and samples per second."""
        then, *before = self._counts[0]
        now, *after = self._counts[-1]
        steps, items, samples = (
            (late - early) / max(TICK_S, now - then) for early, late in zip(before, after, strict=True)
        )
        return steps, items, samples

    def update(self, client: rw.Client) -> None:
        """Update the figures from the server."""
        info = client.server_info(timeout_s=2)
        if size := info["episodes"].current_size:
            for sample in client.sample("episodes", size, timeout_s=2):
                (episode_return,), (length,) = sample.data
                self._returns.append(float(episode_return))
                self.num_episodes += 1
                self.num_steps += int(length)
        windows = info["cartpole"].rate_limiter
        self.num_items, self.num_samples = windows.num_inserts, windows.num_samples
        self.num_variables = info["variables"].rate_limiter.num_inserts
        self._count()

    def _count(self) -> None:
        self._counts.append((self.seconds, self.num_steps, self.num_items, self.num_samples))
        while self._counts[-1][0] - self._counts[0][0] > RATE_S:
            self._counts.popleft()


class Display:
    """The display of `Progress`: a live table in a terminal, lines elsewhere."""

    def __init__(self, console: Console, seconds: float, goal: float) -> None:
        self._console, self._seconds, self._goal = console, seconds, goal
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._next_line_s = 0.0

    def show(self, progress: Progress) -> None:
        """Update the display."""
        if self._console.is_terminal:
            self._live.update(self.table(progress), refresh=True)
        elif progress.seconds >= self._next_line_s:
            self._next_line_s = progress.seconds + LINE_S
            steps, items, samples = progress.rates
            self._console.print(
                f"{progress.seconds:4.0f} s: {steps:.0f} steps/s, {items:.0f} items/s, {samples:.0f} samples/s, "
                f"{progress.ratio:.1f} samples per insert, mean return {_number(progress.mean_return)}",
                soft_wrap=True,
            )

    def table(self, progress: Progress) -> Table:
        """Return the numbers, with their rates."""
        steps, items, samples = progress.rates
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right"):
            table.add_column(justify=justify)
        table.add_row("seconds", f"{progress.seconds:.0f}", f"of {self._seconds:.0f}")
        table.add_row("steps", f"{progress.num_steps:,}", f"{steps:,.0f} /s")
        table.add_row("items", f"{progress.num_items:,}", f"{items:,.0f} /s")
        table.add_row("samples", f"{progress.num_samples:,}", f"{samples:,.0f} /s")
        table.add_row("samples per insert", f"{progress.ratio:.1f}")
        table.add_row("weights published", f"{progress.num_variables:,}")
        table.add_row("episodes", f"{progress.num_episodes:,}")
        mean = f"[bold]{_number(progress.mean_return)}[/]"
        table.add_row(f"mean return of the last {NUM_LAST}", mean, f"goal {self._goal:g}")
        return table

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def run(arguments: argparse.Namespace, console: Console, progress: Progress, signals: list[int]) -> None:
    """Start all processes, and show progress until the goal is reached, time is up or a signal is received."""
    port = free_port()
    address = f"localhost:{port}"
    seeds = [] if arguments.seed is None else [arguments.seed + index for index in range(arguments.actors + 1)]
    with Processes() as processes:
        processes.start("server", "server.py", "--port", port)
        for index, script in enumerate(["learner.py"] + ["actor.py"] * arguments.actors):
            name = script.removesuffix(".py") + (f" {index}" if index else "")
            seed = ["--seed", seeds[index]] if seeds else []
            processes.start(name, script, "--server", address, *seed)
        server = "dm-reverb's server" if has_reverb() else "LocalServer"
        actors = f"{arguments.actors} actors"
        console.print(f"reverb-writer {rw.__version__}: {server} at {address}, a learner, {actors}", soft_wrap=True)
        display = Display(console, arguments.seconds, arguments.goal)
        with rw.Client(address) as client, display:
            while not signals and progress.seconds < arguments.seconds:
                processes.check()
                with contextlib.suppress(
                    rw.errors.ServerUnavailableError, rw.errors.ReplayTimeoutError
                ):  # starting, or busy
                    progress.update(client)
                display.show(progress)
                if progress.passes(arguments.goal):
                    break
                time.sleep(TICK_S)
        console.print(display.table(progress))


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 through a replay server.")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--seed", type=int, help="without it, each run is different")
    parser.add_argument("--seconds", type=float, default=120.0, help="time to learn")
    parser.add_argument("--goal", type=float, default=GOAL, help=f"mean return of the last {NUM_LAST} episodes to pass")
    arguments = parser.parse_args()
    if arguments.actors < 1:
        parser.error(f"--actors must be >= 1, got {arguments.actors}")

    signals: list[int] = []
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
        signal.signal(number, lambda number, _: signals.append(number))
    console, progress = Console(highlight=False), Progress()
    try:
        run(arguments, console, progress, signals)
    except ChildEndedError as error:
        console.print(str(error), markup=False)
        return 1
    if signals:
        console.print(f"Stopped by {signal.Signals(signals[0]).name}.")
        return 128 + signals[0]
    if not progress.passes(arguments.goal):
        console.print(f"The mean return did not pass {arguments.goal:g} within {progress.seconds:.0f} s.")
        return 1
    console.print(f"The mean return passed {arguments.goal:g} after {progress.seconds:.0f} s.")
    return 0


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.create_server(("", 0)) as trial:
        port: int = trial.getsockname()[1]
    return port


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the demo ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
