"""One start of Reverb, with the newest sound checkpoint or empty."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import reverb_writer as rw
from reverb_writer_server.checkpoints.contents import Checkpoint, differences
from reverb_writer_server.checkpoints.folder import CheckpointFolder, check_directory, restorable, select_checkpoint
from reverb_writer_server.checkpoints.owner import CheckpointError, UnrestorableError
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.banner import format_bytes
from reverb_writer_server.observability.monitor import Monitor
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.child import StartRequest
from reverb_writer_server.reverb.supervisor import ReverbProcess, ReverbProcessError

_logger = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 5.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class RestoreError(rw.errors.ReverbWriterError):
    """The checkpoint and the configuration differ, or the checkpoint cannot be read."""


@dataclass(frozen=True)
class Started:
    """A Reverb that serves."""

    process: ReverbProcess
    port: int
    tables: tuple[rw.TableConfig, ...]
    restored: Checkpoint | None  # None if it started empty
    seconds: float  # duration of the start

    def log(self, monitor: Monitor) -> None:
        """Log the restored checkpoint and its items."""
        if self.restored is not None:
            held = ", ".join(f"{name} {info.current_size:,}" for name, info in monitor.latest().tables.items())
            _logger.info("restored checkpoint %s in %.1f s; items: %s", self.restored.name, self.seconds, held)


def start(
    config: ServerConfig,
    folder: CheckpointFolder | None,
    state: ServiceState,
    new_process: Callable[[], ReverbProcess],
    undo: contextlib.ExitStack,
) -> Started:
    """Start Reverb, and try one checkpoint after the other until it serves; `undo` ends its process.

    Raises:
        RestoreError: no checkpoint can be restored, or the chosen checkpoint differs from the configuration.
        ReverbProcessError: the process has ended.
        ReverbWriterError, OSError: Reverb cannot start as configured.
    """
    found = []
    if folder is not None:
        try:
            found = restorable(folder.directory, config.checkpoints_restore)
        except CheckpointError as error:
            raise RestoreError(str(error)) from error
        if not found:
            _logger.info("nothing to restore in %s", folder.directory)
    faults: list[str] = []
    for number, checkpoint in enumerate(found):
        state.phase, state.detail = "restoring", f"{checkpoint.name} is read"
        try:
            checkpoint.check()
            return _start_with(config, folder, state, new_process, undo, checkpoint)
        except (UnrestorableError, rw.errors.FormatError) as error:
            faults.append(f"checkpoint {checkpoint.name} cannot be restored: {error}")
            state.damaged = (*state.damaged, checkpoint.name)
            assert folder is not None  # noqa: S101  # the checkpoint is in it
            folder.damaged.add(checkpoint.name)
            if config.checkpoints_restore != "latest":
                raise RestoreError(f"{faults[-1]}. Choose another one, or `none`.") from error
            if older := found[number + 1 :]:
                _logger.error(  # noqa: TRY400  # a traceback would hide the message
                    "%s. THE NEXT OLDER ONE IS TRIED, %s: newer items are not served. The damaged one stays "
                    "until newer ones replace it.",
                    faults[-1],
                    older[0].name,
                )
    if faults:
        try:
            select_checkpoint(found[0].path.parent.parent, config.checkpoints_restore)
        except CheckpointError as error:  # no checkpoint is complete; `validate` reports the same
            raise RestoreError(str(error)) from error
        more = f" (and {len(faults) - 1} older ones)" if len(faults) > 1 else ""
        remedy = 'Restore its files from a copy, or set checkpoints.restore = "none" to begin empty.'
        raise RestoreError(f"{faults[0]}{more}. {remedy}")
    state.phase = "starting"
    return _start_with(config, folder, state, new_process, undo, None)


def _start_with(
    config: ServerConfig,
    folder: CheckpointFolder | None,
    state: ServiceState,
    new_process: Callable[[], ReverbProcess],
    undo: contextlib.ExitStack,
    restore: Checkpoint | None,
) -> Started:
    """Start Reverb with a checkpoint, or empty."""
    tables = tables_to_serve(config, restore)
    started_at = time.monotonic()
    process = new_process()
    needs_copy = restore is not None and config.checkpoints_on_mismatch == "config"
    request = StartRequest(
        tables,
        config.port or None,
        folder.incoming if folder else None,
        restore.path if restore else None,
        folder.fitted if folder and needs_copy else None,
        config.bind,
    )
    try:
        port, left_out = process.start(request, _progress(state, restore))
    except BaseException as error:
        process.kill()
        is_crash = isinstance(error, ReverbProcessError) and error.number in [-number for number in _CRASHES]
        if restore is not None and is_crash:
            raise UnrestorableError(f"Reverb has crashed over it ({error})") from error
        raise
    undo.callback(process.kill)
    for name, count in left_out.items():
        _logger.warning(
            "table `%s`: %d items of the checkpoint do not fit the configuration and are left out", name, count
        )
    return Started(process, port, tables, restore, time.monotonic() - started_at)


def _progress(state: ServiceState, restore: Checkpoint | None) -> Callable[[int], None]:
    """Return the callback of the start, which reports the progress of a restore."""
    total = (
        sum((restore.path / name).stat().st_size for name in ("items.tfrecord", "chunks.tfrecord")) if restore else 0
    )
    logged = started = time.monotonic()

    def waiting(bytes_read: int) -> None:
        nonlocal logged
        if restore is None:
            return
        now = time.monotonic()
        share = min(1.0, bytes_read / total)
        left = f", {(now - started) * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
        state.detail = f"{share:.0%} of {format_bytes(total)} read{left}"
        if now - logged >= _PROGRESS_EVERY_S:
            logged = now
            _logger.info("restoring %s: %s", restore.name, state.detail)

    return waiting


def what_to_restore(config: ServerConfig) -> Checkpoint | None:
    """Return the checkpoint that a start would restore; None for an empty start. The items are not read.

    Raises:
        CheckpointError: the folder cannot hold checkpoints.
        RestoreError: the chosen checkpoint cannot be used, or differs from the configuration.
    """
    if config.checkpoints_directory is None:
        return None
    check_directory(config.checkpoints_directory)
    try:
        chosen = select_checkpoint(config.checkpoints_directory, config.checkpoints_restore)
        tables_to_serve(config, chosen)  # refuses a checkpoint of other tables
    except (CheckpointError, rw.errors.FormatError) as error:
        raise RestoreError(str(error)) from error
    return chosen


def tables_to_serve(config: ServerConfig, checkpoint: Checkpoint | None) -> tuple[rw.TableConfig, ...]:
    """Return the tables to serve if this checkpoint is restored.

    Raises:
        RestoreError: the checkpoint differs from the configuration, and `on_mismatch` is "refuse".
        FormatError: the checkpoint is damaged.
    """
    tables, whose = tuple(table.config for table in config.tables), config.checkpoints_on_mismatch
    if checkpoint is None:
        return tables
    saved = list(checkpoint.tables())
    found = differences(tables, saved)
    if not found:
        return tables
    differ = f"checkpoint {checkpoint.name} and the configuration differ"
    lines = "\n  ".join(found)
    if whose == "refuse":
        raise RestoreError(
            f"{differ}:\n  {lines}\nSet checkpoints.on_mismatch to `checkpoint` or `config` to choose the served "
            "tables, or checkpoints.restore to `none`."
        )
    _logger.warning("%s; the tables of the %s are served:\n  %s", differ, whose, lines)
    if whose == "config":
        return tables
    unknown = {table.table_name for table in saved} - {table.name for table in tables}
    # Reverb takes the rules from the checkpoint, but needs the name of each table.
    return (*tables, *(rw.TableConfig(name) for name in sorted(unknown)))
