"""The `reverb-writer` command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    from reverb_writer.cli.commands import commands  # noqa: PLC0415  # `reverb_writer` is imported without click

    commands()
