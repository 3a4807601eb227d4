"""Reverb's service over gRPC: the streams and calls of `endpoint`, for clients in other processes.

InsertStream    one thread reads and inserts; gRPC's thread sends the confirmed keys
SampleStream    gRPC's thread draws, sends, and draws again, so the unsent samples are bounded
other calls     one request, one response
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from reverb_writer.local.endpoint import CALLS, LocalEndpoint
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import encode_responses
from reverb_writer.local.streams import InsertStream, SampleStream
from reverb_writer.protocol import messages

_MAX_TIMEOUT_S = threading.TIMEOUT_MAX / 2

# dm-reverb's samplers recognize the end of the data by this text.
_TIMED_OUT = "Rate Limiter: Timeout exceeded before the right to insert was acquired."


class Service(grpc.GenericRpcHandler):
    """Handles all methods of Reverb's service. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Serve the tables of `store` to other processes."""
        self._store, self._endpoint = store, LocalEndpoint(store)
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        self._methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            messages.INSERT_STREAM: stream(self._insert),
            messages.SAMPLE_STREAM: stream(self._sample),
            messages.INITIALIZE_CONNECTION: stream(_initialize_connection),
            **{method: unary(self._unary(method)) for method in CALLS},
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a call; None for an unknown method."""
        return self._methods.get(details.method)

    def _unary(self, method: str) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def handle(message: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return self._endpoint.call(method, message)
            except grpc.RpcError as error:
                _abort(context, error)
                raise  # never reached: `abort` raises

        return handle

    def _insert(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        room = threading.Event()

        def deliver(answer: Any) -> None:
            answers.put(answer)
            if stream.has_room:
                room.set()

        def read() -> None:
            with contextlib.suppress(grpc.RpcError):  # the client has disconnected
                for message in requests:
                    room.clear()
                    if not stream.has_room:
                        room.wait()
                    stream.feed(message)
            stream.finish(lambda: deliver(None))

        stream = InsertStream(self._store, deliver)
        with _opened(stream, context, lambda: deliver(None)) as is_open:
            if is_open:
                threading.Thread(target=read, name="reverb-writer-local-insert", daemon=True).start()
            while is_open and (answer := answers.get()) is not None:
                if isinstance(answer, grpc.RpcError):
                    _abort(context, answer)
                yield answer

    def _sample(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def deliver(answer: Any) -> None:
            stream.pause()
            answers.put(answer)

        stream = SampleStream(self._store, deliver)
        with _opened(stream, context, lambda: answers.put(None)) as is_open:
            for message in requests if is_open else ():
                stream.feed(message)
                while stream.is_asked or not answers.empty():
                    answer = _next(answers, stream.timeout_s, context)
                    if answer is None:
                        return
                    if isinstance(answer, grpc.RpcError):
                        _abort(context, answer)
                    yield from encode_responses(answer.samples, rate_limited=answer.has_waited)
                    stream.resume()


@contextlib.contextmanager
def _opened(
    stream: InsertStream | SampleStream, context: grpc.ServicerContext, gone: Callable[[], object]
) -> Iterator[bool]:
    """Open a stream, and end it with the block or with its client; yield a test of whether the client is connected."""

    def end() -> None:
        stream.end()
        gone()

    stream.open()  # before the client may end it, because an ended stream cannot be opened
    try:
        yield context.add_callback(end)
    finally:
        stream.end()


def _next(answers: queue.SimpleQueue[Any], timeout_s: float | None, context: grpc.ServicerContext) -> Any:
    """Wait for the next answer; end the stream if none arrives in time."""
    try:
        return answers.get(timeout=None if timeout_s is None else min(timeout_s, _MAX_TIMEOUT_S))
    except queue.Empty:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, _TIMED_OUT)


def _initialize_connection(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    """Answer that no table is in the client's memory, so that it uses the network."""
    for _request in requests:
        yield messages.InitializeConnectionResponse().SerializeToString()


def _abort(context: grpc.ServicerContext, error: Any) -> Any:
    context.abort(error.code(), error.details())
