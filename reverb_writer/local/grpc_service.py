"""Reverb's service, over gRPC: requests to the store, and its refusals to gRPC's statuses.

InsertStream    one thread reads and inserts; gRPC's thread sends what is confirmed
SampleStream    gRPC's thread draws, sends, and draws again: what is not sent yet is bounded
the others      one request, one response
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from reverb_writer.local.incoming import Incoming
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import encode_responses
from reverb_writer.local.table import SampleRequest
from reverb_writer.protocol import messages

_MAX_TIMEOUT_S = threading.TIMEOUT_MAX / 2


class Service(grpc.GenericRpcHandler):
    """Handles all methods of Reverb's service. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Serve what is in `store`."""
        self._store = store
        stream, unary = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
        self._methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            messages.INSERT_STREAM: stream(self._insert),
            messages.SAMPLE_STREAM: stream(self._sample),
            messages.INITIALIZE_CONNECTION: stream(_initialize_connection),
            messages.SERVER_INFO: unary(_unary(messages.ServerInfoRequest, self._info)),
            messages.MUTATE_PRIORITIES: unary(_unary(messages.MutatePrioritiesRequest, self._mutate)),
            messages.RESET: unary(_unary(messages.ResetRequest, self._reset)),
            messages.CHECKPOINT: unary(_unary(messages.CheckpointRequest, _checkpoint)),
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what handles a call; None for an unknown method."""
        return self._methods.get(details.method)

    def _insert(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        incoming = Incoming(self._store)
        refusals: list[Refusal] = []

        def read() -> None:
            try:
                with contextlib.suppress(grpc.RpcError):  # the client has gone
                    for message in requests:
                        incoming.feed(message)
                incoming.finish()
            except Refusal as refusal:
                refusals.append(refusal)
                incoming.end()
            except Exception:
                incoming.end()
                raise

        if not context.add_callback(incoming.end):
            incoming.end()
            return
        threading.Thread(target=read, name="reverb-writer-local-insert", daemon=True).start()
        try:
            while keys := incoming.take_confirmed():
                yield messages.InsertStreamResponse(keys=keys).SerializeToString()
        finally:
            incoming.end()
        if refusals:
            _abort(context, refusals[0])

    def _sample(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        gone = False
        waiting: SampleRequest | None = None

        def stop() -> None:
            nonlocal gone
            gone = True
            if waiting is not None:
                waiting.ready.set()

        if not context.add_callback(stop):
            return
        try:
            for message in requests:
                table, num_samples, timeout_s = _asked_for(message)
                while num_samples and not gone:
                    waiting = SampleRequest(num_samples)
                    if gone:  # before there was one to wake
                        return
                    samples = self._store.sample(table, waiting, timeout_s)
                    num_samples -= len(samples)
                    yield from encode_responses(samples)
        except Refusal as refusal:
            _abort(context, refusal)

    def _info(self, _: Any) -> Any:
        return self._store.info()

    def _mutate(self, request: Any) -> Any:
        self._store.mutate(request)
        return messages.MutatePrioritiesResponse()

    def _reset(self, request: Any) -> Any:
        self._store.reset(request.table)
        return messages.ResetResponse()


def _unary(kind: Any, carry_out: Callable[[Any], Any]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Return a handler of one request of a kind."""

    def handle(message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            encoded: bytes = carry_out(_parse(kind, message)).SerializeToString()
        except Refusal as refusal:
            _abort(context, refusal)
        return encoded

    return handle


def _parse(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        text = f"{len(message)} bytes that are no {kind.DESCRIPTOR.name} ({error})."
        raise Refusal(Status.INVALID_ARGUMENT, text) from None


def _asked_for(message: bytes) -> tuple[str, int, float | None]:
    """Return table, number of samples, and time-out, of a SampleStreamRequest."""
    request = _parse(messages.SampleStreamRequest, message)
    if request.num_samples < 1:
        raise Refusal(Status.INVALID_ARGUMENT, f"`num_samples` must be >= 1, got {request.num_samples}.")
    milliseconds = request.rate_limiter_timeout.milliseconds if request.HasField("rate_limiter_timeout") else -1
    return request.table, request.num_samples, None if milliseconds < 0 else min(milliseconds / 1000, _MAX_TIMEOUT_S)


def _initialize_connection(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    """Tell that no table is to be found in the client's memory, so that it comes over the network."""
    for _request in requests:
        yield messages.InitializeConnectionResponse().SerializeToString()


def _checkpoint(_: Any) -> Any:
    text = (
        "a local server makes no checkpoints. Call its `save(folder)` in its own process, or use reverb-writer-server."
    )
    raise Refusal(Status.FAILED_PRECONDITION, text)


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> Any:
    context.abort(grpc.StatusCode[refusal.status.name], refusal.text)
