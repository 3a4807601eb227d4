"""One start of Reverb, with the newest sound checkpoint or empty."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import reverb_writer as rw
from reverb_writer.files.saved_replay import SavedReplay
from reverb_writer.tables.saves import saves_table
from reverb_writer_server.checkpoints.contents import Checkpoint, differences
from reverb_writer_server.checkpoints.convert import Target, convert
from reverb_writer_server.checkpoints.folder import CheckpointFolder, check_directory, first_restorable
from reverb_writer_server.checkpoints.owner import CheckpointError, UnrestorableError
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.banner import format_bytes
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.child import StartRequest
from reverb_writer_server.reverb.supervisor import ReverbProcess, ReverbProcessError

_logger = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 5.0
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class Started:
    """A Reverb that serves."""

    process: ReverbProcess
    port: int
    tables: tuple[rw.TableConfig, ...]
    restored: Checkpoint | None  # None if it started empty
    seconds: float  # duration of the start


@dataclass(frozen=True)
class Start:
    """A start of Reverb, which tries one checkpoint after the other until it serves."""

    config: ServerConfig
    folder: CheckpointFolder | None
    state: ServiceState
    new_process: Callable[[], ReverbProcess]
    undo: contextlib.ExitStack  # ends the process

    def run(self) -> Started:
        """Start Reverb.

        Raises:
            CheckpointError: no checkpoint can be restored, or the chosen checkpoint differs from the configuration.
            ReverbProcessError: the process has ended.
            ReverbWriterError, OSError: Reverb cannot start as configured.
        """
        if self.folder is not None:
            started = first_restorable(self.folder.directory, self.config.checkpoints_restore, self._restore)
            if started is not None:
                return started
            _logger.info("nothing to restore in %s", self.folder.directory)
        return self._start(None)

    def _restore(self, checkpoint: Checkpoint) -> Started:
        assert self.folder is not None  # noqa: S101  # the checkpoint is in it
        self.state.phase, self.state.detail = "restoring", f"{checkpoint.name} is read"
        try:
            checkpoint.check()
            try:
                return self._start(checkpoint)
            except UnrestorableError:
                mended = self.folder.mended(checkpoint.path)  # saved by an earlier version, or by another server
                if mended is None:
                    raise
                try:
                    return self._start(checkpoint, mended)
                finally:
                    shutil.rmtree(mended, ignore_errors=True)
        except (UnrestorableError, rw.errors.FormatError):
            self.state.damaged = (*self.state.damaged, checkpoint.name)
            self.folder.damaged.add(checkpoint.name)
            raise

    def _start(self, restore: Checkpoint | None, mended: Path | None = None) -> Started:
        """Start Reverb with a checkpoint, whose files may be a `mended` copy of it, or empty."""
        config, folder = self.config, self.folder
        tables = tables_to_serve(config, restore)
        started_at = time.monotonic()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as copy:
            process = self.new_process()
            undo.callback(process.kill)
            path = mended if mended is not None or restore is None else restore.path
            if path is not None and folder is not None and config.checkpoints_on_mismatch == "config":
                source, path = SavedReplay(path), folder.fitted
                copy.callback(shutil.rmtree, path, ignore_errors=True)
                left_out = convert([source], [Target(path, {table.name: table for table in (*tables, saves_table())})])
                for name, count in left_out.items():
                    about = "items of the checkpoint do not fit the configuration and are left out"
                    _logger.warning("table `%s`: %d %s", name, count, about)
            incoming = None if folder is None else folder.incoming
            request = StartRequest(tables, config.port or None, incoming, path, config.bind)
            try:
                port = process.start(request, self._progress(restore))
            except ReverbProcessError as error:
                if restore is not None and error.number in [-number for number in _CRASHES]:
                    raise UnrestorableError(f"Reverb has crashed over it ({error})") from error
                raise
            self.undo.push(undo.pop_all())
        return Started(process, port, tables, restore, time.monotonic() - started_at)

    def _progress(self, restore: Checkpoint | None) -> Callable[[int], None]:
        """Return the callback of the start, which reports the progress of a restore."""
        if restore is None:
            return lambda _: None
        total = sum((restore.path / name).stat().st_size for name in ("items.tfrecord", "chunks.tfrecord"))
        logged = started = time.monotonic()

        def waiting(bytes_read: int) -> None:
            nonlocal logged
            now = time.monotonic()
            share = min(1.0, bytes_read / total)
            left = f", {(now - started) * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
            self.state.detail = f"{share:.0%} of {format_bytes(total)} read{left}"
            if now - logged >= _PROGRESS_EVERY_S:
                logged = now
                _logger.info("restoring %s: %s", restore.name, self.state.detail)

        return waiting


def what_to_restore(config: ServerConfig) -> Checkpoint | None:
    """Return the checkpoint that a start would restore; None for an empty start. The items are not read.

    Raises:
        CheckpointError: the folder cannot hold checkpoints, or the chosen checkpoint cannot be used, or it differs
            from the configuration.
    """
    if config.checkpoints_directory is None:
        return None
    check_directory(config.checkpoints_directory)

    def attempt(checkpoint: Checkpoint) -> Checkpoint:
        if fault := checkpoint.fault():
            raise rw.errors.FormatError(fault)
        tables_to_serve(config, checkpoint)  # refuses a checkpoint of other tables
        return checkpoint

    return first_restorable(config.checkpoints_directory, config.checkpoints_restore, attempt)


def tables_to_serve(config: ServerConfig, checkpoint: Checkpoint | None) -> tuple[rw.TableConfig, ...]:
    """Return the tables to serve if this checkpoint is restored.

    Raises:
        CheckpointError: the checkpoint differs from the configuration, and `on_mismatch` is "refuse".
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
        raise CheckpointError(
            f"{differ}:\n  {lines}\nSet checkpoints.on_mismatch to `checkpoint` or `config` to choose the served "
            "tables, or checkpoints.restore to `none`."
        )
    _logger.warning("%s; the tables of the %s are served:\n  %s", differ, whose, lines)
    if whose == "config":
        return tables
    unknown = {table.table_name for table in saved} - {table.name for table in tables}
    # Reverb takes the rules from the checkpoint, but needs the name of each table.
    return (*tables, *(rw.TableConfig(name) for name in sorted(unknown)))
