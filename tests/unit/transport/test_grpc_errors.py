"""gRPC's errors become ours at one place."""

from __future__ import annotations

import grpc
import pytest

from reverb_writer.errors import ReverbWriterError, ServerUnavailableError, StructureError
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.grpc_errors import is_refusal, translate_error


class Ended(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        # Seen with grpcio 1.85: another call of the connection got a message of 9 MB, and this stream ended with it.
        (
            "RESOURCE_EXHAUSTED",
            "Stream removed (CLIENT: Received message larger than max (9 vs. 8))",
            ServerUnavailableError,
        ),
        ("UNKNOWN", "Stream removed", ServerUnavailableError),
        ("RESOURCE_EXHAUSTED", "the local server holds 5 of `max_bytes` 5 bytes", ReverbWriterError),
        ("NOT_FOUND", "Priority table x was not found", StructureError),
    ],
)
def test_stream_that_ends_with_its_connection_is_not_a_refusal(code: str, details: str, kind: type[Exception]) -> None:
    error = translate_error(Ended(grpc.StatusCode[code], details), "localhost:1", is_stream=True)
    assert type(error) is kind


def test_server_that_refuses_a_call_is_neither_gone_nor_silent() -> None:
    assert is_refusal("failed to connect to all addresses; last error: UNKNOWN: connect: Connection refused (111)")
    refused = translate_error(Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many"), "localhost:1", is_stream=True)
    with Channel("localhost:1") as channel:
        assert not channel.is_silent(refused)
        assert channel.explain_loss(refused) == (
            "There is no connection to the server at localhost:1, last heard of 0.0 s ago (the server at localhost:1 "
            "refused: RESOURCE_EXHAUSTED: too many). It is tried again and again."
        )


def test_words_of_an_address_do_not_say_why_the_connection_is_lost() -> None:
    late = Ended(grpc.StatusCode.UNAVAILABLE, "connect: Connection timed out (110)")
    refused = Ended(grpc.StatusCode.UNAVAILABLE, "connect: Connection refused (111)")
    for ended, address, kind in ((late, "dns:localhost:1", "does not answer"), (refused, "timeout:1", "is gone")):
        with Channel(address) as channel:
            text = channel.explain_loss(translate_error(ended, address, is_stream=True))
            assert text.startswith(f"The server at {address} {kind}, last heard of ")
