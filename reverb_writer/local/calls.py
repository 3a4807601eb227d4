"""The unary calls of Reverb's service: functions from the bytes of a request to the bytes of a response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.local.refusals import Refusal, Status
from reverb_writer.local.store import Store
from reverb_writer.protocol import messages


def unary_calls(store: Store) -> dict[str, Callable[[bytes], bytes]]:
    """Return the function of each method; it may raise Refusal."""

    def mutate(request: Any) -> Any:
        store.mutate(request)
        return messages.MutatePrioritiesResponse()

    def reset(request: Any) -> Any:
        store.reset(request.table)
        return messages.ResetResponse()

    return {
        messages.SERVER_INFO: _call(messages.ServerInfoRequest, lambda _: store.info()),
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


def _checkpoint(_: Any) -> Any:
    text = (
        "a local server makes no checkpoints. Call its `save(folder)` in its own process, or use reverb-writer-server."
    )
    raise Refusal(Status.FAILED_PRECONDITION, text)
