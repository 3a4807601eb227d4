"""An insert stream: encoded requests out, the keys of stored items in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import acknowledged_keys
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipe import Event, Pipe


class InsertPipe:
    """An insert stream without retries and without a record of what is confirmed. Thread-safe."""

    def __init__(
        self, channel: Channel, deliver: Callable[[InsertPipe, Sequence[int] | ReverbWriterError], object]
    ) -> None:
        """Open the stream; never waits.

        Args:
            channel: the connection; not closed by this.
            deliver: gets this pipe, and the keys of each answer, or once the error that has ended the stream, unless
                `close` came first. It is called in the loop's thread and must not wait.

        Raises:
            ClosedError: the channel is closed, or belongs to a parent process; or the interpreter ends.
        """
        self._deliver = deliver
        self._pipe = Pipe(channel, messages.INSERT_STREAM, self._hand_over)

    @property
    def num_unsent(self) -> int:
        """Messages that gRPC has not taken over yet."""
        return self._pipe.num_unsent

    @property
    def reason(self) -> str | None:
        """What ended the stream, in one line: gRPC's status and text; None until then."""
        return self._pipe.reason

    def send(self, message: bytes) -> None:
        """Send a message after those before; never waits, and is ignored after the end."""
        self._pipe.send(message)

    def close(self) -> None:
        """End the stream; nothing more is delivered, and unsent messages are dropped. Idempotent; never waits."""
        self._pipe.close()

    def _hand_over(self, event: Event) -> None:
        self._deliver(self, event if isinstance(event, ReverbWriterError) else acknowledged_keys(event))
