"""The Reverb process: starts, drains and stops a dm-reverb server on requests of the service.

Reverb holds the GIL while it restores, and its C++ code may end the process. So it has its own process, and health
checks, metrics and log keep working. The process ends when the service closes the connection, and at once if the
service is killed: otherwise a server that restores for minutes would hold the port of the next server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import shutil
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer.files.saved_replay import SavedReplay
from reverb_writer.tables import TableConfig
from reverb_writer_server.checkpoints.convert import Target, convert
from reverb_writer_server.reverb.sockets import Drain
from reverb_writer_server.signals import end_with


@dataclass(frozen=True)
class StartRequest:
    """The request to start a server."""

    tables: tuple[TableConfig, ...]  # at least one
    port: int | None  # None for a free one
    checkpoints: Path | None  # the folder that Reverb writes to; None for a temporary one
    restore: Path | None  # a complete checkpoint; None to begin empty
    fitted: Path | None  # place of a copy with the rules of `tables`, which is restored instead
    bind: str  # the `bind` of `ReplayServer`


def main(connection: Connection) -> None:
    """Handle requests until the connection is closed."""
    faulthandler.enable()
    from reverb_writer_server.reverb.replay_server import ReplayServer  # noqa: PLC0415  # takes seconds to load

    with contextlib.suppress(EOFError), contextlib.ExitStack() as servers:
        connection.send((None, None))
        request: StartRequest = connection.recv()
        try:
            server, left_out = _start(ReplayServer, request)
        except (ReverbWriterError, OSError, ValueError, RuntimeError) as error:
            connection.send((error, None))
            return
        servers.enter_context(server)
        drain = Drain(server.port)
        connection.send((None, (server.port, left_out)))
        while True:
            verb, keep = connection.recv()
            if verb == "stop":
                return
            connection.send((None, drain.end_connections(keep)))


def _start(server: Any, request: StartRequest) -> tuple[Any, dict[str, int]]:
    """Return the running server, and the number of items of each table that were left out of its checkpoint."""
    serve = functools.partial(server, request.tables, request.port, checkpoints=request.checkpoints, bind=request.bind)
    if request.fitted is None or request.restore is None:
        return serve(restore=request.restore), {}
    shutil.rmtree(request.fitted, ignore_errors=True)
    try:
        target = Target(request.fitted, {table.name: table for table in request.tables})
        left_out = convert([SavedReplay(request.restore)], [target])
        return serve(restore=request.fitted), left_out
    finally:
        shutil.rmtree(request.fitted, ignore_errors=True)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    main(Connection(int(sys.argv[1])))
