"""Calls of gRPC's Python code, made where no interrupt can meet them: see `background`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from reverb_writer.background import in_background, may_be_interrupted
from reverb_writer.errors import ReplayTimeoutError

SHORT_S = 5.0
"""How long to wait for what gRPC does without waiting for a server, and for its word after a deadline of its own."""

_T = TypeVar("_T")


def uninterrupted(work: Callable[[], _T], timeout_s: float | None = SHORT_S) -> _T:
    """Do something and return its result; in the main thread, have another thread do it.

    Who is interrupted meanwhile does not get the result: the work goes on to its end.

    Raises:
        ReplayTimeoutError: it does not come to an end in time.
        BaseException: whatever the work raises.
    """
    if not may_be_interrupted():
        return work()
    outcome = in_background(work)
    if not outcome.wait(timeout_s):
        raise ReplayTimeoutError(f"gRPC did not answer within {timeout_s:.1f} s; it should have by itself.")
    return outcome.result()
