"""`reverb-writer-server serve` as a child process on another interpreter, started again whenever it ends.

A child ends with the thread that has started it (Linux's parent-death signal), which is the one that watches it: so it
ends with this process, however that ends. It has a process group of its own, which is ended with it. Its configuration
is a file in memory, so that nothing is left on disk.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reverb_writer.background import start_thread

_TICK_S = 0.1
_LOOK_EVERY_S = 1.0
_HTTP_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_FAILED_FOR_S = 60.0  # of a server that stays up and serves nothing, until it is started again
_MAX_NOT_ALIVE = 6  # looks in a row at which the server says that a restart is due
_NUM_LAST_LINES = 15
_PORT_WAIT_S = 5.0  # for a server that has just been killed to leave its port
_NOT_FOR_OTHERS = ("PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONSTARTUP")  # meant for this interpreter
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine


@dataclass(frozen=True)
class ChildView:
    """A child at one moment."""

    state: str = "starting"  # as of `ShardReport`
    detail: str = ""  # more about it
    port: int | None = None  # of the server; None before the first start
    pid: int | None = None  # of the child; None if it does not run
    attempts: int = 0  # starts so far
    has_served: bool = False  # whether a start has succeeded
    status: Mapping[str, Any] = field(default_factory=dict)  # what the server says of itself, as of `/status.json`


class ServerChild:
    """Keeps a server running until it is told to stop. Thread-safe."""

    def __init__(
        self,
        python: str,
        configuration: Callable[[int, int], str],
        changed: Callable[[ChildView], None],
        *,
        port: int | None = None,
        last_port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start a thread that starts the server.

        Args:
            python: the interpreter.
            configuration: returns the TOML for a port of the server and one of its status page.
            changed: called from the thread after each look at the child, at least once a second.
            port: of the server; None for a free one, which it keeps from then on while no other process takes it.
            last_port: the free one to begin with, if no other process has taken it.
            environment: variables for the server, beside those of this process.
        """
        self._python = python
        self._configuration = configuration
        self._changed = changed
        self._is_port_fixed = port is not None
        self._environment = environment or {}
        self._stop = threading.Event()
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self.view = ChildView(port=port or last_port)  # the child now; replaced as a whole
        self._thread = start_thread(self._keep, "replay-server")

    def stop(self) -> None:
        """Have the server write its last checkpoint and end; `view` tells when it has, or why it has written none."""
        self._stop.set()

    def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                has_served = self._run_once()
            except Exception as error:  # noqa: BLE001  # whatever it is, the server is started again
                has_served = False
                self.view = replace(self.view, state="failed", detail=f"{type(error).__name__}: {error}", pid=None)
            pause_s = _FIRST_PAUSE_S if has_served else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._stop.wait(pause_s)
        self._set(state="stopped", pid=None)

    def _run_once(self) -> bool:
        """Run one server to its end; return whether it has served."""
        port, http_port = self._choose_port(), free_port()
        self._lines.clear()
        self._set(state="starting", detail="", port=port, attempts=self.view.attempts + 1, status={})
        configuration = self._configuration(port, http_port)
        try:
            process = self._start(configuration)
        except OSError as error:
            self._set(state="failed", detail=f"{self._python} cannot be run on this node: {error}")
            return False
        self._set(pid=process.pid)
        reader = start_thread(lambda: self._read_log(process), "replay-server-log")
        try:
            has_served = self._watch(process, http_port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        reader.join(_HTTP_TIMEOUT_S)
        lines = "\n".join(self._lines)
        detail = f"the server has ended with code {code}:\n{lines}"
        if self._stop.is_set():
            self._set(detail=detail if code and has_served else "", pid=None)  # what never served has nothing to save
        elif not has_served and not self._is_port_fixed and "in use" in lines:
            self._set(detail=detail, pid=None, port=None)  # still "starting": the next port is another one
        else:
            self._set(state="failed", detail=detail, pid=None)
        return has_served

    def _choose_port(self) -> int:
        """Return the port for a start: the last one, if its server, which has just been killed, leaves it soon."""
        port = self.view.port
        if port is not None and not self._is_port_fixed:
            end = time.monotonic() + _PORT_WAIT_S
            while not _is_free(port):
                if self._stop.wait(_TICK_S) or time.monotonic() >= end:
                    return free_port()
        return port or free_port()

    def _start(self, configuration: str) -> subprocess.Popen[str]:
        file = os.memfd_create("server.toml")
        try:
            os.write(file, configuration.encode())
            return subprocess.Popen(  # noqa: S603  # the interpreter that the user has named, and our own module
                [
                    *(self._python, "-m", "reverb_writer_server", "serve"),
                    *("--config", "/dev/stdin", "--end-with", str(os.getpid())),
                ],
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd="/",
                env=server_environment(self._environment),
                start_new_session=True,
            )
        finally:
            os.close(file)

    def _watch(self, process: subprocess.Popen[str], http_port: int) -> bool:
        """Look at a server until it ends; return whether it has served."""
        has_served = is_told = False
        looked_at, failed_at, num_not_alive = -_LOOK_EVERY_S, None, 0
        while process.poll() is None:
            if self._stop.is_set() and not is_told:
                is_told = True
                self._set(state="draining", detail="")
                process.terminate()
            if time.monotonic() - looked_at >= (_LOOK_EVERY_S if has_served else _LOOK_EVERY_S / 4):
                status = _get_json(http_port)
                looked_at = time.monotonic()
                self._take(status)
                has_served = has_served or self.view.state == "serving"
                num_not_alive = 0 if self.view.state != "serving" or _is_alive(http_port) else num_not_alive + 1
                failed_at = (failed_at or looked_at) if self.view.state == "failed" else None
                if num_not_alive >= _MAX_NOT_ALIVE or (failed_at and looked_at - failed_at > _FAILED_FOR_S):
                    return has_served  # which ends it
            time.sleep(_TICK_S)
        return has_served

    def _take(self, status: Mapping[str, Any]) -> None:
        """Take note of what the server tells."""
        if not status:
            self._changed(self.view)
            return
        phase, detail = status["phase"], status["detail"]
        if phase == "serving" and not status["ready"]:
            detail = status["reason"]
        self._set(
            state="draining" if phase == "stopped" else phase,
            detail=detail,
            has_served=self.view.has_served or phase == "serving",
            status=status,
        )

    def _set(self, **changed: Any) -> None:
        self.view = replace(self.view, **changed)
        self._changed(self.view)

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        """Pass the log on to that of this process, which Ray shows, and keep its end."""
        assert process.stderr is not None  # noqa: S101  # a pipe was asked for
        with process.stderr as log:
            for line in log:
                self._lines.append(line.rstrip())
                print(line.rstrip(), file=sys.stderr, flush=True)  # noqa: T201  # as above


def server_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a server: those of this process, without what is meant for its interpreter, and more."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS} | dict(more)


def free_port() -> int:
    """Return a port that nothing listens on now."""
    return _bind(0)


def _is_free(port: int) -> bool:
    try:
        _bind(port)
    except OSError:
        return False
    return True


def _bind(port: int) -> int:
    """Bind a port for a moment, on all addresses, and return its number; 0 for any."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("", port))
        bound: int = one.getsockname()[1]
    return bound


def _get_json(http_port: int) -> Mapping[str, Any]:
    """Return what the status page tells; nothing if it does not answer."""
    try:
        with _opener.open(f"http://127.0.0.1:{http_port}/status.json", timeout=_HTTP_TIMEOUT_S) as reply:
            value: dict[str, Any] = json.load(reply)
    except (OSError, ValueError):
        return {}
    return value


def _is_alive(http_port: int) -> bool:
    """Return whether the server does not say that a restart is due."""
    try:
        with _opener.open(f"http://127.0.0.1:{http_port}/livez", timeout=_HTTP_TIMEOUT_S):
            return True
    except urllib.error.HTTPError as error:
        with error:
            return False
    except OSError:
        return True  # busy; if it has ended, that is found otherwise
