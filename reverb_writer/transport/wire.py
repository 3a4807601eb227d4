"""One channel of gRPC: certificates, options, and calls."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc.aio

from reverb_writer.errors import ReplayTimeoutError, SpecError
from reverb_writer.protocol import messages
from reverb_writer.transport import loop
from reverb_writer.transport.grpc_errors import NO_ANSWER

MAX_REPLY_BYTES: Final = 8 << 20
"""Bound of a server's messages without samples. Tables of some hundred leaves need far less than 1 MiB."""

_FOR_EVER_S = 1e9  # longer deadlines overflow in gRPC
_NEVER_MS = 2**31 - 1
_SERVICE = messages.SERVER_INFO.split("/")[1]

OPTIONS: Final[dict[str, Any]] = {
    # Steps and samples have no limit, as in Reverb's own client: a window of frames is larger than 4 MB.
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
    # Pings notice a vanished host (no FIN, no RST). For Reverb's server, pings on a silent stream at intervals below
    # five minutes are abuse, so streams that may be silent for long check by `ServerInfo` instead.
    "grpc.keepalive_time_ms": 300_000,
    "grpc.keepalive_timeout_ms": 20_000,
}
PERMANENT: Final[dict[str, Any]] = {"grpc.keepalive_time_ms": _NEVER_MS, "grpc.client_idle_timeout_ms": _NEVER_MS}
"""Options of a connection that gRPC never ends because of silence."""


@dataclass(frozen=True)
class TLS:
    """Certificates for an encrypted connection, as paths to PEM files.

    Attributes:
        root_certificates: trusted signers of the server's certificate; None for the system's.
        certificate: this client's own certificate chain, for mutual TLS.
        private_key: the key of `certificate`; both are given together.
        server_name: name in the server's certificate, if it differs from the address.

    Raises:
        SpecError: only one of `certificate` and `private_key` is given.
    """

    root_certificates: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    private_key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise SpecError("`certificate` and `private_key` must be given together: each is useless alone.")


def credentials_of(tls: TLS) -> grpc.ChannelCredentials:
    """Read and check the PEM files; gRPC itself would report invalid files only in its log, at the first call."""
    import ssl  # noqa: PLC0415  # not needed for plain text, and it takes time

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name, files = "root_certificates", [tls.root_certificates]
    try:
        if tls.root_certificates is not None:
            context.load_verify_locations(tls.root_certificates)
        if tls.certificate is not None:
            name, files = "certificate` and `private_key", [tls.certificate, tls.private_key]
            context.load_cert_chain(tls.certificate, tls.private_key, password=lambda: "")
    except OSError as error:  # includes ssl.SSLError
        names = ", ".join(os.fspath(path) for path in files if path is not None)
        raise SpecError(f"`{name}`: cannot use the PEM files {names} ({error.strerror or error}).") from error
    paths = (tls.root_certificates, tls.private_key, tls.certificate)
    return grpc.ssl_channel_credentials(*(None if path is None else pathlib.Path(path).read_bytes() for path in paths))


class WireClosedError(ReplayTimeoutError):
    """The wire was closed during a call."""


class Wire:
    """A channel of gRPC to one address, with its calls; for the loop's thread only.

    Channels of one process with the same address and options share a connection.
    """

    _held = False  # whether grpc.aio is kept alive, which would end with its last channel and start with the next

    def __init__(
        self,
        dial: Callable[..., grpc.aio.Channel],
        address: str,
        options: dict[str, Any],
        metadata: tuple[tuple[str, str], ...] | None,
    ) -> None:
        """Connect at the first call; each call has the `metadata`."""
        if not Wire._held:
            grpc.aio.init_grpc_aio()
            Wire._held = True
        self.fault: str | None = None  # cause of the close
        self.closing: asyncio.Task[None] | None = None  # ends when the channel is closed
        self._address, self._metadata = address, metadata
        self._channel: Any = dial(address, options=[*options.items()])
        # Ended calls leave by themselves, because a call's callback keeps the call, and the call keeps the connection.
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        loop.close_at_end(self.close)

    async def ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make one attempt at a unary call; raises gRPC's errors, or WireClosedError."""
        self._check()
        call: Any = self._channel.unary_unary(method)(
            request, timeout=min(timeout_s, _FOR_EVER_S), metadata=self._metadata
        )
        self._calls.add(call)
        try:
            reply: bytes = await call
        except asyncio.CancelledError:
            self._check()
            raise
        return reply

    def open(self, method: str) -> Any:
        """Open a bidirectional stream of bytes; return gRPC's call, which `close` cancels."""
        self._check()
        call: Any = self._channel.stream_stream(method)(metadata=self._metadata)
        self._calls.add(call)
        return call

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the server answers over this wire, even with an error."""
        try:
            await self.ask(messages.SERVER_INFO, b"", timeout_s)
        except grpc.RpcError as error:
            return error.code() not in NO_ANSWER
        except WireClosedError:
            return False
        return True

    def close(self, fault: str) -> None:
        """End all calls, and close the channel; `fault` is the cause. Idempotent."""
        if self.fault is None:
            self.fault = fault
            for call in [*self._calls]:
                call.cancel()
            self.closing = loop.spawn(self._close())

    async def _close(self) -> None:
        await self._channel.close()
        loop.forget(self.close)

    def _check(self) -> None:
        if self.fault is not None:
            raise WireClosedError(f"the server at {self._address} did not answer ({self.fault}).")
