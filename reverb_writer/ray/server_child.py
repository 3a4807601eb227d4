"""One run of `reverb-writer-server serve` as a child process on another interpreter.

The kernel sends the child a signal when the thread that has started it ends, however that ends: then it writes its last
checkpoint and ends, too. It supervises itself: this module only reads its log until it has ended. Its configuration is
a file in memory, so that nothing is left on disk.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reverb_writer.background import start_thread

_READY = "reverb_writer_server: ready at"
_HTTP_TIMEOUT_S = 2.0
_NUM_LAST_LINES = 15
_MAX_PORTS = 6  # free ones, which another process may take first
_NOT_FOR_OTHERS = ("PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONSTARTUP")  # meant for this interpreter
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine


class ChildEnd(NamedTuple):
    """How a server has ended."""

    state: str  # "stopped" if it was told to end, by this program or another one, else "failed"
    detail: str  # the last lines of its log, if they matter


class ServerChild:
    """A server, started by a thread that waits for its end. Thread-safe."""

    def __init__(
        self,
        python: str,
        configuration: str,
        ended: Callable[[ChildEnd], None],
        *,
        port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Start the thread.

        Args:
            python: the interpreter.
            configuration: TOML or JSON, without ports.
            ended: called from the thread when the server has ended.
            port: of the server; None for a free one.
            options: of the command line, which override the environment.
        """
        self._python, self._configuration, self._ended, self._options = python, configuration, ended, options
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._http_port = 0
        self._fixed_port = self.port = port
        self.is_asked = False  # whether `stop` was called
        self.has_served = False
        self.end: ChildEnd | None = None  # None while it runs
        start_thread(self._run, "replay-server")

    @property
    def pid(self) -> int | None:
        """The server's process; None if none runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def stop(self) -> None:
        """Have the server write its last checkpoint and end; `end` tells when it has. Idempotent."""
        if not self.is_asked:
            self.is_asked = True
            if self._process is not None:
                self._process.terminate()

    def status(self) -> Mapping[str, Any]:
        """Return what the server's status page tells; nothing if it does not answer."""
        try:
            with _opener.open(f"http://127.0.0.1:{self._http_port}/status.json", timeout=_HTTP_TIMEOUT_S) as reply:
                value: Any = json.load(reply)
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _run(self) -> None:
        try:
            for _ in range(_MAX_PORTS):
                code = self._serve()
                is_taken = code and not self.has_served and "in use" in "".join(self._lines)
                if self._fixed_port is not None or not is_taken:
                    break
            end = self._describe(code)
        except OSError as error:
            end = ChildEnd("failed", f"{self._python} cannot be run on node {os.uname().nodename}: {error}")
        self.end = end
        self._ended(end)

    def _serve(self) -> int:
        """Run a server to its end; return its exit code."""
        self.port, self._http_port = self._fixed_port or free_port(), free_port()
        self._lines.clear()
        line = [self._python, "-m", "reverb_writer_server", "serve", "--config", "/dev/stdin", *self._options]
        line += ["--port", str(self.port), "--http-port", str(self._http_port), "--end-with", str(os.getpid())]
        with open(os.memfd_create("server.json"), "r+") as file:  # noqa: PTH123  # a descriptor
            file.write(self._configuration)
            file.flush()
            if self.is_asked:
                return 0
            self._process = process = subprocess.Popen(  # noqa: S603  # the interpreter that the user has named
                line,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS},
                start_new_session=True,
            )
        if self.is_asked:  # it was asked meanwhile
            process.terminate()
        assert process.stdout is not None  # noqa: S101  # a pipe was asked for
        with process.stdout as log:
            for text in log:
                self._lines.append(text.rstrip())
                self.has_served = self.has_served or text.startswith(_READY)
                with contextlib.suppress(OSError, ValueError):  # nothing about a log may end a server
                    print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201  # Ray shows it
        return process.wait()

    def _describe(self, code: int) -> ChildEnd:
        detail = f"the server has ended with code {code}:\n" + "\n".join(self._lines)
        if self.is_asked:
            return ChildEnd("stopped", detail if code and self.has_served else "")
        if code == 0:
            return ChildEnd("stopped", "another program has told the server to end")
        return ChildEnd("failed", detail)


def free_port() -> int:
    """Return a port that nothing listens on now, on any address."""
    with socket.create_server(("", 0)) as one:
        port: int = one.getsockname()[1]
    return port
