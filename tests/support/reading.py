"""Read back what a server holds: tables whose items come out once each, in the order in which they went in."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tree

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec

Serve: TypeAlias = Callable[..., rw.Client]
"""Of the fixture `serve`."""


class Place(NamedTuple):
    """A server with tables, and a client of it."""

    address: str
    client: rw.Client

    def column(self, table: str = "a", column: int = 0) -> list[list[Any]]:
        """Take out all items of a table, oldest first, and return one column of each."""
        return read_column(self.client, table, column)


class Pair(NamedTuple):
    """A part of `SIGNATURE`."""

    left: Any
    right: Any


def fifo(name: str, max_size: int = 1_000_000, **options: Any) -> rw.TableConfig:
    """Describe a table that gives each item once, oldest first, and never makes a writer wait."""
    return rw.TableConfig(name, max_size, "fifo", "fifo", max_times_sampled=1, **options)


def spec(shape: tuple[int | None, ...] | None, dtype: npt.DTypeLike) -> ArraySpec:
    """Describe a leaf."""
    return ArraySpec(shape, np.dtype(dtype))


SIGNATURE = {"pair": Pair(spec((None, 2), np.float32), spec((None,), np.object_)), "list": [spec((3,), int)]}
"""Of the table `signed`."""


def read(client: rw.Client, table: str) -> list[rw.Sample]:
    """Take out all items of a table, oldest first, each with its columns as a flat tuple."""
    size = client.server_info()[table].current_size
    samples = client.sample(table, size) if size else ()
    return [rw.Sample.of(tuple(tree.flatten(sample.data)), sample.info, sample.kinds) for sample in samples]


def read_column(client: rw.Client, table: str, column: int = 0) -> list[list[Any]]:
    """Take out all items of a table, oldest first, and return one column of each as a list."""
    return [sample.data[column].tolist() for sample in read(client, table)]


def column_at(address: str, table: str = "replay", column: int = 0) -> list[list[Any]]:
    """Do the same with a client of its own."""
    with rw.Client(address, timeout_s=60) as client:
        return read_column(client, table, column)


def pairs(steps: Iterable[int]) -> list[list[int]]:
    """Return the windows of two steps."""
    return [list(pair) for pair in itertools.pairwise(steps)]
