"""Servers of this process, by address: their clients here call functions, and need no socket.

    LocalServer --register--> find() --> Channel: calls
                                     --> LocalPipe: streams

Nothing of a server's package is imported. The functions take locks and change tables, so the main thread, which an
interrupt may meet anywhere, never calls them: the loop does so for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

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


_endpoints: dict[str, Endpoint] = {}


def register(address: str, endpoint: Endpoint) -> None:
    """Have the calls and streams of this process to an address end at `endpoint`."""
    _endpoints[address] = endpoint


def forget(address: str, endpoint: Endpoint) -> None:
    """Take back `register`; another endpoint that has the address since stays."""
    if _endpoints.get(address) is endpoint:
        del _endpoints[address]


def find(address: str) -> Endpoint | None:
    """Return the server of this process that has the address; None if there is none."""
    return _endpoints.get(address)
