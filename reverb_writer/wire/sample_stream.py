"""One sample stream of one connection: ask for samples, get them in the order in which the server chose them.

    request(n) -> gRPC's thread -> server -> messages of a few or many samples -> read(), which waits

Nothing comes that was not asked for, so what is asked for and has not come is what is in flight. A lost connection ends
the stream; whoever holds it opens another. The protocol's `rate_limiter_timeout` is not used: in 0.14 the samples of a
response that is not full are lost when it runs out. To stop waiting, `cancel()` from another thread, or give the stream
a deadline.

Source: Reverb 0.14 (`reverb_service_impl.cc`, WorkerlessSampleReactor; `sampler.cc`).
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import grpc

from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError, StructureError
from reverb_writer.wire import messages
from reverb_writer.wire.channel import Channel, describe
from reverb_writer.wire.responses import Splicer

__all__ = ["SampleStream"]


class SampleStream:
    """Samples of one table over one connection.

    `request` and `cancel` may be called from any thread, `read` from one at a time.

    Attributes:
        num_in_flight: samples asked for that `read` has not returned.
        num_bytes: bytes of the messages read so far.
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
        self.num_in_flight = 0
        self.num_bytes = 0
        self._table, self._address, self._deadline_s = table, channel.address, deadline_s
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._splicer = Splicer()
        self._call = channel.stream(messages.SAMPLE_STREAM, self._encoded_requests(), timeout_s=deadline_s)

    def request(self, num_samples: int) -> None:
        """Ask for more samples, >= 1."""
        self.num_in_flight += num_samples
        self._requests.put(num_samples)

    def read(self) -> list[Any]:
        """Wait for the next message and return the samples that it completes, see `Splicer`; maybe none.

        Raises:
            ReplayTimeoutError: the deadline is over.
            StructureError: there is no such table.
            ServerUnavailableError: the connection is lost, or cancelled.
            FormatError: what came is no response of a Reverb server.
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
        samples = self._splicer.feed(message)
        self.num_in_flight -= len(samples)
        return samples

    def cancel(self) -> None:
        """End the stream; a `read` that waits raises. Idempotent."""
        self._requests.put(None)
        self._call.cancel()

    def _encoded_requests(self) -> Iterator[bytes]:
        while (num_samples := self._requests.get()) is not None:
            yield messages.SampleStreamRequest(table=self._table, num_samples=num_samples).SerializeToString()

    def _translated(self, error: grpc.RpcError) -> Exception:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ReplayTimeoutError(
                f"table `{self._table}`: {self.num_in_flight} samples did not come within {self._deadline_s:.1f} s."
            )
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return StructureError(f"table `{self._table}` is not on the server at {self._address}.")
        return ServerUnavailableError(f"the server at {self._address} is gone ({describe(error)}).")
