"""The answer to a refused request."""

from __future__ import annotations

from typing import TypeAlias

import grpc

Status: TypeAlias = grpc.StatusCode


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
