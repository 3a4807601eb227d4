"""A group of commands whose list shows the first sentence of each whole."""

from __future__ import annotations

import click

_WHOLE = 1000  # characters: click cuts longer lines


class Group(click.Group):
    """A group that wraps the line of a command where click cuts it."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(_WHOLE)) for name, one in found if one is not None])
