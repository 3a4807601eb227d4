"""A bidirectional stream to a server of this process: a `Pipe` without a socket, and without a thread.

    send() -> the server's function, in the same thread -> deliver()

Whose thread has a message carried out gets the answers at once. A request that waits for a rate limiter is answered by
the thread that makes its turn come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import grpc

from reverb_writer.background import may_be_interrupted
from reverb_writer.errors import ClosedError, ReverbWriterError
from reverb_writer.transport import loop
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.endpoints import Answer, Endpoint
from reverb_writer.transport.grpc_errors import describe_error, translate_error
from reverb_writer.transport.pipe import Event, Pipe


class LocalPipe:
    """A stream to a server of this process; its methods are those of `Pipe`. Thread-safe."""

    def __init__(self, channel: Channel, endpoint: Endpoint, method: str, deliver: Callable[[Event], object]) -> None:
        """Open the stream; see `Pipe`. `deliver` is called by whichever thread has an answer."""
        channel.check_usable()
        self.reason: str | None = None
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
            # The garbage collector may close it in the middle of a function of the server.
            with contextlib.suppress(ClosedError):
                loop.submit(self._stream.end)

    def pause(self) -> None:
        """Get no more messages until `resume`; only while one is delivered."""
        self._stream.pause()

    def resume(self) -> None:
        """Read on."""
        self._run(self._stream.resume)

    def lose(self, fault: str) -> None:
        """End the stream as if its connection were lost; for the loop's thread only."""
        self._stream.end()
        self.reason = fault
        self._end(self._channel.loss(fault))

    def _run(self, work: Callable[[], None]) -> None:
        """Have a function of the server called."""
        if may_be_interrupted():
            with contextlib.suppress(ClosedError):  # the interpreter ends
                loop.submit(work)
        else:
            work()

    def _put(self, answer: Answer) -> None:
        if self._has_ended:
            return
        if isinstance(answer, grpc.RpcError):
            self.reason = describe_error(answer)
            self._end(translate_error(answer, self._channel.address, is_stream=True, reason=self.reason))
        else:
            self._channel.note_response()
            self._deliver(answer)

    def _end(self, error: ReverbWriterError) -> None:
        self._channel.local_pipes.discard(self)
        if not self._has_ended:
            self._has_ended = True
            deliver, self._deliver = self._deliver, _ignore  # the owner must not be kept
            deliver(error)


def _ignore(_: Event) -> None:
    """Do nothing with what comes after the end."""


def open_pipe(channel: Channel, method: str, deliver: Callable[[Event], object]) -> Pipe | LocalPipe:
    """Open a stream over the channel, or without it if the server is in this process; arguments and errors of `Pipe`.

    `deliver` is called by any thread, one at a time.
    """
    endpoint = channel.endpoint
    return Pipe(channel, method, deliver) if endpoint is None else LocalPipe(channel, endpoint, method, deliver)
