"""A bidirectional stream of bytes over the loop: messages out, messages in, and its end. No retries, no other state."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from reverb_writer.errors import ClosedError, ReverbWriterError, ServerUnavailableError
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.transport import loop
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.grpc_errors import describe_error, translate_error
from reverb_writer.transport.wire import WireClosedError

_LOG = logging.getLogger(__package__)

Event: TypeAlias = "bytes | UnencodedSamples | ReverbWriterError"


class Pipe:
    """A stream of bytes, in both directions. Thread-safe.

    Attributes:
        reason: what ended it, in one line: gRPC's status and text, or why the connection was given up. None until then.
    """

    def __init__(self, channel: Channel, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; never waits.

        Args:
            channel: the connection; not closed by this.
            method: of the server.
            deliver: gets each message, and once the error that has ended the stream, unless `close` came first. It is
                called in the loop's thread and must not wait.

        Raises:
            ClosedError: the channel is closed, or belongs to a parent process; or the interpreter ends.
        """
        channel.check_usable()
        self.reason: str | None = None
        self._channel, self._method = channel, method
        self._deliver: Callable[[Event], object] = deliver
        self._outgoing: collections.deque[bytes] = collections.deque()
        self._is_idle = False  # whether the writer must be woken
        self._has_ended = False
        # The rest belongs to the loop's thread.
        self._call: Any = None
        self._may_write, self._may_read = asyncio.Event(), asyncio.Event()
        self._may_read.set()
        loop.submit(self._open)

    def send(self, message: bytes) -> None:
        """Send a message after those before; never waits, and is ignored after the end."""
        if not self._has_ended:
            self._outgoing.append(message)
            if self._is_idle:
                self._submit(self._may_write.set)

    def close(self) -> None:
        """End the stream; nothing more is delivered, and unsent messages are dropped. Idempotent; never waits."""
        if not self._has_ended:
            self._has_ended = True
            self._submit(self._cancel)

    def pause(self) -> None:
        """Read no more messages until `resume`; for the loop's thread only."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read on; never waits."""
        self._submit(self._may_read.set)

    def _submit(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(ClosedError):  # the interpreter ends, or this is a forked child
            loop.submit(call)

    def _open(self) -> None:
        if self._has_ended:  # closed before it was opened
            self._deliver = _ignore
        else:
            loop.spawn(self._run())

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _run(self) -> None:
        error = await self._carry()
        self._cancel()
        # gRPC keeps the connection as long as there is a call of it, and so do the frames of the traceback.
        self._call = error.__traceback__ = error.__context__ = None
        self._outgoing.clear()
        deliver, self._deliver = self._deliver, _ignore  # the owner must not be kept, and the connection with it
        if not self._has_ended:
            self._has_ended = True
            deliver(error)

    async def _carry(self) -> ReverbWriterError:
        """Carry messages until the stream ends; return the error that says why."""
        address = self._channel.address
        wire, writer = None, None
        ends: list[grpc.aio.AioRpcError] = []
        try:
            wire, self._call = self._channel.open(self._method)
            # If a message is being written then, gRPC puts an error of its own in the place of the server's.
            self._call.add_done_callback(lambda call: ends.append(_status_of(call)))
            writer = loop.spawn(self._write(self._call))
            await self._read(self._call)
        except grpc.RpcError as met:
            error = next((end for end in ends if end.code() is not None), met)
            self.reason = wire.fault if wire is not None and wire.fault else describe_error(error)
            return translate_error(error, address, is_stream=True, reason=self.reason)
        except (asyncio.CancelledError, WireClosedError):
            self.reason = wire.fault if wire is not None and wire.fault else "the stream was cancelled"
            return self._channel.loss(self.reason)
        except ReverbWriterError as error:
            self.reason = str(error)
            return error
        except Exception as error:  # noqa: BLE001  # whatever it is, the owner of the stream must hear of it
            _LOG.exception("A stream to %s has failed.", address)
            self.reason = repr(error)
            return ReverbWriterError(f"the stream to the server at {address} failed: {error!r}.")
        finally:
            if writer is not None:
                writer.cancel()
        self.reason = "the server ended the stream"
        return ServerUnavailableError(f"the server at {address} ended the stream.")

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._channel.note_response()
            if self._has_ended:
                return
            self._deliver(message)
            await self._may_read.wait()

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # `_read` meets what has ended the stream
            while True:
                self._is_idle = True  # before the look: a message that is added after it wakes this
                if not self._outgoing:
                    await self._may_write.wait()
                self._is_idle = False
                self._may_write.clear()
                while self._outgoing:
                    await call.write(self._outgoing.popleft())


def _status_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the status of a call that has ended, at once."""

    def value_of(ready: Any) -> Any:
        try:
            ready.send(None)
        except StopIteration as end:
            return end.value

    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(value_of(call.code()), metadata, metadata, value_of(call.details()))


def _ignore(_: Event) -> None:
    """Do nothing with what comes after the end."""
