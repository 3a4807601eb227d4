"""A stream whose messages wait in a queue for the thread that reads them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from reverb_writer.errors import ReverbWriterError, ServerUnavailableError
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.local_pipe import open_pipe
from reverb_writer.transport.pipe import Event

_MAX_UNREAD_BYTES = 16 << 20  # the rest stays at the server, but for one message


class ByteStream:
    """A bidirectional stream of bytes: `send`, and iterate for messages.

    `send` and `cancel` may be called from any thread, `read` from one at a time.
    """

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
        """Wait for the next message; a server of this process gives samples as they are.

        Raises:
            ReverbWriterError: the stream has ended; see `translate_error`.
        """
        event = self._error or self._events.get()
        if self._error is not None:  # cancelled; what came before is left out
            raise self._error
        if isinstance(event, ReverbWriterError):
            self._error = event
            raise event
        self._num_got += len(event)
        if self._is_paused and self._num_put - self._num_got < _MAX_UNREAD_BYTES / 2:
            self._is_paused = False
            self._pipe.resume()
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
                if self._num_put - self._num_got < _MAX_UNREAD_BYTES / 2:  # read since, by one who saw no pause
                    self._is_paused = False
                    self._pipe.resume()
        self._changed()
