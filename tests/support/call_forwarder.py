"""A gRPC server between client and server that counts the calls, sees how much time each was given, and can spoil them.

    client --gRPC--> CallForwarder --gRPC--> server

Unary calls and streams are the same on the wire, so one handler forwards them all, as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import grpc

_NEVER_S = 1e6


class Call(NamedTuple):
    """A call that has arrived.

    Attributes:
        verb: The method's name, such as `ServerInfo`.
        left_s: Seconds until the deadline that the client gave it, when it arrived.
    """

    verb: str
    left_s: float


class CallForwarder:
    """Forwards calls to `localhost:port` until it is closed.

    Attributes:
        calls: What has arrived so far, in this order.
        delay_s: Seconds by which each call is held up before it is forwarded.
        refuse: Gets the method's name of each call, and returns the state that it ends with instead of being forwarded;
            None to forward it.
        lose: The same, for calls that are forwarded, and end with that state instead of the first answer.
        change: Gets each message of a sample stream, and returns what is sent instead.
    """

    def __init__(
        self, port: int, *, delay_s: float = 0.0, change: Callable[[bytes], bytes] = lambda message: message
    ) -> None:
        """Listen on a free port."""
        self.calls: list[Call] = []
        self.delay_s = delay_s
        self.refuse: Callable[[str], grpc.StatusCode | None] = lambda _: None
        self.lose: Callable[[str], grpc.StatusCode | None] = lambda _: None
        self.change = change
        self._channel = grpc.insecure_channel(f"localhost:{port}")
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        self._server.add_generic_rpc_handlers([_Handler(self)])
        self._port = self._server.add_insecure_port("localhost:0")
        self._server.start()

    @property
    def address(self) -> str:
        """Where a client finds it."""
        return f"localhost:{self._port}"

    @property
    def verbs(self) -> list[str]:
        """The methods that were called so far, in this order."""
        return [call.verb for call in self.calls]

    def forward(self, method: str, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer a call with what the server answers."""
        left_s = context.time_remaining()
        verb = method.rpartition("/")[2]
        self.calls.append(Call(verb, left_s))
        time.sleep(self.delay_s)
        if (state := self.refuse(verb)) is not None:
            context.abort(state, "refused by the forwarder")
        start: Any = self._channel.stream_stream(method)
        call = start(_until_cancelled(requests), timeout=None if left_s > _NEVER_S else left_s)
        context.add_callback(call.cancel)
        lost = self.lose(verb)
        try:
            for answer in call:
                if lost is not None:
                    context.abort(lost, "lost by the forwarder")
                yield self.change(answer) if verb == "SampleStream" else answer
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def close(self) -> None:
        """End all calls and take no new ones."""
        self._server.stop(None).wait()
        self._channel.close()

    def __enter__(self) -> CallForwarder:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(grpc.RpcError):
            self.close()


def _until_cancelled(requests: Iterator[bytes]) -> Iterator[bytes]:
    with contextlib.suppress(grpc.RpcError):
        yield from requests


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, forwarder: CallForwarder) -> None:
        self._forwarder = forwarder

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._forwarder.forward, details.method))
