"""The calls and streams of a server: functions, without threads. `grpc_service` offers them to other processes.

    request --> InsertStream.feed --> tables --> deliver(keys)
    request --> SampleStream.feed --> tables --> deliver(samples), at once or when the rate limiter allows it

Each function runs in the thread that calls it. If an answer has to wait, the thread whose change of a table ends the
wait delivers it. A function waits only for the lock of the store.
"""

from __future__ import annotations

import abc
import collections
import logging
from collections.abc import Callable

import grpc
from grpc.aio import AioRpcError, Metadata

from reverb_writer.local.calls import asked_for, unary_calls
from reverb_writer.local.incoming import Incoming
from reverb_writer.local.refusals import Refusal
from reverb_writer.local.store import Store
from reverb_writer.local.table import SampleRequest
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import UnencodedSamples
from reverb_writer.transport.endpoints import Answer

_LOG = logging.getLogger(__package__)

Deliver = Callable[[Answer], object]


class LocalEndpoint:
    """Calls and streams of one server; see `transport.endpoints.Endpoint`. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Serve the tables of `store`."""
        self.store = store
        self.streams: dict[_Stream, None] = {}  # open streams, guarded by the store's lock
        self.is_closed = False
        self.calls = unary_calls(store)  # by method

    def call(self, method: str, request: bytes) -> bytes:
        """Carry out a unary call; see `Endpoint`."""
        if self.is_closed:
            raise _closed_error()
        call = self.calls.get(method)
        if call is None:
            raise _error(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {method}.")
        try:
            return call(request)
        except Exception as error:  # as with gRPC, the caller gets every error
            raise _error_of(error) from error

    def stream(self, method: str, deliver: Deliver) -> _Stream:
        """Return a new stream; see `Endpoint`."""
        return (InsertStream if method == messages.INSERT_STREAM else SampleStream)(self, deliver)

    def close(self) -> None:
        """End all streams, and take no further calls. Idempotent."""
        with self.store.lock:
            self.is_closed = True
            for stream in [*self.streams]:
                stream.fail(_closed_error())


class _Stream(abc.ABC):
    """One stream, with the messages that wait for their turn. Thread-safe."""

    def __init__(self, endpoint: LocalEndpoint, deliver: Deliver) -> None:
        self._endpoint, self._deliver = endpoint, deliver
        self._store = endpoint.store
        self._messages: collections.deque[bytes] = collections.deque()
        self._is_working = self._is_paused = False
        self._has_ended = False

    def open(self) -> None:
        """Begin; see `Stream`."""
        with self._store.lock:
            self._endpoint.streams[self] = None
            if self._endpoint.is_closed:
                self.fail(_closed_error())

    def feed(self, message: bytes) -> None:
        """Take a message; see `Stream`."""
        if not self._has_ended:
            self._messages.append(message)
            self.work()

    def pause(self) -> None:
        """Stop to answer until `resume`; see `Stream`."""
        self._is_paused = True

    def resume(self) -> None:
        """Continue to answer; see `Stream`."""
        self._is_paused = False
        self.work()

    def end(self) -> None:
        """Drop all waiting messages and end; see `Stream`."""
        with self._store.lock:
            if not self._has_ended:
                self._has_ended = True
                self._endpoint.streams.pop(self, None)
                self._messages.clear()
                self._give_up()

    def fail(self, error: grpc.RpcError) -> None:
        """End with an error. The caller holds the lock."""
        if not self._has_ended:
            self.end()
            self._deliver(error)

    def work(self) -> None:
        """Process all messages that can be processed; a nested call makes the outer call continue."""
        with self._store.lock:
            if self._is_working:
                return
            self._is_working = True
            try:
                while not self._has_ended and self._may_work():
                    self._carry_out()
            except Exception as error:  # noqa: BLE001  # as with gRPC, the client gets every error
                self.fail(_error_of(error))
            finally:
                self._is_working = False

    @abc.abstractmethod
    def _may_work(self) -> bool:
        """Whether a message can be processed now."""

    @abc.abstractmethod
    def _carry_out(self) -> None:
        """Process the next message."""

    @abc.abstractmethod
    def _give_up(self) -> None:
        """Drop what waits for a rate limiter."""


class InsertStream(_Stream):
    """Chunks and items in, keys of stored items out."""

    def __init__(self, endpoint: LocalEndpoint, deliver: Deliver) -> None:
        """Begin without kept chunks."""
        super().__init__(endpoint, deliver)
        self._incoming = Incoming(endpoint.store, self._confirm)
        self._finished: Callable[[], object] | None = None

    @property
    def has_room(self) -> bool:
        """Whether a message would be processed at once."""
        return self._incoming.has_room

    def finish(self, then: Callable[[], object]) -> None:
        """Call a function when all items are confirmed; no more messages follow."""
        with self._store.lock:
            self._finished = then
            if not self._incoming.num_waiting:
                then()

    def _may_work(self) -> bool:
        return bool(self._messages) and self.has_room

    def _carry_out(self) -> None:
        self._incoming.feed(self._messages.popleft())

    def _give_up(self) -> None:
        self._incoming.end()

    def _confirm(self, keys: list[int]) -> None:
        self._deliver(messages.InsertStreamResponse(keys=keys).SerializeToString())
        if self._messages:
            self.work()
        if self._finished is not None and not self._incoming.num_waiting:
            self._finished()


class SampleStream(_Stream):
    """Requests in, samples out; one request at a time waits at a table.

    Attributes:
        timeout_s: the client's time-out for the rate limiter; None for ever. The user of the stream enforces it.
    """

    def __init__(self, endpoint: LocalEndpoint, deliver: Deliver) -> None:
        """Begin without a request."""
        super().__init__(endpoint, deliver)
        self._table, self._num_missing = "", 0
        self._waiting: SampleRequest | None = None
        self.timeout_s: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether samples of a request are missing; drawn samples are delivered."""
        with self._store.lock:
            return self._num_missing > 0

    def _may_work(self) -> bool:
        return self._waiting is None and not self._is_paused and bool(self._num_missing or self._messages)

    def _carry_out(self) -> None:
        if not self._num_missing:
            self._table, self._num_missing, self.timeout_s = asked_for(self._messages.popleft())
        table, self._waiting = self._store.table(self._table), SampleRequest(self._num_missing, self._answer)
        table.request(self._waiting)

    def _give_up(self) -> None:
        if self._waiting is not None:
            self._store.table(self._table).withdraw(self._waiting)

    def _answer(self) -> None:
        request, self._waiting = self._waiting, None
        if request is not None and not self._has_ended:
            self._num_missing -= len(request.samples)
            self._deliver(UnencodedSamples(request.samples, request.num_bytes, request.has_waited))
            self.work()


def _error_of(error: Exception) -> grpc.RpcError:
    """Return the error that gRPC's client would get."""
    if isinstance(error, Refusal):
        return _error(grpc.StatusCode[error.status.name], error.text)
    _LOG.exception("A request to a local server has failed. Please report it.", exc_info=error)
    return _error(grpc.StatusCode.UNKNOWN, f"Exception calling application: {error}")


def _closed_error() -> grpc.RpcError:
    return _error(grpc.StatusCode.UNAVAILABLE, "the server was closed")


def _error(code: grpc.StatusCode, text: str) -> grpc.RpcError:
    return AioRpcError(code, Metadata(), Metadata(), text)
