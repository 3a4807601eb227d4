"""Checks that `serve` and `validate` make before anything is started. Nothing is written.

Only `serve` checks whether ports are free, and whether another server uses the checkpoints.
"""

from __future__ import annotations

import logging

import reverb_writer as rw
from reverb_writer_server.checkpoints.contents import Checkpoint, TableState, differences, tables_of
from reverb_writer_server.checkpoints.folder import check_directory, select_checkpoint
from reverb_writer_server.checkpoints.owner import CheckpointError
from reverb_writer_server.config.schema import ServerConfig

_logger = logging.getLogger(__name__)


class RestoreError(rw.errors.ReverbWriterError):
    """The checkpoint and the configuration differ, or the checkpoint cannot be read."""


def what_to_restore(config: ServerConfig) -> Checkpoint | None:
    """Return the checkpoint that a start would restore; None if it would begin empty. The items are not read.

    Raises:
        CheckpointError: the folder cannot hold checkpoints.
        RestoreError: the chosen checkpoint cannot be used, or differs from the configuration.
    """
    wanted = config.checkpoints
    if wanted.directory is None:
        return None
    check_directory(wanted.directory)
    try:
        chosen = select_checkpoint(wanted.directory, wanted.restore)
        tables_to_serve(config, chosen)  # refuses a checkpoint of other tables
    except (CheckpointError, rw.errors.FormatError) as error:
        raise RestoreError(str(error)) from error
    return chosen


def tables_to_serve(config: ServerConfig, checkpoint: Checkpoint | None) -> tuple[rw.TableConfig, ...]:
    """Return the tables to serve if that checkpoint is restored.

    Raises:
        RestoreError: the checkpoint differs from the configuration, and that is refused.
        FormatError: the checkpoint is damaged.
    """
    tables = tuple(table.config for table in config.tables)
    if checkpoint is None:
        return tables
    return _reconcile_tables(config.checkpoints.on_mismatch, checkpoint, tables_of(checkpoint), tables)


def _reconcile_tables(
    whose: str, chosen: Checkpoint, saved: tuple[TableState, ...], tables: tuple[rw.TableConfig, ...]
) -> tuple[rw.TableConfig, ...]:
    """Return the tables to serve, according to `on_mismatch`."""
    found = differences(tables, saved)
    if not found:
        return tables
    lines = "\n  ".join(found)
    if whose == "refuse":
        raise RestoreError(
            f"checkpoint {chosen.name} and the configuration differ:\n  {lines}\n"
            f"Set checkpoints.on_mismatch to `checkpoint` or `config` to say whose tables are served, or "
            f"checkpoints.restore to `none`."
        )
    _logger.warning(
        "checkpoint %s and the configuration differ; the tables of the %s are served:\n  %s", chosen.name, whose, lines
    )
    if whose == "config":
        return tables
    unknown = {state.name for state in saved} - {table.name for table in tables}
    # Reverb takes the rules from the checkpoint, but needs the name of each table.
    return (*tables, *(rw.TableConfig(name) for name in sorted(unknown)))
