"""The answer to a request that the server cannot carry out. No gRPC: `grpc_service.py` translates it."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """gRPC's status codes, as far as the server uses them, by their names."""

    DEADLINE_EXCEEDED = enum.auto()
    FAILED_PRECONDITION = enum.auto()
    INVALID_ARGUMENT = enum.auto()
    NOT_FOUND = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()


class Refusal(Exception):  # noqa: N818  # not an error of the server
    """A request is refused, and has changed nothing.

    Attributes:
        status: of the answer.
        text: of the answer.
    """

    def __init__(self, status: Status, text: str) -> None:
        """Take both."""
        super().__init__(text)
        self.status, self.text = status, text
