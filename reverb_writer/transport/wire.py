"""One channel of gRPC and the calls that it carries. For the loop's thread only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

import grpc.aio

from reverb_writer.protocol import messages
from reverb_writer.transport import loop
from reverb_writer.transport.grpc_errors import NO_ANSWER

MAX_REPLY_BYTES: Final = 8 << 20
"""Bound on every message of a server but those with samples. Tables of some hundred leaves take far less than 1 MiB."""

_FOR_EVER_S = 1e9  # longer deadlines overflow in gRPC
_NEVER_MS = 2**31 - 1
_SERVICE = messages.SERVER_INFO.split("/")[1]

OPTIONS: Final[dict[str, Any]] = {
    # Reverb's own client sets no limits on steps and samples either: a window of frames is larger than 4 MB.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    "grpc.service_config": json.dumps(
        {
            "methodConfig": [
                {"name": [{"service": _SERVICE}], "maxResponseMessageBytes": MAX_REPLY_BYTES},
                {"name": [{"service": _SERVICE, "method": messages.SAMPLE_STREAM.split("/")[2]}]},
            ]
        }
    ),
    # A restarted server is found within seconds; gRPC would wait up to two minutes.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 1_000,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # A vanished host (no FIN, no RST) is noticed. Reverb's server counts pings that come more often than every five
    # minutes on a silent stream as abuse, so streams that may be silent for long check by `ServerInfo` instead.
    "grpc.keepalive_time_ms": 300_000,
    "grpc.keepalive_timeout_ms": 20_000,
}
PERMANENT: Final[dict[str, Any]] = {"grpc.keepalive_time_ms": _NEVER_MS, "grpc.client_idle_timeout_ms": _NEVER_MS}
"""Options of a connection that gRPC does not end however long it is silent."""


class WireClosedError(Exception):
    """The wire was closed during a call; its `fault` says why."""


class Wire:
    """A channel of gRPC to one address, and its calls. Channels of one process share connections, unless `alone`."""

    _held = False  # whether grpc.aio is kept from ending with its last channel, and beginning anew with the next

    def __init__(
        self,
        dial: Callable[..., grpc.aio.Channel],
        address: str,
        options: dict[str, Any],
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> None:
        """Connect at the first call; `metadata` goes with each."""
        if not Wire._held:
            grpc.aio.init_grpc_aio()
            Wire._held = True
        self.fault: str | None = None  # why it was closed
        self._metadata = metadata
        self._channel: Any = dial(address, options=[*options.items()])
        self._calls: set[Any] = set()
        self._closing: asyncio.Task[Any] | None = None
        loop.close_at_end(self.close)

    async def ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make one attempt at a unary call.

        Raises:
            grpc.RpcError: as gRPC raises it.
            WireClosedError: the wire is or was closed.
        """
        self._check()
        call: Any = self._channel.unary_unary(method)(
            request, timeout=min(timeout_s, _FOR_EVER_S), metadata=self._metadata
        )
        self._keep(call)
        try:
            reply: bytes = await call
        except asyncio.CancelledError:
            self._check()
            raise
        return reply

    def open(self, method: str) -> Any:
        """Open a bidirectional stream of bytes; return gRPC's call, which is cancelled when the wire is closed.

        Raises:
            WireClosedError: the wire is closed.
        """
        self._check()
        call: Any = self._channel.stream_stream(method)(metadata=self._metadata)
        self._keep(call)
        return call

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the server answers a question over this wire, be it by an error."""
        try:
            await self.ask(messages.SERVER_INFO, b"", timeout_s)
        except grpc.RpcError as error:
            return error.code() not in NO_ANSWER
        except WireClosedError:
            return False
        return True

    def close(self, fault: str) -> None:
        """End all calls, and give the connection back; `fault` says why. Idempotent."""
        if self.fault is None:
            self.fault = fault
            for call in [*self._calls]:
                call.cancel()
            self._closing = loop.spawn(self._close())

    async def closed(self) -> None:
        """Return when the connection is given back."""
        if self._closing is not None:
            await asyncio.wait([self._closing])

    async def _close(self) -> None:
        await self._channel.close()
        loop.forget(self.close)

    def _check(self) -> None:
        if self.fault is not None:
            raise WireClosedError(self.fault)

    def _keep(self, call: Any) -> None:
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
