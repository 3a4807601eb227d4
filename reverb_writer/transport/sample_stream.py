"""One sample stream of one connection: request samples, read them in the order in which the server chose them.

    request(n) -> loop -> server -> messages of a few or many samples -> loop -> read(), which waits

Samples that were requested and have not come are in flight. More samples than that end the stream, because no one has
room for them; so does a lost connection. The owner opens another stream then.

The protocol's `rate_limiter_timeout` is not used: in 0.14 the samples of a response that is not full are lost when it
runs out. To stop waiting, `cancel()` from another thread, or give the stream a deadline.

Source: Reverb 0.14 (`reverb_service_impl.cc`, WorkerlessSampleReactor; `sampler.cc`).
"""

from __future__ import annotations

from typing import Any

from reverb_writer.errors import (
    ClosedError,
    FormatError,
    PermissionDeniedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import SampleReassembler
from reverb_writer.transport import loop
from reverb_writer.transport.byte_stream import ByteStream
from reverb_writer.transport.channel import Channel


class SampleStream:
    """Samples of one table over one connection.

    `send` and `cancel` may be called from any thread, `read` from one at a time.

    Attributes:
        num_asked: samples requested so far. The owner adds to it, and the next `send` requests what was added.
        num_bytes: bytes of the messages read so far.
        num_unasked: samples that came although they were not requested; they are left out.
    """

    def __init__(self, channel: Channel, table: str, *, deadline_s: float | None = None) -> None:
        """Open the stream, which ends by itself after `deadline_s` seconds; None for never.

        Raises:
            ClosedError: the channel is closed, or belongs to a parent process.
        """
        self.num_bytes = self.num_unasked = 0
        self.num_asked = self._num_sent = self._num_come = 0
        self._table, self._address, self._deadline_s = table, channel.address, deadline_s
        self._reassembler = SampleReassembler()
        self._stream = ByteStream(channel, messages.SAMPLE_STREAM, timeout_s=deadline_s)

    @property
    def num_in_flight(self) -> int:
        """Samples requested that `read` has not returned."""
        return self.num_asked - self._num_come

    def send(self) -> None:
        """Request what was added to `num_asked` since the last time, if anything was.

        Each call makes a request of its own, and the server answers requests one by one. If two were joined, the first
        samples would arrive with the last, and the reader would be idle until then.
        """
        if self.num_asked != self._num_sent:
            loop.submit(self._request, self.num_asked)

    def read(self) -> list[Any]:
        """Wait for the next message and return the samples that it completes, see `SampleReassembler`; maybe none.

        Raises:
            ReplayTimeoutError: the deadline is over.
            StructureError: there is no such table.
            PermissionDeniedError: a gateway does not permit it.
            ServerUnavailableError: the connection is lost, or cancelled.
            FormatError: a message is not a response of Reverb's, or has more than was requested. The stream has ended.
        """
        try:
            message = self._stream.read()
        except ReplayTimeoutError as error:
            if self._deadline_s is None:  # it is a gateway's
                raise ServerUnavailableError(f"the stream of `{self._table}` was ended: {error}") from error
            text = f"{self.num_in_flight} samples did not come within {self._deadline_s:.1f} s."
            raise ReplayTimeoutError(f"table `{self._table}`: {text}") from error
        except StructureError as error:
            raise StructureError(f"table `{self._table}` is not on the server at {self._address}.") from error
        except (ServerUnavailableError, PermissionDeniedError, ClosedError):
            raise
        except ReverbWriterError as error:  # a gateway may refuse for a while: who reads tries again
            raise ServerUnavailableError(str(error)) from error
        self.num_bytes += len(message)
        try:
            samples = self._reassembler.feed(message)
            self._refuse_unasked(len(samples))
        except FormatError:
            self.cancel()
            raise
        self._num_come += len(samples)
        return samples

    def _refuse_unasked(self, num_samples: int) -> None:
        self.num_unasked = max(num_samples - self.num_in_flight, 0)
        if self.num_unasked:
            raise FormatError(
                f"table `{self._table}`: the server at {self._address} sent {self.num_unasked} samples without being "
                "asked. They are left out, and the stream is closed; look at what answers there."
            )

    def cancel(self) -> None:
        """End the stream; a `read` that waits raises. Idempotent."""
        self._stream.cancel()

    def _request(self, num_asked: int) -> None:
        num_samples, self._num_sent = num_asked - self._num_sent, num_asked
        if num_samples:
            request = messages.SampleStreamRequest(table=self._table, num_samples=num_samples)
            self._stream.send(request.SerializeToString())
