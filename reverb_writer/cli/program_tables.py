"""`reverb-writer tables`: the tables of a Python program as TOML, for `reverb-writer-server`."""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from reverb_writer.cli.server_options import report_errors
from reverb_writer.local import LocalServer
from reverb_writer.tables import TableConfig, check_tables
from reverb_writer.tables.table_dicts import tables_to_toml

_REAL_SERVER = "ReplayServer"


@click.command("tables", context_settings={"ignore_unknown_options": True})
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(file: Path, arguments: tuple[str, ...]) -> None:
    """Print the tables of the Python program FILE as TOML, for reverb-writer-server.

    FILE runs, with ARGUMENTS, until it makes its first LocalServer or ReplayServer, whose tables are printed. If it
    makes none, its global variables are searched for tables, and for lists or dicts of tables.
    """
    with report_errors():
        tables = tables_of(file, arguments)
        if not tables:
            raise click.ClickException(
                f"{file}: no tables found. The program must make a LocalServer or a ReplayServer, or have a list of "
                "TableConfig in a global variable."
            )
        click.echo(tables_to_toml(tables), nl=False)


class _ServerMade(BaseException):  # no error: it ends the program
    """The program has made a server of these tables."""

    def __init__(self, tables: Iterable[TableConfig]) -> None:
        super().__init__()
        self.tables = list(tables)


def tables_of(file: Path, arguments: Sequence[str]) -> list[TableConfig]:
    """Run a program until it makes a server, and return its tables; [] if it has none."""
    classes: list[Any] = [LocalServer]
    if _REAL_SERVER in file.read_text(encoding="utf-8") and importlib.util.find_spec("reverb_writer_server"):
        classes.append(importlib.import_module("reverb_writer_server").ReplayServer)  # takes seconds to load

    def stop(_: Any, tables: Sequence[TableConfig], *__: Any, **___: Any) -> NoReturn:
        check_tables(tables)
        raise _ServerMade(tables)

    before = [(one, one.__init__) for one in classes], sys.argv, sys.path
    sys.argv, sys.path = [str(file), *arguments], [str(file.resolve().parent), *sys.path]
    for one in classes:
        one.__init__ = stop
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for the tables
            variables = runpy.run_path(str(file), run_name="__main__")
    except _ServerMade as made:
        return made.tables
    finally:
        constructors, sys.argv, sys.path = before
        for one, constructor in constructors:
            one.__init__ = constructor
    found = {table.name: table for value in variables.values() for table in _tables_in(value)}
    return list(found.values())


def _tables_in(value: Any) -> list[TableConfig]:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    return [part for part in parts if isinstance(part, TableConfig)]
