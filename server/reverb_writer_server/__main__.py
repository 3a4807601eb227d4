"""`python -m reverb_writer_server`: a replay server in a process of its own, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import signal
import sys

from reverb_writer.errors import ReverbWriterError
from reverb_writer.tables import MinSize, TableConfig
from reverb_writer_server import ReplayServer


def main() -> None:
    """Serve the tables that the command line asks for."""
    arguments = _parser().parse_args()
    # Blocked and waited for, in this and in Reverb's threads: no handler runs at a moment that it did not expect.
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    try:
        limiter = MinSize(arguments.min_size)
        tables = [TableConfig(name, arguments.max_size, rate_limiter=limiter) for name in arguments.table or ["replay"]]
        server = ReplayServer(tables, arguments.port or None)
    except ReverbWriterError as error:
        sys.exit(f"reverb_writer_server: {error}")
    with server:
        names = ", ".join(table.name for table in tables)
        print(f"reverb_writer_server: ready at {server.address}, tables: {names}", flush=True)
        signal.sigwait(endings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reverb_writer_server",
        description="A Reverb replay server: uniform sampling, oldest item removed first. SIGTERM or SIGINT ends it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for a free one")
    parser.add_argument("--table", action="append", metavar="NAME", help="repeat it for more tables (default: replay)")
    parser.add_argument("--max-size", type=int, default=1_000_000, metavar="N", help="items that a table holds at most")
    parser.add_argument("--min-size", type=int, default=1, metavar="N", help="items needed before any is sampled")
    return parser


if __name__ == "__main__":
    main()
