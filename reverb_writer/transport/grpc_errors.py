"""Translation of gRPC's errors to ours."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import grpc

from reverb_writer.errors import (
    PermissionDeniedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)

NO_ANSWER = {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
"""Status codes of calls that the server has not answered."""

_CONNECT_TIMEOUT_S = 0.3
_REFUSALS: dict[grpc.StatusCode, type[ReverbWriterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ReverbWriterError,
    grpc.StatusCode.NOT_FOUND: StructureError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ReverbWriterError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: ReverbWriterError,
}
"""Errors for a lasting refusal of a stream, by the server's status code or that of a gateway in front of it."""

_CONNECTION_ENDED = "Stream removed"
"""Begin of the text of gRPC's core for a stream that ends with its connection, with any status code."""


def translate_error(
    error: grpc.RpcError, address: str, *, is_stream: bool = False, reason: str | None = None
) -> ReverbWriterError:
    """Return our error for one of gRPC's; `reason` is the cause of the call's end, if it is known better than by gRPC.

    A lost connection may end a stream with any status code. A stream has no time-out, so a gateway has ended a stream
    with the code of a time-out.
    """
    code = error.code()
    details = str(error.details())
    reason = reason or f"{code.name}: {details}"
    is_unanswered = code is grpc.StatusCode.CANCELLED or _is_late(details)
    is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED or (code in NO_ANSWER and is_unanswered)
    if is_late and not is_stream:
        return ReplayTimeoutError(f"the server at {address} did not answer in time ({reason}).")
    is_refusal_of_stream = code in _REFUSALS and not details.startswith(_CONNECTION_ENDED)
    if code in NO_ANSWER or (is_stream and not is_refusal_of_stream):
        return ServerUnavailableError(f"there is no connection to the server at {address} ({reason}).")
    return _REFUSALS.get(code, ReverbWriterError)(f"the server at {address} refused: {reason.rstrip('.')}.")


def is_silent(reasons: Iterable[str], address: str) -> bool:
    """Return whether gRPC's texts for lost or failed connections mean that the server exists but is silent.

    A stopped or overloaded process does not accept the connections that the kernel has made for it. A connection to
    another address of the host may be refused, and gRPC names only the last address that failed: if `localhost` is
    refused at ::1 and silent at 127.0.0.1, it mostly names the refusal.
    """
    return any(map(_is_late, reasons)) or (all(map(is_refusal, reasons)) and _is_listening(address))


def is_refusal(reason: str) -> bool:
    """Return whether gRPC's text means that nothing listens at the address, and no address is silent.

    A server or a gateway that refuses a call does listen.
    """
    text = reason.lower()
    texts = "connection refused", "actively refused", "no such file"  # the second text is from Windows
    return any(one in text for one in texts) and not _is_late(reason)


def _is_late(reason: str) -> bool:
    text = reason.lower()
    return any(word in text for word in ("timed out", "timeout", "deadline exceeded")) and "dns" not in text


def _is_listening(address: str) -> bool:
    """Return whether one attempt finds a listener at any of the addresses of `host:port`."""
    host, _, port = address.rpartition(":")
    if host.startswith("unix") or not port.isdigit():
        return False
    host = host.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:  # refused, timed out, or no such host
        return False
