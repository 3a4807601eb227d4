"""The reserved table in which a server counts its saves, so that writers know which items a checkpoint has. Pure.

    before a save                   one insert         num_inserts is the number of the newest save that has begun
    when its checkpoint is kept     some samples       num_samples is the number of the newest save that is safe

A save that fails leaves `num_samples` as it is. A checkpoint has the table, so a restored server has the number of its
own save. Other programs do not see the table: `read_server_info` takes it out of a server's tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.tables import SAVES, MinSize, TableConfig


@dataclass(frozen=True)
class Saves:
    """The saves of a server.

    Attributes:
        begun: number of the newest save that has begun; 0 for none.
        safe: number of the newest save whose data no restart loses; 0 for none.
    """

    begun: int
    safe: int


def saves_table() -> TableConfig:
    """Return the configuration of the reserved table, which has one item.

    >>> saves_table().max_size
    1
    """
    return TableConfig(SAVES, 1, sampler="fifo", remover="fifo", rate_limiter=MinSize(1))
