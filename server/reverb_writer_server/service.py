"""The life of a server: start, restore, serve, drain, write a last checkpoint, stop.

    starting -> restoring -> serving -> draining -> stopped
        │ same failure three times  │ first signal, or not alive │ second signal: stopped at once
        └-> failed, until a signal

Two threads: the main thread answers signals and touches no disk; the other thread does all other work.

Exit codes: 0 stopped by request, with the last checkpoint on disk; 1 cannot start as configured; 3 cannot restore; 4
the Reverb process has died; 5 the last checkpoint failed; 6 ended itself because it, or a table, was not alive; 128 +
signal: stopped at once by a signal; 7 another server has claimed its checkpoints. (2 is wrong usage of the command
line.)
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509

import reverb_writer as rw
from reverb_writer_server import signals
from reverb_writer_server.checkpoints.folder import CheckpointFolder
from reverb_writer_server.checkpoints.owner import CheckpointError
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.jobs import Jobs
from reverb_writer_server.machine import cpu_s, raise_descriptor_limit, used_bytes
from reverb_writer_server.observability import banner
from reverb_writer_server.observability.banner import format_bytes
from reverb_writer_server.observability.http import StatusServer
from reverb_writer_server.observability.monitor import Monitor
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.observability.systemd import notifying
from reverb_writer_server.reverb.sockets import connections_to
from reverb_writer_server.reverb.supervisor import ReverbProcess, ReverbProcessError
from reverb_writer_server.saving import SaveProgress, Saver
from reverb_writer_server.starting import Start, Started
from reverb_writer_server.turn import ClaimError, Turn

STOPPED, CANNOT_START, CANNOT_RESTORE, DIED, LAST_CHECKPOINT_FAILED, NOT_ALIVE, CLAIMED = 0, 1, 3, 4, 5, 6, 7

_logger = logging.getLogger(__name__)
_TICK_S = 1.0
_PAUSE_S = 0.1
_STOP_TIMEOUT_S = 10.0
_MAX_ALIKE = 3
_REARM_SHARE = 0.85  # share of memory.alert_bytes below which the alert ends
_FILES_EVERY_S = 10.0
_END_TIMEOUT_S = 10.0  # time for the other thread to notice that Reverb has died


class Service:
    """One server from start to end; `run` it once, in the main thread."""

    def __init__(self, config: ServerConfig, ready: Callable[[str], None], claim: str | None = None) -> None:
        """Prepare, without starting anything.

        `ready` is called when clients can connect, with a line that names the address. `claim` is the name of this
        machine for clients if the server must claim its checkpoints, otherwise None.
        """
        self._config = config
        self._ready = ready
        self._state = ServiceState()
        self._turn = Turn(config, claim, self._state)
        self._jobs = Jobs(self._state.failures)
        self._folder: CheckpointFolder | None = None
        self._process: ReverbProcess | None = None
        self._stop = threading.Event()
        self._pause = threading.Event()  # never set
        self._outcome, self._ends_itself = DIED, False
        self._died_at: float | None = None
        self._failed_at: float | None = None  # time since which it serves but is not alive
        self._work_cpu_s = 0.0
        self._error: Exception | None = None

    def run(self) -> int:
        """Serve until a signal is received; return the exit code.

        Raises:
            ReverbWriterError, OSError: the service cannot start as configured.
        """
        work = threading.Thread(target=self._work, name="service", daemon=True)
        work.start()
        was_asked = False
        while work.is_alive():
            self._state.loop_runs()
            received = signals.next_signal(_PAUSE_S)
            if received == signal.SIGHUP and self._stop.is_set():
                received = None  # the end of its terminal or parent does not count as a second signal
            if received is not None and (was_asked or not self._may_have_clients()):
                if was_asked:
                    _logger.warning("%s again: stopped at once", received.name)
                self._stop_at_once()  # also if it does not serve yet, because no data are lost
                return 128 + received
            if received is not None:
                was_asked = received != signal.SIGHUP
                _logger.info("%s: refusing new work; a second signal stops at once", received.name)
                self._stop.set()
            code = self._look_at_turn()
            if code is None and not self._turn.in_doubt:
                code = self._look_at(work)
            if code is not None:
                return code
        if self._error is not None:
            raise self._error
        if self._outcome == STOPPED and self._turn.is_over:
            self._outcome = CLAIMED
        return NOT_ALIVE if self._ends_itself and self._outcome == STOPPED else self._outcome

    def _look_at(self, work: threading.Thread) -> int | None:
        """Test whether the service is alive; return the exit code if it must end at once because its thread hangs."""
        now, process = time.monotonic(), self._process
        if (had_s := cpu_s(f"self/task/{work.native_id}")) != self._work_cpu_s:
            self._work_cpu_s = had_s
            self._state.work_runs()
        if process is None or self._state.phase == "failed":
            return None
        if self._stop.is_set() and process.is_stopped():  # each time, because a signal takes effect late
            _logger.warning("the Reverb process is stopped (SIGSTOP), and is continued because the server ends")
            process.resume()
        if self._state.phase in ("starting", "restoring"):
            return None
        if self._state.phase == "serving" and not process.alive():
            self._died_at = self._died_at or now
            return DIED if now - self._died_at > _END_TIMEOUT_S else None
        if process.table_fault is not None and not self._stop.is_set():
            _logger.error(
                "the server ends itself, because a table has stopped for good, and only a restart helps. Reverb's "
                "reason: %s The last checkpoint leaves the item out. Find the writer that sent it: a writer that sends "
                "it again stops the table again.",
                process.table_fault,
            )
            self._ends_itself = True
            self._stop.set()
        if self._stop.is_set():
            if not self._state.work_hangs():
                return None
            _logger.error("the server ends without a last checkpoint: %s", self._state.work_fault())
            self._stop_at_once()
            return NOT_ALIVE if self._ends_itself else LAST_CHECKPOINT_FAILED
        is_alive, why = self._state.alive()
        self._failed_at = None if is_alive else self._failed_at or now
        # Counted in this loop's time, so that after a pause of the whole machine the monitor runs first.
        if self._failed_at is not None and 0 < self._config.http_max_silence_s < now - self._failed_at:
            _logger.error("the server ends itself: %s", why)
            self._ends_itself = True
            self._stop.set()
        return None

    def _look_at_turn(self) -> int | None:
        """End for a newer server; return the exit code if this server must end at once."""
        if self._turn.must_end_at_once(self._process):
            self._stop_at_once()
            return CLAIMED
        if self._turn.is_over:
            self._stop.set()
        return None

    def _may_have_clients(self) -> bool:
        """Return whether items may need a save: Reverb takes inserts before this service knows that it runs."""
        if self._state.phase not in ("starting", "restoring"):
            return True
        if self._process is not None and self._config.port:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self._config.port), _PAUSE_S):
                return True
        return False

    def _stop_at_once(self) -> None:
        if self._process is not None:
            self._process.kill()

    # All methods below run in the other thread.

    def _work(self) -> None:
        try:
            with contextlib.ExitStack() as resources:
                self._outcome = self._live(resources)
        except Exception as error:  # noqa: BLE001  # `run` raises it
            self._error = error
        finally:
            if self._process is not None:
                self._process.kill()

    def _live(self, resources: contextlib.ExitStack) -> int:
        """Run all phases; return the exit code."""
        config = self._config
        resources.enter_context(notifying(self._state))
        self._begin(resources)
        try:
            self._turn.take(resources)
        except ClaimError as error:
            _logger.error("%s", error)  # noqa: TRY400  # a traceback would hide the message
            return CLAIMED
        self._open_checkpoint_folder(resources)
        self._watch_files(resources)
        try:
            started = Start(config, self._folder, self._state, self._new_process, resources).run()
        except (rw.errors.ReverbWriterError, OSError) as error:
            code = _exit_code(error)
            if self._fails_again(code, error):
                self._wait_failed(error)
            elif code == CANNOT_START:
                raise
            else:
                _logger.error("%s", error)  # noqa: TRY400  # a traceback would hide the message
            return code
        if self._folder is not None:
            self._folder.owner.update(failure="", failures=0, end="killed")  # until this server writes another end
        code = self._serve(resources, started)
        if self._folder is not None:
            died = "oom" if started.process.was_ended_for_want_of_memory() else "died"
            asked = "unhealthy" if self._ends_itself else "stopped"
            self._folder.owner.update(end={DIED: died, LAST_CHECKPOINT_FAILED: "unsaved"}.get(code, asked))
        return code

    def _begin(self, resources: contextlib.ExitStack) -> None:
        """Log the configuration, and serve the status page."""
        config, state = self._config, self._state
        for level, line in banner.start_lines(config):
            _logger.log(level, "%s", line)
        _logger.info("%d file descriptors: each connection needs one", raise_descriptor_limit())
        state.estimates = {table.config.name: table.estimate().total_bytes for table in config.tables}
        state.max_silence_s = config.http_max_silence_s
        if config.http_port:
            status_server = StatusServer(config.http_host, config.http_port, state)
            resources.callback(status_server.close)
            everywhere = "" if status_server.host == config.http_host else ", and at this machine's other addresses"
            address = f"http://{status_server.address}/"
            _logger.info("status page, /metrics, /livez and /readyz at %s%s", address, everywhere)

    def _open_checkpoint_folder(self, resources: contextlib.ExitStack) -> None:
        config, state = self._config, self._state
        if config.checkpoints_directory is None:
            _logger.warning("checkpoints.directory is not set: the data are lost when this process ends")
            return
        self._folder = folder = resources.enter_context(
            CheckpointFolder(config.checkpoints_directory, config.checkpoints_keep)
        )
        state.keeps_checkpoints = True
        state.checkpoint_every_s = config.checkpoints_every_s
        state.starts = folder.owner.mark.starts
        state.previous_end = folder.owner.mark.end
        state.kept = folder.kept()

    def _watch_files(self, resources: contextlib.ExitStack) -> None:
        """Watch disk and certificate in a separate thread, because a network file system may never answer."""
        watch = Jobs(self._state.failures)
        resources.callback(watch.close)
        if self._config.checkpoints_directory is not None:
            watch.every("disk", _FILES_EVERY_S, self._look_at_disk)
        if self._config.gateway_certificate is not None:
            watch.every("certificate", _FILES_EVERY_S, self._look_at_certificate)
        watch.start(at_once=True)

    def _look_at_disk(self) -> None:
        self._state.disk = None  # remains None if the disk does not answer
        found = shutil.disk_usage(str(self._config.checkpoints_directory))
        self._state.disk = found.free, found.total

    def _look_at_certificate(self) -> None:
        self._state.certificate_expires_at = None  # as above
        found = x509.load_pem_x509_certificates(Path(str(self._config.gateway_certificate)).read_bytes())
        self._state.certificate_expires_at = min(one.not_valid_after_utc.timestamp() for one in found)

    def _new_process(self) -> ReverbProcess:
        self._process = process = ReverbProcess()  # it ends with this thread
        self._state.reverb_pid = process.pid
        return process

    def _fails_again(self, code: int, error: Exception) -> bool:
        """Count a failed start; return whether too many starts have failed with the same error."""
        if self._folder is None or self._turn.is_claimed:  # the program that restarts it decides
            return False
        failure = f"{code}: {str(error).partition(chr(10))[0]}"
        before = self._folder.owner.mark
        failures = before.failures + 1 if before.failure == failure else 1
        self._folder.owner.update(failure=failure, failures=failures)
        return failures >= _MAX_ALIKE

    def _wait_failed(self, error: Exception) -> None:
        """Stay up, not ready, and report the reason, until a signal."""
        self._state.phase, self._state.detail = "failed", f"to start, {_MAX_ALIKE} times with the same error: {error}"
        _logger.error(
            "%s\nThe last %d starts failed with the same error, so the service does not retry: it stays up, not "
            "ready, and serves nothing. Fix the cause, then restart it.",
            error,
            _MAX_ALIKE,
        )
        self._stop.wait()

    def _serve(self, resources: contextlib.ExitStack, started: Started) -> int:
        state, process = self._state, started.process
        names = [table.name for table in started.tables]
        state.address = f"localhost:{started.port}"
        is_saving = SaveProgress(process, self._folder.incoming).moves if self._folder is not None else lambda: False
        state.monitor = monitor = Monitor(state.address, names, is_saving)
        resources.callback(monitor.close)
        self._figures = monitor.latest()
        saver = None
        if self._folder is not None:
            saver = Saver(
                self._folder,
                process,
                state,
                self._jobs,
                self._stop,
                restored=started.restored,
                safe_after=self._config.checkpoints_safe_after,
            )
            resources.callback(saver.close)
        if self._config.memory_alert_bytes:
            self._jobs.every("memory", _TICK_S, lambda: self._look_at_memory(saver))
        self._jobs.every("figures", self._config.log_figures_every_s, lambda: self._log_figures(monitor))
        self._jobs.start()
        resources.callback(self._jobs.close)
        state.phase, state.detail = "serving", ""
        while process.alive() and not self._stop.is_set() and not monitor.wait(_PAUSE_S):
            state.work_runs()
        if monitor.wait(0):
            self._figures = monitor.latest()  # so that the first line of figures has rates
            if started.restored is not None:
                held = ", ".join(f"{name} {info.current_size:,}" for name, info in monitor.latest().tables.items())
                _logger.info(
                    "restored checkpoint %s in %.1f s; items: %s", started.restored.name, started.seconds, held
                )
            self._ready(f"ready at {state.address}, tables: {', '.join(names)}")
        while process.alive():
            state.work_runs()
            if saver is not None:
                saver.tick()
            if self._stop.wait(_TICK_S):
                return self._end(process, started.port, saver)
        _logger.error("%s", process.describe_end())
        return DIED

    def _log_figures(self, monitor: Monitor) -> None:
        _logger.info("%s", banner.figures_line(self._state, self._figures))
        self._figures = monitor.latest()

    def _look_at_memory(self, saver: Saver | None) -> None:
        """Request a checkpoint when memory exceeds its limit, because the kernel may end the Reverb process soon."""
        used, was_high = used_bytes(self._state.process_ids), self._state.memory_is_high
        self._state.memory_is_high = is_high(used, self._config.memory_alert_bytes, was_high=was_high)
        if self._state.memory_is_high and not was_high:
            limit = format_bytes(self._config.memory_alert_bytes)
            _logger.error(
                "the server takes %s, more than memory.alert_bytes = %s%s. No limit refuses inserts: lower max_size of "
                "its tables, or give it more memory",
                format_bytes(used),
                limit,
                "; a checkpoint is written" if saver is not None else "",
            )
            if saver is not None:
                saver.request()

    def _end(self, process: ReverbProcess, port: int, saver: Saver | None) -> int:
        """Refuse new work, write a last checkpoint and stop; return the exit code."""
        assert self._state.monitor is not None  # noqa: S101  # the server runs
        self._state.phase = "draining"
        while self._turn.in_doubt or process.is_stopped():  # the main thread ends both
            self._pause.wait(_PAUSE_S)
        if saver is not None:
            self._jobs.run("connect", saver.connect)
        try:
            ended = process.drain(connections_to(port))
        except ReverbProcessError as error:
            _logger.error("%s", error)  # noqa: TRY400  # as above
            return DIED
        _logger.info("%d connections ended", ended)
        is_saved = saver is None or saver.save_last()
        if not is_saved and not process.alive():
            _logger.error("%s", process.describe_end())
            return DIED
        self._state.phase = "stopped"
        self._state.monitor.close()
        process.stop(_STOP_TIMEOUT_S)
        _logger.info("stopped")
        return STOPPED if is_saved else LAST_CHECKPOINT_FAILED


def is_high(used_bytes: int, alert_bytes: int, *, was_high: bool) -> bool:
    """Return whether memory is above the limit of its alert, or was above it and is not well below it yet."""
    return used_bytes > alert_bytes * (_REARM_SHARE if was_high else 1)


def _exit_code(error: Exception) -> int:
    if isinstance(error, CheckpointError):
        return CANNOT_RESTORE
    return DIED if isinstance(error, ReverbProcessError) else CANNOT_START
