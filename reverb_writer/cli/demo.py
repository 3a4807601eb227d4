"""`reverb-writer demo`: a server, actors and a learner on CartPole, each in its own process, live in this terminal.

The processes run the scripts of `examples/`. All processes end with the demo.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

import reverb_writer as rw

_PACKAGE = Path(__file__).parents[1]
# A wheel holds the scripts beside the package's modules; a working copy has them in `examples`.
_FOLDERS = (_PACKAGE / "demo", _PACKAGE.parent / "examples")
_NUM_LAST = 20  # episodes of the mean return
_TICK_S = 0.25
_LINE_S = 5.0  # time between lines without a terminal
_STOP_S = 5.0  # time for a process to end
_PR_SET_PDEATHSIG = 1


@click.command("demo")
@click.option("--actors", type=click.IntRange(min=1), default=2, show_default=True, help="Number of actors.")
@click.option("--seed", type=int, help="By default, each run is different.")
@click.option("--seconds", default=120.0, show_default=True, help="Time to learn.")
@click.option("--goal", default=150.0, show_default=True, help=f"Mean return of the last {_NUM_LAST} episodes to pass.")
def command(actors: int, seed: int | None, seconds: float, goal: float) -> None:
    """Run server, actors and a learner on CartPole, live in the terminal, until the mean return passes the goal."""
    if not importlib.util.find_spec("gymnasium"):
        raise click.ClickException("the demo needs gymnasium: pip install 'reverb-writer[demo]'")
    folder = next((folder for folder in _FOLDERS if (folder / "learner.py").exists()), None)
    if folder is None:
        raise click.ClickException("the demo's scripts are not installed: reinstall reverb-writer from a wheel")
    signals: list[int] = []
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
        signal.signal(number, lambda number, _: signals.append(number))
    console, progress = Console(highlight=False), _Progress()
    with _started(folder, actors, seed) as (address, processes), rw.Client(address) as client:
        has_reverb = all(importlib.util.find_spec(package) for package in ("reverb", "reverb_writer_server"))
        server = "dm-reverb's server" if has_reverb else "LocalServer"
        console.print(
            f"reverb-writer {rw.__version__}: {server} at {address}, a learner, {actors} actors", soft_wrap=True
        )
        with Live(console=console, auto_refresh=False, transient=True) as live:
            next_line_s = 0.0
            while not signals and progress.seconds < seconds and not progress.mean_return > goal:
                _check(processes)
                with contextlib.suppress(rw.errors.ServerUnavailableError, rw.errors.ReplayTimeoutError):
                    progress.update(client)  # has no figures while the server starts or is busy
                if console.is_terminal:
                    live.update(progress.table(), refresh=True)
                elif progress.seconds >= next_line_s:
                    next_line_s = progress.seconds + _LINE_S
                    console.print(progress.line(), soft_wrap=True)
                time.sleep(_TICK_S)
        console.print(progress.table())
    if signals:
        console.print(f"Stopped by {signal.Signals(signals[0]).name}.")
        sys.exit(128 + signals[0])
    is_reached = progress.mean_return > goal
    passed = f"passed {goal:g} after" if is_reached else f"did not pass {goal:g} within"
    console.print(f"The mean return {passed} {progress.seconds:.0f} s.")
    sys.exit(not is_reached)


class _Progress:
    """The progress of the run, as the server reports it."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._numbers = dict.fromkeys(("steps", "items", "samples", "weights published", "episodes"), 0)
        self._episodes: rw.EpisodeReturns | None = None  # None before the server runs
        self._mean_return = float("nan")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def mean_return(self) -> float:
        """Mean return of the last 20 episodes; NaN before 20 episodes have ended."""
        return self._mean_return if self._numbers["episodes"] >= _NUM_LAST else float("nan")

    def update(self, client: rw.Client) -> None:
        info = client.server_info(timeout_s=2)
        if self._episodes is None:
            self._episodes = rw.EpisodeReturns(client, "returns", timeout_s=2, num_last=_NUM_LAST)
        found = self._episodes.as_scalars()
        self._numbers["episodes"], self._numbers["steps"] = int(found["episodes"]), int(found["episode_steps"])
        self._mean_return = found.get("mean_return", self._mean_return)
        windows = info["cartpole"].rate_limiter
        self._numbers["items"], self._numbers["samples"] = windows.num_inserts, windows.num_samples
        self._numbers["weights published"] = info["variables"].rate_limiter.num_inserts

    def table(self) -> Table:
        """Return the numbers, with their rates since the start."""
        table = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right"):
            table.add_column(justify=justify)
        table.add_row("seconds", f"{self.seconds:.0f}")
        for name, number in self._numbers.items():
            table.add_row(name, f"{number:,}", f"{number / self.seconds:,.0f} /s")
        table.add_row(f"mean return of the last {_NUM_LAST}", f"[bold]{self.mean_return:.1f}[/]")
        return table

    def line(self) -> str:
        numbers = ", ".join(f"{number:,} {name}" for name, number in self._numbers.items())
        return f"{self.seconds:4.0f} s: {numbers}, mean return {self.mean_return:.1f}"


@contextlib.contextmanager
def _started(folder: Path, actors: int, seed: int | None) -> Iterator[tuple[str, dict[str, subprocess.Popen[bytes]]]]:
    """Start server, learner and actors; yield the server's address and the processes, which end with the block."""
    with socket.create_server(("", 0)) as trial:
        port = trial.getsockname()[1]
    address = f"localhost:{port}"
    commands = {"server": ["server.py", "--port", str(port)]}
    for index in range(actors + 1):
        arguments = ["--server", address, *([] if seed is None else ["--seed", str(seed + index)])]
        commands[f"actor {index}" if index else "learner"] = ["actor.py" if index else "learner.py", *arguments]
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="reverb-writer-demo-") as logs:
        try:
            for name, (script, *arguments) in commands.items():
                with Path(logs, name).open("wb") as log:
                    processes[name] = subprocess.Popen(  # noqa: S603  # our own scripts
                        [sys.executable, str(folder / script), *arguments],
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C reaches only the demo, which ends the others
                        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # small matrices, shared cores
                        preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  # one thread
                    )
            yield address, processes
        except _EndedError as error:
            lines = Path(logs, error.name).read_text(errors="replace").splitlines()[-15:]
            text = "\n".join([f"{error.name} {error}. The end of its output:", *lines])
            raise click.ClickException(text) from None
        finally:
            for process in reversed(processes.values()):  # clients before the server
                process.terminate()
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class _EndedError(Exception):
    """A process has ended by itself."""

    def __init__(self, name: str, code: int) -> None:
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        super().__init__(how)
        self.name = name


def _check(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    for name, process in processes.items():
        if (code := process.poll()) is not None:
            raise _EndedError(name, code)


def _end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when the demo ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
