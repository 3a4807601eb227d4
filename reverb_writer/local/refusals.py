"""The answer to a refused request."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import AioRpcError, Metadata

_LOG = logging.getLogger(__package__)

Status: TypeAlias = grpc.StatusCode


class Refusal(AioRpcError):  # noqa: N818  # not an error of the server
    """A request is refused, and has changed nothing: the error that a client of gRPC would get."""

    def __init__(self, status: Status, text: str) -> None:
        """Take status and text of the answer."""
        super().__init__(status, Metadata(), Metadata(), text)


def refusal_of(error: Exception) -> Refusal:
    """Return the answer to a request that has failed: as with gRPC, the client gets every error."""
    if isinstance(error, Refusal):
        return error.with_traceback(None)
    _LOG.exception("A request to a local server has failed. Please report it.", exc_info=error)
    return Refusal(Status.UNKNOWN, f"Exception calling application: {error}")


def parse(kind: Any, message: bytes) -> Any:
    """Return a request.

    Raises:
        Refusal: it is damaged.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        text = f"{len(message)} bytes that are not a {kind.DESCRIPTOR.name} ({error})."
        raise Refusal(Status.INVALID_ARGUMENT, text) from None
