"""The other end of a `Worker`: fetches and decodes in a process of its own until nobody is left who reads.

    command: take, rest, stats, why, close          (see `Worker`)
    answer:  batch, nothing, stats, why, error, memory

One batch at a time is at the other end and not taken; `Prefetch` holds those after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection, wait
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer.reading.prefetch import Fetched, Prefetch
from reverb_writer.reading.shared_memory import SharedArrays

__all__ = ["main"]


class _Worker:
    def __init__(self, connection: Connection) -> None:
        """Fetch what the first message says: a client of one server, and a plan."""
        client, plan = connection.recv()
        self._connection = connection
        self._shared = SharedArrays(connection)
        self._may_send = True
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        (shard,) = client.shards
        info, empty = shard.request_info(), self._shared.empty
        self._prefetch = Prefetch(shard.channel, info, plan, wake=self._wake_up, empty=empty)

    def run(self) -> None:
        """Send batches and answer commands until one is to close."""
        while True:
            if self._may_send:
                self._send_next()
            if self._woken in wait([self._connection, self._woken]):
                os.read(self._woken, 1 << 12)
            while self._connection.poll():
                command = self._connection.recv()
                if command == "take":
                    self._may_send = True
                elif command == "rest":
                    self._send_rest()
                elif command == "stats":
                    self._connection.send(("stats", self._prefetch.stats(), self._prefetch.gone_since))
                elif command == "why":
                    self._connection.send(("why", self._prefetch.why_waiting(), self._prefetch.gone_since))
                else:
                    return

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it will wake anyway
            os.write(self._wake, b"\0")

    def _send_next(self) -> None:
        try:
            has_ended = self._prefetch.has_ended  # asked first: nothing comes after it
            fetched = self._prefetch.take()
            if fetched is not None:
                self._may_send = False
                self._send(fetched)
            elif has_ended:
                raise EOFError
        except ReverbWriterError as error:
            self._connection.send(("error", error))
            self._wake_up()  # there may be more

    def _send_rest(self) -> None:
        try:
            fetched = self._prefetch.take(partial=True)
        except ReverbWriterError as error:
            self._connection.send(("error", error))
            fetched = None
        if fetched is not None:
            self._send(fetched)
        self._connection.send(("nothing",))

    def _send(self, fetched: Fetched) -> None:
        columns: list[tuple[Any, Any, bool]] = []
        for column in fetched.columns:
            place = None if isinstance(column.rows, list) else self._shared.place(column.rows)
            columns.append((column.rows if place is None else place, column.lengths, column.squeezed))
        self._connection.send(("batch", columns, fetched.infos, fetched.oldest_at))


def main(descriptor: int) -> None:
    """Work for the process at the other end of a connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's: it ends the connection
    try:
        with Connection(descriptor) as connection:
            try:
                worker = _Worker(connection)
            except ReverbWriterError as error:
                connection.send(("error", error))
                return
            worker.run()
    except (EOFError, OSError):  # the learner is gone
        pass
    finally:
        os._exit(0)  # gRPC's threads would be waited for
