"""The common part of all datasets of a replay table: their arguments, and how another process opens an equal one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from reverb_writer.errors import SpecError
from reverb_writer.reading.batch_maker import BatchMaker
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.table_reader import TableReader
from reverb_writer.reading.table_source import ServerTable, TableSource
from reverb_writer.reading.views import View
from reverb_writer.replay.client import Client, as_client
from reverb_writer.shards.table_source import ShardedTable
from reverb_writer.shards.targets import source_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Dataset(View):
    """An endless iterator over batches. One thread at a time may iterate; all other methods are thread-safe.

    Attributes:
        table: the table's name.
        timeout_s: time-out of a batch, in seconds.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep the arguments: unpickling opens another dataset with them."""
        dataset = super().__new__(cls)
        dataset._arguments = args, kwargs
        return dataset

    def _open(self, replay: Any, table: str, pool_size: int, options: ReadOptions, maker: BatchMaker) -> None:
        """Connect to the servers. The `maker` makes batches of `pool_size` samples together."""
        if not isinstance(table, str):
            raise SpecError(
                f"`table` must be the name of one table, got {table!r}. For several tables, make a dataset "
                "per table and a MixedDataset."
            )
        self.table = table
        self._opening = _opening(type(self), *self._arguments, replay)
        client, is_new = as_client(replay, options.timeout_s)
        source = _source(client, table, pool_size, options)
        release = client.close if is_new else _keep
        super().__init__(TableReader(source, table, pool_size, options, maker, self._opening, release))

    @property
    def timeout_s(self) -> float:
        """Time-out of a batch, in seconds."""
        timeout_s: float = self.reader.timeout_s
        return timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.reader.timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open an equal dataset in another process; fetched samples stay in this process."""
        return self._opening, ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.reader}>"


def _source(client: Client, table: str, batch_size: int, options: ReadOptions) -> TableSource:
    """Return where a reader finds the table: on the only server there is and will be, or on several."""
    connections = client.connections
    if connections.may_have_several:
        return ShardedTable(connections, table, batch_size, options, client.timeout_s)
    return ServerTable(connections.shards[0].server, table, batch_size, options, client.timeout_s)


def _keep() -> None:
    """Leave a client open that the caller has made."""


def _opening(
    kind: type[Dataset], args: tuple[Any, ...], kwargs: dict[str, Any], replay: Any
) -> functools.partial[Dataset]:
    """Return a picklable function that opens an equal dataset; `replay` may be a server, which is not picklable."""

    def portable(argument: Any) -> Any:
        return source_of(argument) if argument is replay and not isinstance(argument, Client | str) else argument

    return functools.partial(kind, *map(portable, args), **{name: portable(value) for name, value in kwargs.items()})
