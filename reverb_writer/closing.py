"""The base class of resources that a `with` block closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class ClosedAtExit:
    """A context manager that closes itself at the end of its block; subclasses define `close`."""

    def close(self) -> None:
        """Close the resource."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
