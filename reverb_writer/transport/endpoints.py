"""Servers of this process, by address: clients of the same process call functions, without a socket.

    LocalServer --> BY_ADDRESS --> Channel: calls
                               --> LocalPipe: streams

No server package is imported. The functions take locks and change tables, so the main thread never calls them, because
an interrupt may stop it anywhere. The loop calls them instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import grpc

from reverb_writer.protocol.responses import UnencodedSamples

Answer: TypeAlias = "bytes | UnencodedSamples | grpc.RpcError"


class Stream(Protocol):
    """The server's end of a stream. Thread-safe; no method waits for a rate limiter."""

    def open(self) -> None:
        """Begin; when the server closes, it ends the stream."""

    def feed(self, message: bytes) -> None:
        """Take a message; messages are carried out in order."""

    def pause(self) -> None:
        """Deliver no answers until `resume`. Called while an answer is delivered."""

    def resume(self) -> None:
        """Deliver answers again."""

    def end(self) -> None:
        """Deliver no more answers, and give up waiting requests. Idempotent."""


class Endpoint(Protocol):
    """A server of this process. Thread-safe."""

    def call(self, method: str, request: bytes) -> bytes:
        """Carry out a unary call.

        Raises:
            grpc.RpcError: as gRPC would raise it.
        """

    def stream(self, method: str, deliver: Callable[[Answer], object]) -> Stream:
        """Return a new stream; `deliver` gets the answers, and finally the error that ends it. It must not wait."""


BY_ADDRESS: Final[dict[str, Endpoint]] = {}
"""The servers of this process. Each start or stop of a server changes it."""
