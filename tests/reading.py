"""Read back what a server holds: tables whose items come out once each, in the order in which they went in."""

from __future__ import annotations

from typing import Any

import reverb_writer as rw


def fifo(name: str, max_size: int = 1_000_000, **options: Any) -> rw.TableConfig:
    """Describe a table that gives each item once, oldest first, and never makes a writer wait."""
    return rw.TableConfig(name, max_size, "fifo", "fifo", max_times_sampled=1, **options)


def read(client: rw.Client, table: str) -> list[rw.Sample]:
    """Take out all items of a table, oldest first."""
    size = client.server_info()[table].current_size
    return list(client.sample(table, size)) if size else []


def read_column(client: rw.Client, table: str, column: int = 0) -> list[list[Any]]:
    """Take out all items of a table, oldest first, and return one column of each as a list."""
    return [sample.data[column].tolist() for sample in read(client, table)]
