"""The outcome of an import or an export, one by one."""

from __future__ import annotations

from typing import NamedTuple


class Transferred(NamedTuple):
    """The outcome of one trajectory or item.

    Attributes:
        name: of the trajectory's file; of an item its key.
        num_steps: steps that were transferred; 0 if it was left out.
        error: why it was left out; empty if it was not.
    """

    name: str
    num_steps: int
    error: str = ""
