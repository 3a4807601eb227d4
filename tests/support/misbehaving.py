"""A gRPC server that answers as Reverb's does, or sends whatever a test has it send."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from reverb_writer.protocol import messages


def server_info(*tables: str, max_times_sampled: int = 0) -> bytes:
    """Return a ServerInfoResponse with tables that hold one item."""
    response = messages.ServerInfoResponse()
    response.tables_state_id.low = 1
    for name in tables:
        table = response.table_info.add()
        table.name, table.max_size, table.current_size = name, 1000, 1
        table.max_times_sampled = max_times_sampled
        limiter = table.rate_limiter_info
        limiter.samples_per_insert, limiter.min_size_to_sample = 1.0, 1
        limiter.min_diff, limiter.max_diff = -1e308 * 1.7, 1e308 * 1.7
    reply: bytes = response.SerializeToString()
    return reply


class MisbehavingServer:
    """Serves until it is closed.

    Attributes:
        info: the answer to ServerInfo, or what makes it.
        checkpoint: likewise, to Checkpoint.
        sample: called with an iterator over the requests of a sample stream; yields its responses.
        insert: likewise, of an insert stream; an error of Python's `PermissionError` refuses the stream.
    """

    def __init__(self) -> None:
        """Start it on a free port, with one table `replay`."""
        self.info: bytes | Callable[[], bytes] = server_info("replay")
        self.checkpoint: bytes | Callable[[], bytes] = b""
        self.sample: Callable[[Iterator[bytes]], Iterator[bytes]] = _silence
        self.insert: Callable[[Iterator[bytes]], Iterator[bytes]] = _silence
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=options)
        handlers: dict[str, Any] = {
            "ServerInfo": grpc.unary_unary_rpc_method_handler(lambda _, __: _made(self.info)),
            "Checkpoint": grpc.unary_unary_rpc_method_handler(lambda _, __: _made(self.checkpoint)),
            "SampleStream": grpc.stream_stream_rpc_method_handler(lambda requests, _: self.sample(requests)),
            "InsertStream": grpc.stream_stream_rpc_method_handler(self._insert),
        }
        service = messages.SERVER_INFO.split("/")[1]
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        self.address = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def _insert(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        try:
            yield from self.insert(requests)
        except PermissionError as error:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))

    def __enter__(self) -> MisbehavingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(10)


def _made(answer: bytes | Callable[[], bytes]) -> bytes:
    return answer if isinstance(answer, bytes) else answer()


def _silence(requests: Iterator[bytes]) -> Iterator[bytes]:
    for _ in requests:
        yield from ()
