"""Servers of this process, by address: their clients here call functions, and need no socket.

    LocalServer --> BY_ADDRESS --> Channel: calls
                               --> LocalPipe: streams

Nothing of a server's package is imported. The functions take locks and change tables, so the main thread, which an
interrupt may meet anywhere, never calls them: the loop does so for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import grpc

from reverb_writer.protocol.responses import UnencodedSamples

Answer: TypeAlias = "bytes | UnencodedSamples | grpc.RpcError"


class Stream(Protocol):
    """The server's end of a stream. Thread-safe; nothing of it waits for a rate limiter."""

    def open(self) -> None:
        """Begin; the server ends it from here on when it is closed."""

    def feed(self, message: bytes) -> None:
        """Take a message; it is carried out after those before."""

    def pause(self) -> None:
        """Answer no more until `resume`. Called while an answer is delivered."""

    def resume(self) -> None:
        """Answer on."""

    def end(self) -> None:
        """Answer no more, and give up what waits. Idempotent."""


class Endpoint(Protocol):
    """A server of this process. Thread-safe."""

    def call(self, method: str, request: bytes) -> bytes:
        """Carry out a unary call.

        Raises:
            grpc.RpcError: as gRPC would raise it.
        """

    def stream(self, method: str, deliver: Callable[[Answer], object]) -> Stream:
        """Return a new stream; `deliver` gets its answers, and once the error that ends it. It must not wait."""


BY_ADDRESS: Final[dict[str, Endpoint]] = {}
"""The servers of this process. Who starts or stops one changes it."""
