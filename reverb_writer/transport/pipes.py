"""Bidirectional streams of bytes: messages in both directions, and an end. No retries.

Pipe        over the loop, to a server anywhere
LocalPipe   to a server of this process, without a socket and without a thread
ByteStream  either pipe, with a queue of messages for the thread that reads them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from reverb_writer.background import may_be_interrupted
from reverb_writer.errors import ClosedError, ReverbWriterError, ServerUnavailableError
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.transport import loop
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.endpoints import Answer, Endpoint
from reverb_writer.transport.grpc_errors import translate_error
from reverb_writer.transport.wire import WireClosedError

_LOG = logging.getLogger(__package__)

Event: TypeAlias = "bytes | UnencodedSamples | ReverbWriterError"

_MAX_UNREAD_BYTES = 16 << 20  # at most one message more is read from the server


def open_pipe(channel: Channel, method: str, deliver: Callable[[Event], object]) -> Pipe | LocalPipe:
    """Open a stream over the channel, or a local one if the server is in this process; never waits.

    `deliver` gets each message, and finally the error that has ended the stream, unless `close` was called before. Any
    thread calls it, one at a time; it must not wait. Raises ClosedError as the channel does.
    """
    channel.check_usable()
    endpoint = channel.endpoint
    return Pipe(channel, method, deliver) if endpoint is None else LocalPipe(channel, endpoint, method, deliver)


class Pipe:
    """A bidirectional stream of bytes over the loop. Thread-safe."""

    def __init__(self, channel: Channel, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; see `open_pipe`. The loop's thread calls `deliver`."""
        self._channel, self._method = channel, method
        self._deliver: Callable[[Event], object] | None = deliver  # None after the end: it refers to the owner
        # Only the loop's thread uses the rest.
        self._call: Any = None
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._may_read = asyncio.Event()
        self._may_read.set()
        loop.submit(self._open)

    def send(self, message: bytes) -> None:
        """Send a message, in the order of calls; never waits, and is ignored after the end."""
        if self._deliver is not None:
            _submit(lambda: self._outgoing.put_nowait(message))

    def close(self) -> None:
        """End the stream; nothing more is delivered, and unsent messages are dropped. Idempotent; never waits."""
        if self._deliver is not None:
            self._deliver = None
            _submit(self._cancel)

    def pause(self) -> None:
        """Read no more messages until `resume`; for the loop's thread only."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read messages again; never waits."""
        _submit(self._may_read.set)

    def _open(self) -> None:
        if self._deliver is not None:  # not closed before it was opened
            loop.spawn(self._run())

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _run(self) -> None:
        if self._deliver is None:  # closed in between; a later `close` finds the call and cancels it
            return
        error = await self._carry()
        self._cancel()
        # gRPC keeps the connection while a call of it exists, and the frames of the traceback refer to the call.
        self._call = error.__traceback__ = error.__context__ = None
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(error)

    async def _carry(self) -> ReverbWriterError:
        """Carry messages until the stream ends; return the error that names the cause."""
        address = self._channel.address
        wire, writer = None, None
        ends: list[grpc.aio.AioRpcError] = []
        try:
            wire, self._call = self._channel.open(self._method)
            # If a message is being written at the end, gRPC replaces the server's error by its own.
            # `weakref.proxy` because a callback that refers to its call keeps the call, and so the connection.
            add_callback = type(self._call).add_done_callback
            add_callback(weakref.proxy(self._call), lambda call: ends.append(_status_of(call)))
            writer = loop.spawn(self._write(self._call))
            await self._read(self._call)
        except grpc.RpcError as met:
            error = next((end for end in ends if end.code() is not None), met)
            return translate_error(error, address, is_stream=True, reason=wire.fault if wire is not None else None)
        except (asyncio.CancelledError, WireClosedError):
            return self._channel.loss((wire.fault if wire is not None else None) or "the stream was cancelled")
        except ReverbWriterError as error:
            return error
        except Exception as error:  # noqa: BLE001  # the stream's owner must get any error
            _LOG.exception("A stream to %s has failed.", address)
            return ReverbWriterError(f"the stream to the server at {address} failed: {error!r}.")
        finally:
            if writer is not None:
                writer.cancel()
        return ServerUnavailableError(f"the server at {address} ended the stream.")

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._channel.last_response_at = time.monotonic()
            deliver = self._deliver
            if deliver is None:
                return
            deliver(message)
            del deliver  # while it waits, an owner that has closed the stream is not kept
            await self._may_read.wait()

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # `_read` raises the cause of the end
            while True:
                await call.write(await self._outgoing.get())


class LocalPipe:
    """A stream to a server of this process, with the methods of `Pipe`. Thread-safe.

    The thread that carries out a message delivers the answers at once. If a request waits for a rate limiter, the
    thread that unblocks the limiter answers it.
    """

    def __init__(self, channel: Channel, endpoint: Endpoint, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; see `open_pipe`."""
        self._channel = channel
        self._deliver: Callable[[Event], object] | None = deliver  # None after the end: it refers to the owner
        self._stream = endpoint.stream(method, self._put)
        channel.local_pipes.add(self)
        self._run(self._stream.open)

    def send(self, message: bytes) -> None:
        """Send a message, in the order of calls; ignored after the end."""
        if self._deliver is not None:
            self._run(lambda: self._stream.feed(message))

    def close(self) -> None:
        """End the stream; nothing more is delivered. Idempotent; never waits."""
        if self._deliver is not None:
            self._deliver = None
            self._channel.local_pipes.discard(self)
            _submit(self._stream.end)  # not here: the garbage collector may call `close` within a server's function

    def pause(self) -> None:
        """Get no more messages until `resume`; call it only while a message is delivered."""
        self._stream.pause()

    def resume(self) -> None:
        """Get messages again."""
        self._run(self._stream.resume)

    def lose(self, fault: str) -> None:
        """End the stream as after a loss of its connection; for the loop's thread only."""
        self._stream.end()
        self._end(self._channel.loss(fault))

    def _run(self, work: Callable[[], None]) -> None:
        """Call a function of the server, never in the main thread, because the function takes locks."""
        if may_be_interrupted():
            _submit(work)
        else:
            work()

    def _put(self, answer: Answer) -> None:
        deliver = self._deliver
        if deliver is None:
            return
        if isinstance(answer, grpc.RpcError):
            self._end(translate_error(answer, self._channel.address, is_stream=True))
        else:
            self._channel.last_response_at = time.monotonic()
            deliver(answer)

    def _end(self, error: ReverbWriterError) -> None:
        self._channel.local_pipes.discard(self)
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(error)


class ByteStream:
    """A stream whose messages wait for one thread that reads them."""

    def __init__(self, channel: Channel, method: str, changed: Callable[[], object] = lambda: None) -> None:
        """Open the stream. Any thread calls `changed` after each message and the end; it must not wait."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._changed = changed
        self._num_put = self._num_got = 0  # bytes; one thread changes each
        self._is_paused = False
        self._pipe = open_pipe(channel, method, self._put)
        self.send, self.close = self._pipe.send, self._pipe.close

    @property
    def has_unread(self) -> bool:
        """Whether a message or the end has arrived and was not read."""
        return not self._events.empty()

    def read(self) -> bytes | UnencodedSamples:
        """Wait for the next message; raise the error that has ended the stream, once."""
        event = self._events.get()
        if isinstance(event, ReverbWriterError):
            raise event
        self._num_got += len(event)
        if self._is_paused:
            self._resume_if_read()
        return event

    def _put(self, event: Event) -> None:
        self._events.put(event)
        if not isinstance(event, ReverbWriterError):
            self._num_put += len(event)
            if self._num_put - self._num_got > _MAX_UNREAD_BYTES:
                self._is_paused = True
                self._pipe.pause()
                self._resume_if_read()  # the reader may have read before it could see the pause
        self._changed()

    def _resume_if_read(self) -> None:
        if self._num_put - self._num_got < _MAX_UNREAD_BYTES / 2:
            self._is_paused = False
            self._pipe.resume()


def _submit(call: Callable[[], object]) -> None:
    with contextlib.suppress(ClosedError):  # the interpreter ends, or this is a forked child
        loop.submit(call)


def _status_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the status of an ended call, without a wait."""

    def value_of(ready: Any) -> Any:
        try:
            ready.send(None)
        except StopIteration as end:
            return end.value

    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(value_of(call.code()), metadata, metadata, value_of(call.details()))
