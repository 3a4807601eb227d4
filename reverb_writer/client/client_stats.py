"""The tables of a client: numbers for loggers of metrics, and a table for notebooks."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from reverb_writer.scalars import Scalars
from reverb_writer.tables.table_info import TableInfo

_COLUMNS = ("table", "items", "max_size", "inserts", "samples", "sampler", "remover")


@dataclass(frozen=True)
class TableStats(Scalars):
    """Counters of a table, summed over all servers.

    Attributes:
        items: items in the table.
        max_size: maximum number of items.
        episodes: episodes that the items come from.
        inserts: items inserted since the server started or the table was reset.
        samples: samples sent since the server started or the table was reset.
        unique_samples: items that were sampled at least once.
    """

    items: int
    max_size: int
    episodes: int
    inserts: int
    samples: int
    unique_samples: int

    @classmethod
    def of(cls, info: TableInfo) -> TableStats:
        """Return the counters in `info`, one table of `Client.server_info()`."""
        limiter = info.rate_limiter
        return cls(
            info.current_size,
            info.max_size,
            info.num_episodes,
            limiter.num_inserts,
            limiter.num_samples,
            info.num_unique_samples,
        )


@dataclass(frozen=True)
class ClientStats(Scalars):
    """Counters of all tables.

    Attributes:
        tables: a `TableStats` per table, by name.
    """

    tables: dict[str, TableStats]


def tables_html(address: str, tables: Mapping[str, TableInfo]) -> str:
    """Return an HTML table of the tables at an address."""
    rows = [_row("th", _COLUMNS)]
    for name, info in tables.items():
        stats = TableStats.of(info)
        numbers = (stats.items, stats.max_size, stats.inserts, stats.samples)
        rows.append(_row("td", (name, *(f"{number:,}" for number in numbers), info.sampler, info.remover)))
    return f"<table><caption>{html.escape(address)}</caption>{''.join(rows)}</table>"


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
