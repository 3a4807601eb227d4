"""`python -m reverb_writer_server`: the command `reverb-writer-server`; without a command it serves."""

from __future__ import annotations

import sys

from reverb_writer_server.cli import main

if __name__ == "__main__":
    main(sys.argv[1:])
