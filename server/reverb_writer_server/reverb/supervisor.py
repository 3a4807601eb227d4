"""The service's end of the line to the process that has dm-reverb in it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reverb_writer.errors import ReverbWriterError
from reverb_writer_server.reverb.allocator import with_jemalloc
from reverb_writer_server.reverb.child import Start

__all__ = ["ReverbProcess", "ReverbProcessError"]

_logger = logging.getLogger("reverb")
_POLL_S = 0.2
_ANSWER_WITHIN_S = 60.0
_LAST_WORDS = 20
_INFO = re.compile(r"\[reverb/cc/\S+\]|I\d{4} |WARNING: All log messages before absl")
_OF_DRAINING = "Failed accept4"  # what gRPC says when its listener is shut down, as it is meant to be


class ReverbProcessError(ReverbWriterError):
    """The process that has Reverb in it has ended, or does not answer."""


class ReverbProcess:
    """Runs Reverb until it is stopped. Its methods are for one thread at a time."""

    def __init__(self) -> None:
        """Start the process, with no server in it yet."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                [sys.executable, "-m", "reverb_writer_server.reverb.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=with_jemalloc(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the service, which then stops this process
            )
        self._line = Connection(ours.detach())
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._listener = threading.Thread(target=self._listen, name="reverb-log", daemon=True)
        self._listener.start()

    @property
    def number(self) -> int:
        """Its process number."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    def start(self, start: Start, waiting: Callable[[int], None]) -> tuple[int, dict[str, int]]:
        """Start the server; return its port and how many items of each table were left out.

        Args:
            start: what to serve.
            waiting: called several times a second until it runs, with the bytes that it has read from its checkpoint,
            as
                far as the system tells; what it raises ends the wait.

        Raises:
            ReverbProcessError: the process has ended; with its last words.
            ReverbWriterError, OSError, ValueError, RuntimeError: what the server said.
        """
        while not self._line.poll(_POLL_S):
            waiting(0)
        self._receive()  # it has loaded Reverb
        before = self._bytes_read()
        self._send(start)
        while not self._line.poll(_POLL_S):
            waiting(self._bytes_read() - before)
        port, left_out = self._receive()
        return port, left_out

    def drain(self, keep: Collection[int]) -> int:
        """End all connections but those from the ports `keep`, refuse new ones; return how many were ended."""
        self._send(("drain", frozenset(keep)))
        return int(self._receive(_ANSWER_WITHIN_S))

    def stop(self, timeout_s: float) -> None:
        """Stop the server and the process; by force if it takes more than `timeout_s` seconds. Idempotent."""
        with contextlib.suppress(ReverbProcessError, OSError):
            self._send(("stop", None))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        self._process.kill()
        self._process.wait(_ANSWER_WITHIN_S)
        self._line.close()
        self._listener.join(_ANSWER_WITHIN_S)

    def last_words(self) -> str:
        """Return the end of what it wrote to its log."""
        return "\n".join(self._last_words)

    def _bytes_read(self) -> int:
        """Return how much the process has read from files so far; 0 where the system does not tell."""
        try:
            counters = Path(f"/proc/{self.number}/io").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("rchar")), 0)

    def _send(self, message: Any) -> None:
        try:
            self._line.send(message)
        except OSError as error:
            raise self._gone() from error

    def _receive(self, timeout_s: float | None = None) -> Any:
        try:
            if timeout_s is not None and not self._line.poll(timeout_s):
                raise ReverbProcessError(f"the Reverb process did not answer within {timeout_s:g} s.")
            error, value = self._line.recv()
        except (EOFError, OSError) as broken:
            raise self._gone() from broken
        if error is not None:
            raise error
        return value

    def _gone(self) -> ReverbProcessError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
        self._listener.join(_POLL_S)
        code = self._process.poll()
        return ReverbProcessError(
            f"the Reverb process has ended with code {code}. Its last words:\n{self.last_words()}"
        )

    def _listen(self) -> None:
        """Pass on what the process writes to its log: Reverb's own chatter as debug, the rest as warnings."""
        assert self._process.stderr is not None  # noqa: S101  # a pipe was asked for
        with self._process.stderr as log:
            for raw in log:
                line = raw.decode(errors="replace").rstrip()
                self._last_words.append(line)
                quiet = _INFO.match(line) or _OF_DRAINING in line
                _logger.log(logging.DEBUG if quiet else logging.WARNING, "%s", line)
