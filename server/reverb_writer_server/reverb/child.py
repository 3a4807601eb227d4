"""The process that has dm-reverb in it: starts a server, drains it, stops it, as the service at the other end says.

Reverb keeps Python's lock while it restores, and its C++ code may end its process. So it has a process of its own, and
health, metrics and log go on beside it. It ends when the other end of its line closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import shutil
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import TableConfig
from reverb_writer_server.reverb.draining import shut

__all__ = ["Start"]


@dataclass(frozen=True)
class Start:
    """What to serve.

    Attributes:
        tables: at least one.
        port: 1 to 65535, or None for a free one.
        checkpoints: where Reverb is to write; None for a temporary folder.
        restore: a complete checkpoint to begin with; None to begin empty.
        fit: whether the checkpoint is to be fitted to the tables first.
    """

    tables: tuple[TableConfig, ...]
    port: int | None
    checkpoints: Path | None
    restore: Path | None
    fit: bool


def main(line: Connection) -> None:
    """Carry out requests until the line closes."""
    faulthandler.enable()
    from reverb_writer_server.reverb.replay_server import ReplayServer  # noqa: PLC0415  # seconds, with a crash reported

    with contextlib.suppress(EOFError), contextlib.ExitStack() as servers:
        line.send((None, None))
        try:
            server, left_out = _start(ReplayServer, line.recv())
        except (ReverbWriterError, OSError, ValueError, RuntimeError) as error:
            line.send((error, None))
            return
        servers.enter_context(server)
        line.send((None, (server.port, left_out)))
        while True:
            verb, keep = line.recv()
            if verb == "stop":
                return
            line.send((None, shut(server.port, keep)))


def _start(server: Any, start: Start) -> tuple[Any, dict[str, int]]:
    """Return the running server, and how many items of each table were left out."""
    if not start.fit or start.restore is None or start.checkpoints is None:
        return server(start.tables, start.port, checkpoints=start.checkpoints, restore=start.restore), {}
    from reverb_writer_server.checkpoints.convert import fit  # noqa: PLC0415  # a rare need

    fitted = start.checkpoints / ".fitted"
    try:
        left_out = fit(start.restore, fitted, start.tables)
        return server(start.tables, start.port, checkpoints=start.checkpoints, restore=fitted), left_out
    finally:
        shutil.rmtree(fitted, ignore_errors=True)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
