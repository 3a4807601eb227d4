"""Counters, interrupts and exit codes of import and export."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import click

from reverb_writer.progress import progress

_DONE, _INCOMPLETE, _INTERRUPTED = 0, 3, 130  # 1 is an error, 2 is click's code for wrong arguments


@dataclass
class Tally:
    """The result of a transfer."""

    num_done: int = 0  # number of trajectories or items transferred
    num_steps: int = 0  # number of their steps
    num_left_out: int = 0  # number of those that could not be read
    was_stopped: bool = False  # whether Ctrl-C or SIGTERM ended the transfer early
    seconds: float = 0.0  # its duration

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return _INTERRUPTED if self.was_stopped else _INCOMPLETE if self.num_left_out else _DONE


def follow(results: Generator[Any, None, None], description: str, total: int) -> Tally:
    """Iterate over results, which have `num_steps` and `error`, to their end or until Ctrl-C or SIGTERM.

    The results are always closed at the end, which waits until everything sent is acknowledged.
    """
    tally, start = Tally(), time.monotonic()
    with _stopped() as is_asked, progress(description, total) as tell, contextlib.closing(results):
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
    """Let the first Ctrl-C or SIGTERM only set a flag; the second one interrupts."""
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
