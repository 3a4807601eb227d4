"""A call that is under way on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

from reverb_writer.background import Flag
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError
from reverb_writer.transport import loop

_LOG = logging.getLogger(__package__)

_SHORT_S = 30.0  # for the loop to say that a call's time is over: milliseconds, unless the machine has no time for us

Outcome: TypeAlias = "bytes | ReverbWriterError"


class PendingCall:
    """A call that is under way. Thread-safe."""

    def __init__(
        self,
        work: Callable[[PendingCall], Coroutine[Any, Any, bytes]],
        address: str,
        timeout_s: float,
        deliver: Callable[[Outcome], object] | None = None,
    ) -> None:
        """Have the loop do the work, which ends after `timeout_s` seconds by itself.

        Args:
            work: gets this object; returns the reply, or raises ReverbWriterError.
            address: of the server, for errors.
            timeout_s: how long it may take.
            deliver: gets the reply, or the error, in the loop's thread; must not wait.

        Raises:
            ClosedError: the interpreter ends, or a parent process has used gRPC.
        """
        self.is_cancelled = False
        self._address, self._timeout_s, self._deliver = address, timeout_s, deliver
        self._ended = Flag()
        self._outcome: Outcome | None = None
        self._task: asyncio.Task[bytes] | None = None
        loop.submit(self._start, work)

    def done(self) -> bool:
        """Return whether the reply has come, or never will."""
        return self._outcome is not None

    def cancel(self) -> None:
        """End the call; `result` raises ReplayTimeoutError. Idempotent; never waits."""
        if self._outcome is None and not self.is_cancelled:
            self.is_cancelled = True
            with contextlib.suppress(ClosedError):
                loop.submit(self._cancel)

    def result(self) -> bytes:
        """Wait for the reply.

        Raises:
            ReverbWriterError: what has come instead.
        """
        assert not loop.is_here(), "the loop's thread would wait for itself"  # noqa: S101
        self._ended.wait(self._timeout_s + _SHORT_S)
        outcome = self._outcome
        if outcome is None:
            raise ReplayTimeoutError(f"the server at {self._address}: gRPC did not end a call at its deadline.")
        if isinstance(outcome, ReverbWriterError):
            raise outcome
        return outcome

    def _start(self, work: Callable[[PendingCall], Coroutine[Any, Any, bytes]]) -> None:
        self._task = loop.spawn(work(self))
        self._task.add_done_callback(self._settle)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[bytes]) -> None:
        outcome: Outcome
        try:
            outcome = task.result()
        except asyncio.CancelledError:
            outcome = ReplayTimeoutError(f"the server at {self._address} did not answer before the call ended.")
        except ReverbWriterError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller must hear of it
            _LOG.exception("A call to %s has failed.", self._address)
            outcome = ReverbWriterError(f"the call to {self._address} failed: {error!r}.")
        self._outcome = outcome
        self._ended.set()
        if self._deliver is not None:
            self._deliver(outcome)
