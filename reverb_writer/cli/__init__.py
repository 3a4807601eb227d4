"""The `reverb-writer` command; `commands` has its group."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; needs the extra `cli`."""
    try:
        import click  # noqa: F401, PLC0415  # an extra; the commands import it
        import rich  # noqa: F401, PLC0415  # likewise
    except ImportError:
        sys.exit("reverb-writer: the commands need click and rich: pip install 'reverb-writer[cli]'")
    from reverb_writer.cli.commands import commands  # noqa: PLC0415  # needs click

    commands()
