"""The calls and streams of a server: functions, without threads. `grpc_service` offers them to other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverb_writer.local.refusals import Refusal, Status, parse, refusal_of
from reverb_writer.local.store import Store
from reverb_writer.local.streams import CLOSED, InsertStream, SampleStream
from reverb_writer.local.table import Table
from reverb_writer.protocol import messages
from reverb_writer.tables.table_messages import write_balance, write_selector
from reverb_writer.transport.endpoints import Answer


class LocalEndpoint:
    """Calls and streams of one server; see `transport.endpoints.Endpoint`. Thread-safe."""

    def __init__(self, store: Store) -> None:
        """Serve the tables of `store`."""
        self._store = store

    def call(self, method: str, request: bytes) -> bytes:
        """Carry out a unary call; see `Endpoint`."""
        if self._store.is_closed:
            raise Refusal(Status.UNAVAILABLE, CLOSED)
        if method not in CALLS:
            raise Refusal(Status.UNIMPLEMENTED, f"there is no method {method}.")
        kind, carry_out = CALLS[method]
        try:
            with self._store.lock:
                encoded: bytes = carry_out(self._store, parse(kind, request)).SerializeToString()
        except Exception as error:  # noqa: BLE001  # as with gRPC, the caller gets every error
            raise refusal_of(error) from None
        return encoded

    def stream(self, method: str, deliver: Callable[[Answer], object]) -> InsertStream | SampleStream:
        """Return a new stream; see `Endpoint`."""
        return (InsertStream if method == messages.INSERT_STREAM else SampleStream)(self._store, deliver)

    def close(self) -> None:
        """End all streams, and take no further calls. Idempotent."""
        with self._store.lock:
            self._store.is_closed = True
            for stream in [*self._store.streams]:
                stream.fail(Refusal(Status.UNAVAILABLE, CLOSED))


def _mutate(store: Store, request: Any) -> Any:
    updates = {update.key: update.priority for update in request.updates}
    store.table(request.table).update(updates, request.delete_keys)
    return messages.MutatePrioritiesResponse()


def _reset(store: Store, request: Any) -> Any:
    store.table(request.table).reset()
    return messages.ResetResponse()


def _server_info(store: Store, _: Any) -> Any:
    response = messages.ServerInfoResponse()
    response.tables_state_id.high = store.state_id >> 64
    response.tables_state_id.low = store.state_id & (2**64 - 1)
    for name, table in store.tables.items():
        _describe(table, store.signatures[name], response.table_info.add())
    return response


def _describe(table: Table, signature: Any, info: Any) -> None:
    config, limiter = table.config, info.rate_limiter_info
    info.name, info.max_size, info.max_times_sampled = config.name, config.max_size, config.max_times_sampled
    write_selector(config.sampler, info.sampler_options)
    write_selector(config.remover, info.remover_options)
    write_balance(config.rate_limiter.balance, limiter)
    limiter.insert_stats.completed, limiter.sample_stats.completed = table.num_inserts, table.num_samples
    if signature is not None:
        info.signature.CopyFrom(signature)
    info.current_size, info.num_episodes = len(table), table.num_episodes
    info.num_deleted_episodes, info.num_unique_samples = table.num_deleted_episodes, table.num_unique_samples
    table.measure()
    for state, seconds in table.worker_time_s.items():
        setattr(info.table_worker_time, f"{state}_ms", int(1000 * seconds))


def _checkpoint(_: Store, __: Any) -> Any:
    text = (
        "a local server makes no checkpoints. Call its `save(folder)` in its own process, or use reverb-writer-server."
    )
    raise Refusal(Status.FAILED_PRECONDITION, text)


CALLS: dict[str, tuple[Any, Callable[[Store, Any], Any]]] = {
    messages.SERVER_INFO: (messages.ServerInfoRequest, _server_info),
    messages.MUTATE_PRIORITIES: (messages.MutatePrioritiesRequest, _mutate),
    messages.RESET: (messages.ResetRequest, _reset),
    messages.CHECKPOINT: (messages.CheckpointRequest, _checkpoint),
}
"""The class of the request and the function of each unary method; the function is called with the store's lock."""
