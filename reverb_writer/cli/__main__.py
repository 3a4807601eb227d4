"""`python -m reverb_writer.cli`."""

from __future__ import annotations

from reverb_writer.cli import main

if __name__ == "__main__":
    main()
