"""The other end of a `Worker`: fetches and decodes in a process of its own until nobody is left who reads.

    take ------------> the next batch or error, as soon as there is one
    rest, stats, why-> answer
    end -------------> answer, and the process ends      (see `Worker`)

One batch or error at a time is at the other end and not taken; `Prefetch` holds those after it.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer.reading.prefetch import Fetched, Prefetch
from reverb_writer.reading.shared_memory import SharedArrays

__all__ = ["main"]


class _Worker:
    def __init__(self, connection: Connection) -> None:
        """Fetch what the first message says: a client of one server, its tables, and a plan."""
        client, info, plan = connection.recv()
        self._connection = connection
        self._shared = SharedArrays(connection)
        self._may_send = True
        self._has_told = False
        self._num_sent = 0  # samples
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        (shard,) = client.shards
        self._prefetch = Prefetch(shard.channel, info, plan, wake=self._wake_up, empty=self._shared.empty)

    def run(self) -> bool:
        """Send batches and answer commands until one is to end, or nothing will come; return whether it is told why."""
        while True:
            if self._may_send and self._send_next():
                return self._has_told
            if self._woken in wait([self._connection, self._woken]):
                os.read(self._woken, 1 << 12)
            while self._connection.poll():
                command = self._connection.recv()
                if command == "take":
                    self._may_send = True
                elif command == "rest":
                    if self._may_send:
                        self._send_what_there_is(partial=True)
                    self._answer(None)
                elif command == "why":
                    self._answer(self._prefetch.why_waiting())
                else:
                    stats = self._prefetch.stats()
                    stats.ready_samples += self._num_sent  # the other end knows how many of them were taken
                    self._answer(stats)
                    if command == "end":
                        return True

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it will wake anyway
            os.write(self._wake, b"\0")

    def _answer(self, answer: Any) -> None:
        self._connection.send(("answer", answer, self._prefetch.gone_since))

    def _send_next(self) -> bool:
        """Send what is ready, if anything is; return whether nothing will come any more."""
        has_ended = self._prefetch.has_ended  # asked first: nothing comes after it
        self._send_what_there_is()
        return has_ended and self._may_send

    def _send_what_there_is(self, *, partial: bool = False) -> None:
        try:
            fetched = self._prefetch.take(partial=partial)
        except ReverbWriterError as error:
            self._may_send, self._has_told = False, True
            self._connection.send(("error", error))
        else:
            if fetched is not None:
                self._may_send = False
                self._send(fetched)

    def _send(self, fetched: Fetched) -> None:
        columns: list[tuple[Any, Any, bool]] = []
        for column in fetched.columns:
            place = None if isinstance(column.rows, list) else self._shared.place(column.rows)
            columns.append((column.rows if place is None else place, column.lengths, column.squeezed))
        self._num_sent += len(fetched.infos.keys)
        self._connection.send(("batch", columns, fetched.infos, fetched.oldest_at))


def main(descriptor: int) -> None:
    """Work for the process at the other end of a connection; exit code 0 if that one was told why it ends."""
    status = 0
    try:
        with Connection(descriptor) as connection:
            try:
                worker = _Worker(connection)
            except ReverbWriterError as error:
                connection.send(("error", error))
            else:
                status = 0 if worker.run() else 1  # the log says why
    except (EOFError, ConnectionError):  # the learner is gone
        pass
    except BaseException:  # noqa: BLE001  # which nobody would print
        traceback.print_exc()
        status = 1
    finally:
        os._exit(status)  # gRPC's threads would be waited for
