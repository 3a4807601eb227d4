"""The `reverb-writer` command: a group whose commands are modules, which load when they are called."""

from __future__ import annotations

import importlib

import click

from reverb_writer import __version__
from reverb_writer.cli.groups import Group

__all__ = ["commands", "main"]

_MODULE_OF = {
    "demo": "demo",
    "export": "transfer:export_command",
    "import": "transfer:import_command",
    "local": "serve_locally",
    "ray": "ray_commands",
    "reset": "reset",
    "status": "status",
    "tables": "program_tables",
}


def main() -> None:
    """Run the command line."""
    commands()


class _Commands(Group):
    """Commands by name, from modules that load when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return sorted(_MODULE_OF)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # as above
        module, _, name = _MODULE_OF.get(cmd_name, "").partition(":")
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name or "command") if module else None
        return found if isinstance(found, click.Command) else None


commands = click.version_option(__version__, prog_name="reverb-writer")(
    _Commands("reverb-writer", help="Inspect Reverb replay servers, and import and export their data.")
)
