"""Reverb's service, over gRPC: requests to the store, and its refusals to gRPC's statuses.

InsertStream    one thread reads and inserts; gRPC's thread sends what is confirmed
SampleStream    gRPC's thread draws, sends, and draws again: what is not sent yet is bounded
the others      one request, one response
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from reverb_writer.local.calls import asked_for, unary_calls
from reverb_writer.local.incoming import Incoming
from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.stored_items import encode_responses
from reverb_writer.local.table import SampleRequest
from reverb_writer.protocol import messages

_MAX_TIMEOUT_S = threading.TIMEOUT_MAX / 2

# By these words dm-reverb's samplers tell the end of the data from a fault.
_TIMED_OUT = "Rate Limiter: Timeout exceeded before the right to insert was acquired."


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
            **{method: unary(_unary(call)) for method, call in unary_calls(store).items()},
        }

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return what handles a call; None for an unknown method."""
        return self._methods.get(details.method)

    def _insert(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        call = _InsertCall(self._store)
        if not context.add_callback(call.end):
            call.end()
            return
        reader = threading.Thread(target=call.read, args=(requests,), name="reverb-writer-local-insert", daemon=True)
        reader.start()
        try:
            while keys := call.take_confirmed():
                yield messages.InsertStreamResponse(keys=keys).SerializeToString()
        finally:
            call.end()
        if call.refusal is not None:
            _abort(context, call.refusal)

    def _sample(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        gone = False
        ready = threading.Event()

        def stop() -> None:
            nonlocal gone
            gone = True
            ready.set()

        if not context.add_callback(stop):
            return
        try:
            for message in requests:
                table, num_samples, timeout_s = asked_for(message)
                while num_samples and not gone:
                    ready.clear()
                    if gone:  # before the event was cleared
                        return
                    request = self._wait_for_samples(table, num_samples, timeout_s, ready)
                    num_samples -= len(request.samples)
                    yield from encode_responses(request.samples, rate_limited=request.has_waited)
        except Refusal as refusal:
            _abort(context, refusal)

    def _wait_for_samples(
        self, table: str, num_samples: int, timeout_s: float | None, ready: threading.Event
    ) -> SampleRequest:
        """Return a request with the samples that there are, one at least; none if `ready` is set in vain.

        Raises:
            Refusal: there is no such table, or no sample comes within `timeout_s` seconds.
        """
        request = SampleRequest(num_samples, ready.set)
        self._store.request(table, request)
        try:
            if not ready.wait(None if timeout_s is None else min(timeout_s, _MAX_TIMEOUT_S)):
                raise Refusal(Status.DEADLINE_EXCEEDED, _TIMED_OUT)
        finally:
            if not request.samples:
                self._store.withdraw(table, request)
        return request


class _InsertCall:
    """An insert stream, read in one thread and answered in another.

    Attributes:
        refusal: what has ended it; None if nothing has.
    """

    def __init__(self, store: Store) -> None:
        """Begin with nothing kept."""
        self.refusal: Refusal | None = None
        self._confirmed: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._lock = store.lock
        self._incoming = Incoming(store, self._confirm)
        self._room = threading.Event()
        self._half_closed = False

    def read(self, requests: Iterator[bytes]) -> None:
        """Carry out all requests; wait while too many items of earlier ones wait for a rate limiter."""
        try:
            with contextlib.suppress(grpc.RpcError):  # the client has gone
                for message in requests:
                    self._room.clear()
                    if not self._incoming.has_room:
                        self._room.wait()
                    self._incoming.feed(message)
            with self._lock:
                self._half_closed = True
                if not self._incoming.num_waiting:
                    self._confirmed.put(None)
        except Refusal as refusal:
            self.refusal = refusal
            self.end()
        except Exception:
            self.end()
            raise

    def take_confirmed(self) -> list[int]:
        """Wait for items that are in their tables now and return all their keys; none at the end."""
        keys: list[int] = []
        while not keys or not self._confirmed.empty():
            more = self._confirmed.get()
            if more is None:
                self._confirmed.put(None)  # for the next call
                break
            keys += more
        return keys

    def end(self) -> None:
        """Give up what waits. Idempotent."""
        self._incoming.end()
        self._room.set()
        self._confirmed.put(None)

    def _confirm(self, keys: list[int]) -> None:
        self._confirmed.put(keys)
        if self._incoming.has_room:
            self._room.set()
        if self._half_closed and not self._incoming.num_waiting:
            self._confirmed.put(None)


def _unary(call: Callable[[bytes], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """Return a handler of a call."""

    def handle(message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return call(message)
        except Refusal as refusal:
            _abort(context, refusal)
            raise  # never reached: `abort` raises

    return handle


def _initialize_connection(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    """Tell that no table is to be found in the client's memory, so that it comes over the network."""
    for _request in requests:
        yield messages.InitializeConnectionResponse().SerializeToString()


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> Any:
    context.abort(grpc.StatusCode[refusal.status.name], refusal.text)
