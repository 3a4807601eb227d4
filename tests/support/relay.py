"""A gRPC server in front of a replay server, which may change what the server answers to requests for samples."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from reverb_writer.errors import ReverbWriterError
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream


class Relay:
    """Passes calls on to the server at `address` until it is closed. A context manager.

    Attributes:
        address: where a client finds it.
        change: gets each message of a sample stream, and returns what is sent instead.
        num_streams: sample streams opened so far.
    """

    def __init__(self, address: str, change: Callable[[bytes], bytes]) -> None:
        """Listen on a free port."""
        self.change, self.num_streams = change, 0
        # By another name, because this reads bytes: a server of this process would give samples as they are.
        self._channel = Channel(address.replace("127.0.0.1", "localhost"))
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
        handlers: dict[str, Any] = {
            method.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(self._passing(method))
            for method in (messages.SERVER_INFO, messages.MUTATE_PRIORITIES, messages.RESET)
        }
        handlers["SampleStream"] = grpc.stream_stream_rpc_method_handler(self._samples)
        service = messages.SERVER_INFO.split("/")[1]
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        self.address = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def __enter__(self) -> Relay:
        """Return the relay itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._channel.close()
        self._server.stop(0).wait(10)

    def _passing(self, method: str) -> Callable[[bytes, Any], bytes]:
        return lambda request, _: self._channel.call(method, request, 30.0)

    def _samples(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self.num_streams += 1
        stream = ByteStream(self._channel, messages.SAMPLE_STREAM)
        context.add_callback(stream.cancel)

        def pass_on() -> None:
            with contextlib.suppress(grpc.RpcError):  # the client has gone
                for request in requests:
                    stream.send(request)

        threading.Thread(target=pass_on, daemon=True).start()
        try:
            for message in stream:
                assert isinstance(message, bytes)
                yield self.change(message)
        except ReverbWriterError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
