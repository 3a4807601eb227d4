"""Starts and supervises the process that runs dm-reverb."""

from __future__ import annotations

import contextlib
import ctypes.util
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reverb_writer.errors import DOCS, ReverbWriterError
from reverb_writer_server.machine import cpu_s, num_oom_kills, statistics
from reverb_writer_server.reverb.child import StartRequest
from reverb_writer_server.reverb.sockets import Endpoint

_logger = logging.getLogger("reverb")
_POLL_S = 0.2
_PAUSE_S = 0.02
_ANSWER_TIMEOUT_S = 60.0
_NUM_LAST_LINES = 20
_PRELOAD = "LD_PRELOAD"

# Reverb 0.14, table.cc: a table's thread ends for good, and each later insert and sample waits for ever. It does so for
# a priority that is NaN or negative, if the table is prioritized.
_FATAL = "Table worker encountered a fatal error: "
# gRPC and TensorFlow write the level of each log line. Reverb 0.14 writes no levels: in three of its files all messages
# are information, and all other messages are errors.
_INFO = re.compile(
    r"\[reverb/cc/(platform/default/server|platform/tfrecord_checkpointer|reverb_service_impl)\.cc:"
    r"|[ID]\d{4} |\S+ \S+: I \S+\.cc:|WARNING: All log messages before absl"
)
_ERROR = re.compile(
    r"[EF]\d{4} |\S+ \S+: [EF] \S+\.cc:|Fatal Python error"
    rf"|\[reverb/cc/\S+\] (Check failed|\S+\(\) failed|{_FATAL})"
)
_EXPECTED_WHEN_DRAINING = "Failed accept4: Invalid argument"  # gRPC logs this when its listener is shut down


class ReverbProcessError(ReverbWriterError):
    """The Reverb process has ended, or does not answer."""

    def __init__(self, message: str, number: int | None = None) -> None:
        """Take the message, and the exit code, or minus the signal that ended the process; None if it runs."""
        super().__init__(message)
        self.number = number


class ReverbProcess:
    """A process that runs Reverb until it is stopped, or until the thread that started it ends.

    Only one thread at a time may start, drain and stop it. Any thread may test whether it lives, and kill it.
    """

    def __init__(self) -> None:
        """Start the process; it does not serve yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-m", "reverb_writer_server.reverb.child", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env={**with_jemalloc(os.environ), "TZ": "UTC"},  # Reverb names checkpoints by the local time
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the service, which then stops this process
            )
        self._connection = Connection(ours.detach())
        self._pause = threading.Event()  # never set; `Event.wait` does not depend on the wall clock
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._drains = False
        self.table_fault: str | None = None  # the error that has ended the thread of a table
        self._num_oom_kills = num_oom_kills()
        self._listener = threading.Thread(target=self._listen, name="reverb-log", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the process exists: it runs, or is stopped."""
        return self._process.poll() is None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped, for example by SIGSTOP, so that `resume` continues it."""
        return statistics(str(self.pid))[:1] == ["T"]  # t: only the debugger that stopped it can continue it

    def suspend(self) -> None:
        """Pause the process, which confirms nothing until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a stopped process."""
        self._process.send_signal(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return its processor time in seconds; 0 if it has ended."""
        return cpu_s(str(self.pid))

    def has_open(self, folder: Path) -> bool:
        """Return whether it has an open file in a folder or below."""
        prefix = f"{folder.resolve()}{os.sep}"
        try:
            descriptors = list(Path(f"/proc/{self.pid}/fd").iterdir())
        except FileNotFoundError:
            return False
        for one in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                if str(one.readlink()).startswith(prefix):
                    return True
        return False

    @contextlib.contextmanager
    def without_room(self) -> Iterator[None]:
        """Within the block, its writes to files fail as on a full disk: the only way to end a save of Reverb."""
        try:
            _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            soft, _ = resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (0, hard))
        except OSError:  # it has ended
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (soft, hard))

    def start(self, request: StartRequest, waiting: Callable[[int], None]) -> int:
        """Start the server, and return its port.

        `waiting` is called several times per second until the server runs, with the number of bytes read from its
        checkpoint, or 0 if the system does not count them. If it raises, the wait ends.
        """
        while not self._connection.poll(_POLL_S):
            waiting(0)
        self._receive()  # Reverb is loaded
        before = self._bytes_read()
        self._send(request)
        while not self._connection.poll(_POLL_S):
            waiting(self._bytes_read() - before)
        return int(self._receive())

    def drain(self, keep: Collection[Endpoint]) -> int:
        """Refuse new connections, end existing ones except those from `keep`; return the number of ended ones."""
        self._drains = True
        self._send(frozenset(keep))
        return int(self._receive(_ANSWER_TIMEOUT_S))

    def stop(self, timeout_s: float) -> None:
        """Stop the server and the process; by force if it takes more than `timeout_s` seconds. Idempotent."""
        self._connection.close()
        self._wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        self._process.kill()
        self._wait(_ANSWER_TIMEOUT_S)
        self._connection.close()
        self._listener.join(_ANSWER_TIMEOUT_S)

    def was_ended_for_want_of_memory(self) -> bool:
        """Return whether the kernel ended the process because memory ran out."""
        return self._process.poll() == -signal.SIGKILL and num_oom_kills() > self._num_oom_kills

    def describe_end(self) -> str:
        """Return a text about the end of the process, with the last lines of its log."""
        self._wait(_POLL_S)
        self._listener.join(_POLL_S)
        code = self._process.poll()
        how = f"has ended with code {code}" if code is None or code >= 0 else f"has died of {_signal_name(-code)}"
        if self.was_ended_for_want_of_memory():
            how += (
                ": the kernel ended it because memory ran out. Lower max_size of its tables, or raise its limit; "
                f"{DOCS}/deploy/sizing.html has the sizes"
            )
        return f"the Reverb process {how}. Its last log lines:\n" + "\n".join(self._last_lines)

    def _wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the end of the process."""
        until = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < until:
            self._pause.wait(_PAUSE_S)

    def _bytes_read(self) -> int:
        """Return the bytes that the process has read from files so far; 0 if the system does not count them."""
        try:
            counters = Path(f"/proc/{self.pid}/io").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("rchar")), 0)

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._ended_error() from error

    def _receive(self, timeout_s: float | None = None) -> Any:
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise ReverbProcessError(f"the Reverb process did not answer within {timeout_s:g} s. Look at its log.")
            error, value = self._connection.recv()
        except (EOFError, OSError) as broken:
            raise self._ended_error() from broken
        if error is not None:
            raise error
        return value

    def _ended_error(self) -> ReverbProcessError:
        return ReverbProcessError(self.describe_end(), self._process.poll())

    def _listen(self) -> None:
        """Forward the log of the process: information at level debug, errors as errors, other lines as warnings."""
        assert self._process.stderr is not None  # noqa: S101  # it is a pipe
        with self._process.stderr as log:
            for raw in log:
                line = raw.decode(errors="replace").rstrip()
                self._last_lines.append(line)
                if _FATAL in line:
                    self.table_fault = line.partition(_FATAL)[2]
                _logger.log(level_of(line, drains=self._drains), "%s", line)


def with_jemalloc(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process uses jemalloc: docs/decisions.md#allocator.

    The environment is unchanged if it has `LD_PRELOAD`, even an empty one, or if jemalloc is not installed.
    """
    library = None if _PRELOAD in environment else ctypes.util.find_library("jemalloc")
    return dict(environment) if library is None else {**environment, _PRELOAD: library}


def level_of(line: str, *, drains: bool) -> int:
    """Return the level of a log line of the Reverb process; `drains` if the process refuses connections by request."""
    if _INFO.match(line) or (drains and _EXPECTED_WHEN_DRAINING in line):
        return logging.DEBUG
    return logging.ERROR if _ERROR.match(line) else logging.WARNING


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
