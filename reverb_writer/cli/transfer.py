"""What import and export have in common: count, show progress, end when asked to, and say so by the exit code."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["Tally", "follow"]

_DONE, _INCOMPLETE, _INTERRUPTED = 0, 3, 130  # 1 is an error, 2 is click's for arguments that cannot work


@dataclass
class Tally:
    """What became of what was transferred.

    Attributes:
        num_done: trajectories or items.
        num_steps: their steps.
        num_left_out: those that could not be read.
        was_stopped: whether somebody asked for an end before all was done.
        seconds: how long it took.
    """

    num_done: int = 0
    num_steps: int = 0
    num_left_out: int = 0
    was_stopped: bool = False
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """What the command ends with."""
        return _INTERRUPTED if self.was_stopped else _INCOMPLETE if self.num_left_out else _DONE


def follow(results: Generator[Any, None, None], description: str, total: int) -> Tally:
    """Go through results that have `num_steps` and `error`, until they end or Ctrl-C or SIGTERM asks for an end.

    Args:
        results: are closed in any case, which confirms what was done.
        description: what the progress bar says.
        total: how many results there will be.
    """
    tally, start = Tally(), time.monotonic()
    with _stopped() as is_asked, _progress(description, total) as tell, contextlib.closing(results):
        for result in results:
            tally.num_steps += result.num_steps
            if not result.error:
                tally.num_done += 1
            else:
                tally.num_left_out += 1
                click.echo(f"left out: {result.error}", err=True)
            tell(f"{tally.num_steps / max(time.monotonic() - start, 1e-6):,.0f} steps/s")
            if is_asked():
                tally.was_stopped = tally.num_done + tally.num_left_out < total
                break
    tally.seconds = max(time.monotonic() - start, 1e-6)
    return tally


@contextlib.contextmanager
def _stopped() -> Iterator[Callable[[], bool]]:
    """Have Ctrl-C and SIGTERM ask for an end instead of making one; the second of them makes one."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            signal.default_int_handler(number, frame)
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on standard error if that is a terminal; yields a function that takes one step and what to say."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=total, said="")
        yield lambda said: bar.update(task, advance=1, said=said)
