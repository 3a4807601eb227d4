"""One sample stream of one connection: ask for samples, get them in the order in which the server chose them.

    request(n) -> gRPC's thread -> server -> messages of a few or many samples -> read(), which waits

What is asked for and has not come is what is in flight. More than that ends the stream, for nobody has room for it; so
does a lost connection. Whoever holds the stream opens another. The protocol's `rate_limiter_timeout` is not used: in
0.14 the samples of a response that is not full are lost when it runs out. To stop waiting, `cancel()` from another
thread, or give the stream a deadline.

Source: Reverb 0.14 (`reverb_service_impl.cc`, WorkerlessSampleReactor; `sampler.cc`).
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from reverb_writer.errors import FormatError, ReplayTimeoutError, ServerUnavailableError, StructureError
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import SampleReassembler
from reverb_writer.transport.channel import Channel, no_connection

__all__ = ["SampleStream"]


class SampleStream:
    """Samples of one table over one connection.

    `cancel` may be called from any thread, `read` from one at a time, and `request` from one at a time.

    Attributes:
        num_asked: samples asked for so far. What is added to it is sent by the next `send`.
        num_bytes: bytes of the messages read so far.
        num_unasked: samples that came although nobody had asked for them; they are left out.
    """

    def __init__(self, channel: Channel, table: str, *, deadline_s: float | None = None) -> None:
        """Open the stream.

        Args:
            channel: the connection; not closed by the stream.
            table: its name.
            deadline_s: seconds after which the stream ends by itself; None for never.

        Raises:
            ClosedError: the channel is closed, or belongs to a parent process.
        """
        self.num_bytes = self.num_unasked = 0
        self.num_asked = self._num_come = 0
        self._table, self._address, self._deadline_s = table, channel.address, deadline_s
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._reassembler = SampleReassembler()
        try:
            self._call = channel.stream(messages.SAMPLE_STREAM, self._encoded_requests(), timeout_s=deadline_s)
        except BaseException:
            self._requests.put(False)  # a stream that was begun when an interrupt came has no use
            raise

    @property
    def num_in_flight(self) -> int:
        """Samples asked for that `read` has not returned."""
        return self.num_asked - self._num_come

    def request(self, num_samples: int) -> None:
        """Ask for more samples, >= 1."""
        self.num_asked += num_samples
        self.send()

    def send(self) -> None:
        """Ask the server for what has been added to `num_asked` since the last time, if anything has."""
        self._requests.put(True)

    def read(self) -> list[Any]:
        """Wait for the next message and return the samples that it completes, see `SampleReassembler`; maybe none.

        Raises:
            ReplayTimeoutError: the deadline is over.
            StructureError: there is no such table.
            ServerUnavailableError: the connection is lost, or cancelled.
            FormatError: what came is no response of a Reverb server, or more than was asked for. The stream has ended.
        """
        try:
            message = next(self._call)
        except StopIteration:
            raise ServerUnavailableError(
                f"the server at {self._address} ended the stream of `{self._table}`."
            ) from None
        except grpc.RpcError as error:
            raise self._translated(error) from error
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
                f"table `{self._table}`: the server at {self._address} sent {self.num_unasked} samples that nobody had "
                "asked for. They are left out, and the stream is closed; look at what answers there."
            )

    def cancel(self) -> None:
        """End the stream; a `read` that waits raises. Idempotent."""
        self._requests.put(False)
        self._call.cancel()

    def _encoded_requests(self) -> Iterator[bytes]:
        num_sent = 0
        while self._requests.get():
            num_samples, num_sent = self.num_asked - num_sent, self.num_asked
            if num_samples:
                yield messages.SampleStreamRequest(table=self._table, num_samples=num_samples).SerializeToString()

    def _translated(self, error: grpc.RpcError) -> Exception:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ReplayTimeoutError(
                f"table `{self._table}`: {self.num_in_flight} samples did not come within {self._deadline_s:.1f} s."
            )
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return StructureError(f"table `{self._table}` is not on the server at {self._address}.")
        return no_connection(self._address, self._call.why_ended(error))
