"""The reserved table in which a server counts its saves, so that writers know which items a checkpoint has. Pure.

    before a save                   one insert         num_inserts is the number of the newest save that has begun
    when its checkpoint is kept     some samples       num_samples is the number of the newest save that is safe
    at each start                   its signature      names this life of the server, and the save it has restored

A save that fails leaves `num_samples` as it is. A checkpoint has the table, so a restored server continues the numbers.
Two lives that begin with the same checkpoint may give the same number to two saves: so a save is named by both. Other
programs do not see the table: `read_server_info` takes it out of a server's tables.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables import SAVES, MinSize, TableConfig

_Save = tuple[str, int]
"""A save: the life of the server that made it, and its number."""

NO_SAVE: _Save = ("", 0)

_NAME = re.compile(r"(\w+)-(\w*)-(\d+)")  # this life, the life of the restored save, and its number


@dataclass(frozen=True)
class Saves:
    """The saves of a server.

    Attributes:
        begun: number of the newest save that has begun; 0 for none.
        safe: number of the newest save whose data no restart loses; 0 for none.
        life: name of the server's life, new at each start; empty if it is unknown.
        restored: save that the server has restored; `NO_SAVE` for none.
    """

    begun: int
    safe: int
    life: str = ""
    restored: _Save = NO_SAVE


def saves_table(restored: _Save = NO_SAVE) -> TableConfig:
    """Return the configuration of the reserved table for a new life of a server."""
    name = f"{secrets.token_hex(8)}-{restored[0]}-{restored[1]}"
    signature = ArraySpec((), np.dtype(np.uint8), name)
    return TableConfig(SAVES, 1, sampler="fifo", remover="fifo", rate_limiter=MinSize(1), signature=signature)


def read_saves(num_inserts: int, num_samples: int, signature: Any) -> Saves:
    """Return the saves in the reserved table.

    >>> read_saves(7, 6, ArraySpec((), np.uint8, "b-a-5"))
    Saves(begun=7, safe=6, life='b', restored=('a', 5))
    >>> read_saves(7, 6, None)
    Saves(begun=7, safe=6, life='', restored=('', 0))
    """
    named = _NAME.fullmatch(str(getattr(signature, "name", "")))
    if named is None:
        return Saves(num_inserts, num_samples)
    return Saves(num_inserts, num_samples, named[1], (named[2], int(named[3])))
