"""The unary calls of Reverb's service: functions from the bytes of a request to the bytes of a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.local.table import Table
from reverb_writer.protocol import messages
from reverb_writer.tables.table_messages import write_balance, write_selector


def unary_calls(store: Store) -> dict[str, Callable[[bytes], bytes]]:
    """Return the function of each method; it may raise Refusal."""

    def mutate(request: Any) -> Any:
        with store.lock:
            table = store.table(request.table)
            table.update({update.key: update.priority for update in request.updates}, request.delete_keys)
        return messages.MutatePrioritiesResponse()

    def reset(request: Any) -> Any:
        with store.lock:
            store.table(request.table).reset()
        return messages.ResetResponse()

    def info(_: Any) -> Any:
        response = messages.ServerInfoResponse()
        response.tables_state_id.high = store.state_id >> 64
        response.tables_state_id.low = store.state_id & (2**64 - 1)
        with store.lock:
            for name, table in store.tables.items():
                _describe(table, store.signatures[name], response.table_info.add())
        return response

    return {
        messages.SERVER_INFO: _call(messages.ServerInfoRequest, info),
        messages.MUTATE_PRIORITIES: _call(messages.MutatePrioritiesRequest, mutate),
        messages.RESET: _call(messages.ResetRequest, reset),
        messages.CHECKPOINT: _call(messages.CheckpointRequest, _checkpoint),
    }


def asked_for(message: bytes) -> tuple[str, int, float | None]:
    """Return the table, the number of samples and the time-out in seconds of a SampleStreamRequest.

    Raises:
        Refusal: the request is damaged, or requests no samples.
    """
    request = _parse(messages.SampleStreamRequest, message)
    if request.num_samples < 1:
        raise Refusal(Status.INVALID_ARGUMENT, f"`num_samples` must be >= 1, got {request.num_samples}.")
    milliseconds = request.rate_limiter_timeout.milliseconds if request.HasField("rate_limiter_timeout") else -1
    return request.table, request.num_samples, None if milliseconds < 0 else milliseconds / 1000


def _call(kind: Any, carry_out: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    def call(message: bytes) -> bytes:
        encoded: bytes = carry_out(_parse(kind, message)).SerializeToString()
        return encoded

    return call


def _parse(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        text = f"{len(message)} bytes that are not a {kind.DESCRIPTOR.name} ({error})."
        raise Refusal(Status.INVALID_ARGUMENT, text) from None


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


def _checkpoint(_: Any) -> Any:
    text = (
        "a local server makes no checkpoints. Call its `save(folder)` in its own process, or use reverb-writer-server."
    )
    raise Refusal(Status.FAILED_PRECONDITION, text)
