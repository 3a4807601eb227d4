"""The answer to a refused request. This module has no gRPC: `grpc_service` translates the answer."""

from __future__ import annotations

import enum


class Status(enum.Enum):
    """The gRPC status codes that the server uses, by name."""

    DEADLINE_EXCEEDED = enum.auto()
    FAILED_PRECONDITION = enum.auto()
    INVALID_ARGUMENT = enum.auto()
    NOT_FOUND = enum.auto()
    RESOURCE_EXHAUSTED = enum.auto()


class Refusal(Exception):  # noqa: N818  # not an error of the server
    """A request is refused, and has changed nothing.

    Attributes:
        status: status code of the answer.
        text: text of the answer.
    """

    def __init__(self, status: Status, text: str) -> None:
        """Take status and text."""
        super().__init__(text)
        self.status, self.text = status, text
