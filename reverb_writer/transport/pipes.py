"""Bidirectional streams of bytes: messages out, messages in, and the end. No retries.

Pipe        over the loop, to a server anywhere
LocalPipe   to a server of this process, without a socket and without a thread
ByteStream  either pipe, with a queue of messages for the thread that reads them
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import queue
from collections.abc import Callable, Iterator
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

_MAX_UNREAD_BYTES = 16 << 20  # the rest stays at the server, but for one message


def open_pipe(channel: Channel, method: str, deliver: Callable[[Event], object]) -> Pipe | LocalPipe:
    """Open a stream over the channel, or without it if the server is in this process; never waits.

    `deliver` gets each message, and once the error that has ended the stream, unless `close` came first. It is called
    by any thread, one at a time, and must not wait. Raises ClosedError as the channel does.
    """
    channel.check_usable()
    endpoint = channel.endpoint
    return Pipe(channel, method, deliver) if endpoint is None else LocalPipe(channel, endpoint, method, deliver)


class Pipe:
    """A stream of bytes, in both directions. Thread-safe."""

    def __init__(self, channel: Channel, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; see `open_pipe`. `deliver` is called in the loop's thread."""
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
                _submit(self._may_write.set)

    def close(self) -> None:
        """End the stream; nothing more is delivered, and unsent messages are dropped. Idempotent; never waits."""
        if not self._has_ended:
            self._has_ended = True
            _submit(self._cancel)

    def pause(self) -> None:
        """Read no more messages until `resume`; for the loop's thread only."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read on; never waits."""
        _submit(self._may_read.set)

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
            return translate_error(error, address, is_stream=True, reason=wire.fault if wire is not None else None)
        except (asyncio.CancelledError, WireClosedError):
            return self._channel.loss((wire.fault if wire is not None else None) or "the stream was cancelled")
        except ReverbWriterError as error:
            return error
        except Exception as error:  # noqa: BLE001  # whatever it is, the owner of the stream must hear of it
            _LOG.exception("A stream to %s has failed.", address)
            return ReverbWriterError(f"the stream to the server at {address} failed: {error!r}.")
        finally:
            if writer is not None:
                writer.cancel()
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


class LocalPipe:
    """A stream to a server of this process; its methods are those of `Pipe`. Thread-safe.

    Whose thread has a message carried out gets the answers at once. A request that waits for a rate limiter is answered
    by the thread that makes its turn come.
    """

    def __init__(self, channel: Channel, endpoint: Endpoint, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; see `open_pipe`."""
        self._channel, self._deliver = channel, deliver
        self._has_ended = False
        self._stream = endpoint.stream(method, self._put)
        channel.local_pipes.add(self)
        self._run(self._stream.open)

    def send(self, message: bytes) -> None:
        """Send a message after those before; ignored after the end."""
        if not self._has_ended:
            self._run(lambda: self._stream.feed(message))

    def close(self) -> None:
        """End the stream; nothing more is delivered. Idempotent; never waits."""
        if not self._has_ended:
            self._has_ended = True
            self._deliver = _ignore
            self._channel.local_pipes.discard(self)
            _submit(self._stream.end)  # the garbage collector may close it in the middle of a function of the server

    def pause(self) -> None:
        """Get no more messages until `resume`; only while one is delivered."""
        self._stream.pause()

    def resume(self) -> None:
        """Read on."""
        self._run(self._stream.resume)

    def lose(self, fault: str) -> None:
        """End the stream as if its connection were lost; for the loop's thread only."""
        self._stream.end()
        self._end(self._channel.loss(fault))

    def _run(self, work: Callable[[], None]) -> None:
        """Have a function of the server called, which the main thread never does: it takes locks."""
        if may_be_interrupted():
            _submit(work)
        else:
            work()

    def _put(self, answer: Answer) -> None:
        if self._has_ended:
            return
        if isinstance(answer, grpc.RpcError):
            self._end(translate_error(answer, self._channel.address, is_stream=True))
        else:
            self._channel.note_response()
            self._deliver(answer)

    def _end(self, error: ReverbWriterError) -> None:
        self._channel.local_pipes.discard(self)
        if not self._has_ended:
            self._has_ended = True
            deliver, self._deliver = self._deliver, _ignore  # the owner must not be kept
            deliver(error)


class ByteStream:
    """A stream that is read by one thread at a time; others may call `send` and `cancel`."""

    def __init__(self, channel: Channel, method: str, changed: Callable[[], object] = lambda: None) -> None:
        """Open the stream. `changed` is called in any thread whenever something has come; it must not wait."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._changed = changed
        self._num_put = self._num_got = 0  # bytes; each is changed by one thread
        self._is_paused = False
        self._error: ReverbWriterError | None = None  # what has ended it, once a read or `cancel` has met it
        self._address = channel.address
        self._pipe = open_pipe(channel, method, self._put)

    def send(self, message: bytes) -> None:
        """Send a message; never waits."""
        self._pipe.send(message)

    @property
    def has_unread(self) -> bool:
        """Whether a message has come, or the end, that was not read."""
        return not self._events.empty()

    def read(self) -> bytes | UnencodedSamples:
        """Wait for the next message, or raise what has ended the stream."""
        event = self._error or self._events.get()
        if self._error is not None:  # cancelled; what came before is left out
            raise self._error
        if isinstance(event, ReverbWriterError):
            self._error = event
            raise event
        self._num_got += len(event)
        if self._is_paused:
            self._resume_if_read()
        return event

    def __iter__(self) -> Iterator[bytes | UnencodedSamples]:
        while True:
            yield self.read()

    def cancel(self) -> None:
        """End the stream: a `read` that waits raises, and so do those that follow. Idempotent; never waits."""
        self._pipe.close()
        self._error = ServerUnavailableError(f"the stream to the server at {self._address} was cancelled.")
        self._events.put(self._error)  # wakes the one that waits

    def _put(self, event: Event) -> None:
        self._events.put(event)
        if not isinstance(event, ReverbWriterError):
            self._num_put += len(event)
            if self._num_put - self._num_got > _MAX_UNREAD_BYTES:
                self._is_paused = True
                self._pipe.pause()
                self._resume_if_read()  # by one who saw no pause
        self._changed()

    def _resume_if_read(self) -> None:
        if self._num_put - self._num_got < _MAX_UNREAD_BYTES / 2:
            self._is_paused = False
            self._pipe.resume()


def _submit(call: Callable[[], object]) -> None:
    with contextlib.suppress(ClosedError):  # the interpreter ends, or this is a forked child
        loop.submit(call)


def _ignore(_: Event) -> None:
    """Do nothing with what comes after the end."""


def _status_of(call: Any) -> grpc.aio.AioRpcError:
    """Return the status of a call that has ended, at once."""

    def value_of(ready: Any) -> Any:
        try:
            ready.send(None)
        except StopIteration as end:
            return end.value

    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(value_of(call.code()), metadata, metadata, value_of(call.details()))
