"""The life of a server: start, restore, serve, drain, write a last checkpoint, stop.

    starting -> restoring -> serving -> draining -> stopped
                                │ first SIGTERM or SIGINT    │ second one: stopped at once

Exit codes: 0 stopped as asked; 1 cannot start as configured; 3 cannot restore; 4 the Reverb process has died; 5 the
last checkpoint failed; 128 + signal: stopped at once by a second signal. (2 is wrong usage of the command line.)
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import reverb_writer as rw
from reverb_writer_server import signals
from reverb_writer_server.checkpoints.contents import Checkpoint
from reverb_writer_server.checkpoints.folder import CheckpointFolder
from reverb_writer_server.checks import RestoreError, check_memory, what_to_restore
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.limits import raise_descriptor_limit
from reverb_writer_server.observability import banner
from reverb_writer_server.observability.describe import format_bytes
from reverb_writer_server.observability.disk import DiskFacts, DiskWatch
from reverb_writer_server.observability.http import StatusServer
from reverb_writer_server.observability.memory import estimate
from reverb_writer_server.observability.monitor import Monitor
from reverb_writer_server.observability.state import CheckpointStatus, ServiceState
from reverb_writer_server.reverb.child import StartRequest
from reverb_writer_server.reverb.draining import connections_to
from reverb_writer_server.reverb.refusal import MemoryLimit
from reverb_writer_server.reverb.supervisor import ReverbProcess, ReverbProcessError

__all__ = [
    "CANNOT_RESTORE",
    "CANNOT_START",
    "DIED",
    "LAST_CHECKPOINT_FAILED",
    "STOPPED",
    "Service",
    "wait_for_checkpoint",
]

STOPPED, CANNOT_START, CANNOT_RESTORE, DIED, LAST_CHECKPOINT_FAILED = 0, 1, 3, 4, 5

_logger = logging.getLogger(__name__)
_TICK_S = 1.0
_PAUSE_S = 0.1
_CHECKPOINT_TIMEOUT_S = 3600.0
_STOP_TIMEOUT_S = 10.0
_PROGRESS_EVERY_S = 5.0


class _StopNowError(Exception):
    """A signal that ends the service before it serves."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Service:
    """One server from start to end; `run` it once, in the main thread."""

    def __init__(self, config: ServerConfig, ready: Callable[[str], None]) -> None:
        """Prepare; nothing is started yet.

        Args:
            config: what to serve.
            ready: called when clients can connect, with a line that names the address.
        """
        self._config = config
        self._ready = ready
        self._state = ServiceState()
        self._folder: CheckpointFolder | None = None
        self._saving: threading.Thread | None = None
        self._keeping = threading.Lock()
        self._port = 0
        self._memory_limit: MemoryLimit | None = None

    def run(self) -> int:
        """Serve until a signal is received; return the exit code.

        Raises:
            ReverbWriterError, OSError: the service cannot start as configured.
        """
        with contextlib.ExitStack() as resources:
            try:
                process = self._start(resources)
            except RestoreError as error:
                _logger.error("%s", error)  # noqa: TRY400  # the message says what to do; a traceback would hide it
                return CANNOT_RESTORE
            except _StopNowError as stop:
                return 128 + stop.number
            return self._serve(process)

    # Start.

    def _start(self, resources: contextlib.ExitStack) -> ReverbProcess:
        config, state = self._config, self._state
        _logger.info("%s", banner.versions_line())
        _logger.info("%d file descriptors: each connection needs one", raise_descriptor_limit())
        for line in banner.table_lines(config.tables):
            _logger.info("%s", line)
        lines, excess = banner.memory_lines(config)
        for line in lines:
            _logger.log(logging.WARNING if excess else logging.INFO, "%s", line)
        check_memory(config)
        state.estimates = {table.config.name: estimate(table).total_bytes for table in config.tables}
        state.max_silence_s = config.http_max_silence_s
        if config.http_port:
            status_server = StatusServer(config.http_host, config.http_port, state)
            resources.callback(status_server.close)
            if config.http_address_file is not None:
                resources.enter_context(status_server.address_in(config.http_address_file))
            everywhere = "" if status_server.host == config.http_host else ", and at this machine's other addresses"
            address = f"http://{status_server.address}/"
            _logger.info("status page, /metrics, /livez and /readyz at %s%s", address, everywhere)
        restore, tables = self._open_checkpoint_folder(resources)
        watch = DiskWatch(config.checkpoints.directory, config.gateway_certificate, self._keep_disk_facts)
        resources.callback(watch.close)
        process = ReverbProcess()
        resources.callback(process.kill)
        state.reverb_pid = process.pid
        started = time.monotonic()
        convert = restore is not None and config.checkpoints.on_mismatch == "config"
        request = StartRequest(
            tables,
            config.port or None,
            self._folder.incoming if self._folder else None,
            restore.path if restore else None,
            convert,
            config.memory_max_total_bytes,
        )
        try:
            self._port, left_out = process.start(request, self._progress(restore))
        except RuntimeError as error:
            raise RestoreError(f"{error}. Restore another checkpoint, or `none`.") from error
        for name, count in left_out.items():
            _logger.warning(
                "table `%s`: %d items of the checkpoint do not fit the configuration and are left out", name, count
            )
        state.monitor = Monitor(f"localhost:{self._port}", [table.name for table in tables])
        resources.callback(state.monitor.close)
        if config.memory_max_total_bytes:
            self._memory_limit = MemoryLimit(self._port, process.pid, config.memory_max_total_bytes, state.refuse)
            resources.callback(self._memory_limit.close)
        if restore is not None:
            held = ", ".join(f"{name} {info.current_size:,}" for name, info in state.monitor.latest().tables.items())
            seconds = time.monotonic() - started
            _logger.info("restored checkpoint %s in %.1f s; items: %s", restore.name, seconds, held)
        return process

    def _open_checkpoint_folder(
        self, resources: contextlib.ExitStack
    ) -> tuple[Checkpoint | None, tuple[rw.TableConfig, ...]]:
        """Return what to restore, and the tables to serve."""
        wanted, state = self._config.checkpoints, self._state
        if wanted.directory is None:
            _logger.warning("checkpoints.directory is not set: the data are lost when this process ends")
            return what_to_restore(self._config)
        self._folder = resources.enter_context(CheckpointFolder(wanted.directory, wanted.keep))
        state.keeps_checkpoints = True
        state.checkpoint_every_s = wanted.every_s
        state.starts = self._folder.starts
        self._update_checkpoint_status()
        chosen, tables = what_to_restore(self._config)
        if chosen is None:
            _logger.info("nothing to restore in %s", wanted.directory)
        return chosen, tables

    def _progress(self, restore: Checkpoint | None) -> Callable[[int], None]:
        """Return the callback of the start: it logs the progress of a restore and ends the wait after a signal."""
        self._state.phase = "starting" if restore is None else "restoring"
        total = (
            sum((restore.path / name).stat().st_size for name in ("items.tfrecord", "chunks.tfrecord"))
            if restore
            else 0
        )
        logged = started = time.monotonic()

        def waiting(bytes_read: int) -> None:
            nonlocal logged
            self._state.loop_runs()
            received = signals.next_signal(0)
            if received is not None:
                raise _StopNowError(received)  # nothing is served yet, so nothing is lost
            if restore is None:
                return
            now = time.monotonic()
            share = min(1.0, bytes_read / total)
            left = f", {(now - started) * (1 - share) / share:.0f} s left" if 0 < share < 1 else ""
            self._state.detail = f"{share:.0%} of {format_bytes(total)} read{left}"
            if now - logged >= _PROGRESS_EVERY_S:
                logged = now
                _logger.info("restoring %s: %s", restore.name, self._state.detail)

        return waiting

    # Serve.

    def _serve(self, process: ReverbProcess) -> int:
        config, state = self._config, self._state
        state.phase, state.detail = "serving", ""
        state.address = f"localhost:{self._port}"
        assert state.monitor is not None  # noqa: S101  # made by _start
        self._ready(f"ready at {state.address}, tables: {', '.join(state.monitor.latest().tables)}")
        every = {
            "checkpoint": config.checkpoints.every_s if self._folder else 0.0,
            "figures": config.log_figures_every_s,
        }
        due = {what: time.monotonic() + seconds for what, seconds in every.items() if seconds}
        while True:
            state.loop_runs()
            received = signals.next_signal(_TICK_S)
            if received is not None:
                _logger.info("%s: taking no more work; a second signal stops at once", received.name)
                return self._end(process)
            if not process.alive():
                _logger.error("%s", process.describe_end())
                return DIED
            self._keep_finished()
            now = time.monotonic()
            for what in [what for what, at in due.items() if now >= at]:
                due[what] = now + every[what]
                if what == "figures":
                    _logger.info("%s", banner.figures_line(state, every[what]))
                elif self._saving is None or not self._saving.is_alive():
                    self._saving = threading.Thread(target=self._save, name="checkpoint", daemon=True)
                    self._saving.start()

    # Stop.

    def _end(self, process: ReverbProcess) -> int:
        self._state.phase = "draining"
        outcome: list[int] = []
        finishing = threading.Thread(target=lambda: outcome.append(self._finish(process)), name="end", daemon=True)
        finishing.start()
        while finishing.is_alive():
            self._state.loop_runs()
            second = signals.next_signal(_PAUSE_S)
            if second is not None:
                _logger.warning("%s again: stopped at once", second.name)
                process.kill()
                return 128 + second
        _logger.info("stopped")
        return outcome[0] if outcome else DIED

    def _finish(self, process: ReverbProcess) -> int:
        """Take no more work, write a last checkpoint and stop; return the exit code."""
        assert self._state.monitor is not None  # noqa: S101  # the server runs
        if self._memory_limit is not None:
            self._memory_limit.close()
        try:
            ended = process.drain(connections_to(self._port))
        except ReverbProcessError as error:
            _logger.error("%s", error)  # noqa: TRY400  # as above
            return DIED
        _logger.info("%d connections ended", ended)
        saved = True
        if self._folder is not None and self._config.checkpoints.on_exit:
            # A checkpoint under way may lack the newest items.
            saved = wait_for_checkpoint(self._saving, _CHECKPOINT_TIMEOUT_S) and self._save()
        self._state.phase = "stopped"
        self._state.monitor.close()
        process.stop(_STOP_TIMEOUT_S)
        return STOPPED if saved else LAST_CHECKPOINT_FAILED

    # Checkpoints.

    def _save(self) -> bool:
        """Make Reverb write a checkpoint, and keep it; return whether both succeeded."""
        assert self._state.monitor is not None  # noqa: S101  # the server runs
        started = time.monotonic()
        try:
            path = Path(self._state.monitor.client.checkpoint(_CHECKPOINT_TIMEOUT_S))
        except rw.ReverbWriterError as error:
            self._state.checkpoints = replace(self._state.checkpoints, failures=self._state.checkpoints.failures + 1)
            _logger.error("checkpoint failed: %s", error)  # noqa: TRY400  # as above
            return False
        took = time.monotonic() - started
        _logger.debug("Reverb wrote %s", path)
        self._state.checkpoints = replace(self._state.checkpoints, took_s=took)
        return self._keep_finished()

    def _keep_finished(self) -> bool:
        """Keep the checkpoints that Reverb has finished, for us or a client; return False if that failed."""
        if self._folder is None:
            return True
        with self._keeping:
            try:
                new = self._folder.keep_finished()
            except OSError as error:
                self._state.checkpoints = replace(
                    self._state.checkpoints, failures=self._state.checkpoints.failures + 1
                )
                _logger.error("a checkpoint cannot be kept: %s", error)  # noqa: TRY400  # as above
                return False
            for one in new:
                _logger.info("checkpoint %s, %s", one.name, format_bytes(one.size_bytes))
            if new:
                self._update_checkpoint_status()
        return True

    def _keep_disk_facts(self, facts: DiskFacts) -> None:
        self._state.disk = facts
        if self._folder is not None:
            with self._keeping:
                self._update_checkpoint_status()

    def _update_checkpoint_status(self) -> None:
        assert self._folder is not None  # noqa: S101  # asked with a folder only
        latest = self._folder.latest()
        self._state.checkpoints = CheckpointStatus(
            latest,
            latest.size_bytes if latest else 0,
            self._folder.count(),
            self._state.checkpoints.took_s,
            self._state.checkpoints.failures,
        )


def wait_for_checkpoint(checkpoint: threading.Thread | None, within_s: float) -> bool:
    """Wait at most `within_s` seconds for a checkpoint that is under way; return whether it has ended."""
    if checkpoint is None or not checkpoint.is_alive():
        return True
    _logger.info(
        "a checkpoint is under way: the last one is written when it ends, or not at all if that takes more than %g s",
        within_s,
    )
    checkpoint.join(within_s)
    ended = not checkpoint.is_alive()
    if not ended:
        _logger.error(
            "the checkpoint under way has not ended within %g s: no last one is written, the newest complete one "
            "remains. Check the disk.",
            within_s,
        )
    return ended
