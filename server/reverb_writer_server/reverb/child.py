"""The Reverb process: starts and drains a dm-reverb server on requests of the service.

Reverb holds the GIL while it restores, and its C++ code may end the process. So it has its own process, and health
checks, metrics and log keep working. The process ends when the service closes the connection, and at once if the
service is killed: otherwise a server that restores for minutes would hold the port of the next server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import TableConfig
from reverb_writer_server.reverb.sockets import Drain
from reverb_writer_server.signals import end_with


@dataclass(frozen=True)
class StartRequest:
    """The request to start a server."""

    tables: tuple[TableConfig, ...]  # at least one
    port: int | None  # None for a free one
    checkpoints: Path | None  # the folder that Reverb writes to; None for a temporary one
    restore: Path | None  # a complete checkpoint; None to begin empty
    bind: str  # the `bind` of `ReplayServer`


def main(connection: Connection) -> None:
    """Start a server, then drain it at each request; stop it when the connection is closed."""
    faulthandler.enable()
    from reverb_writer_server.reverb.replay_server import ReplayServer  # noqa: PLC0415  # takes seconds to load

    with contextlib.suppress(EOFError), contextlib.ExitStack() as servers:
        connection.send((None, None))
        request: StartRequest = connection.recv()
        try:
            server = ReplayServer(
                request.tables,
                request.port,
                checkpoints=request.checkpoints,
                restore=request.restore,
                bind=request.bind,
            )
        except (ReverbWriterError, OSError, ValueError, RuntimeError) as error:
            connection.send((error, None))
            return
        servers.enter_context(server)
        drain = Drain(server.port)
        connection.send((None, server.port))
        while True:
            connection.send((None, drain.end_connections(connection.recv())))


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    main(Connection(int(sys.argv[1])))
