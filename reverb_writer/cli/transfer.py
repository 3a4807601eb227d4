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
class TransferResult:
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


def run_transfer(transfer: Generator[Any, None, None], description: str, total: int | None) -> TransferResult:
    """Run a transfer, which yields outcomes with `num_steps` and `error`, to its end or until Ctrl-C or SIGTERM.

    It is always closed at the end, which waits until everything sent is acknowledged. `total` is how many outcomes
    there will be, None if that is not known.
    """
    result, start = TransferResult(), time.monotonic()
    with stop_on_signal() as stop_requested, progress(description, total) as advance, contextlib.closing(transfer):
        for outcome in transfer:
            result.num_steps += outcome.num_steps
            if not outcome.error:
                result.num_done += 1
            else:
                result.num_left_out += 1
                click.echo(f"left out: {outcome.error}", err=True)
            advance(f"{result.num_steps / max(time.monotonic() - start, 1e-6):,.0f} steps/s")
            if stop_requested():
                result.was_stopped = total is None or result.num_done + result.num_left_out < total
                break
    result.seconds = max(time.monotonic() - start, 1e-6)
    return result


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C or SIGTERM only request a stop; the second one interrupts.

    Yields:
        A function that tells whether a stop was requested.
    """
    received: list[int] = []

    def request(number: int, frame: Any) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
