"""The actor of a shard: it starts a server on its node, reports the server's state, and ends with it.

Ray restarts the actor any number of times, on another node if its own is lost; the server then restores its newest
checkpoint. The server is a child process on another interpreter, and supervises itself; the actor reads its log until
its end. The server's standard input is a pipe, which the kernel closes at any end of the actor: then the server writes
its last checkpoint and ends. Its configuration is a file in memory, so that no file remains on disk.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reverb_writer.background import start_thread
from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.shard_report import ClusterSpec, ShardReport
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import table_to_dict

_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # the other nodes must reach it
# Seconds for which an actor outlives its server. In this time `stop` learns about the last checkpoint, and `start`
# learns why a server does not start; and a node that a server had to leave is gone before the next server starts.
_STOPPED_S, _FAILED_S, _SENT_AWAY_S = 10.0, 20.0, 60.0
_READY = "reverb_writer_server: ready at"
_HTTP_TIMEOUT_S = 2.0
_NUM_LAST_LINES = 15
_MAX_PORTS = 6  # tries of free ports, which another process may take first
_NOT_FOR_OTHERS = ("PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONSTARTUP")  # variables for this interpreter only
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine


class ReplayShard:
    """One shard of a cluster; runs as an actor of Ray."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        """Start the server of a shard, whose `number` is >= 0."""
        import ray  # noqa: PLC0415  # of the extra

        self._spec, self._number = spec, number
        self._itself = ray.get_runtime_context().current_actor
        self._node: str = ray.util.get_node_ip_address()
        bind = _LOOPBACK if self._node == _LOOPBACK else _ALL  # the address that other nodes use
        self._status: Mapping[str, Any] = {}
        self._generation = 0
        self._child = ServerChild(
            spec.python,
            server_configuration(spec, number),
            self._server_has_ended,
            port=None if spec.port is None else spec.port + number,
            options=["--bind", bind, "--claim", self._node],
        )

    def __repr__(self) -> str:
        """Return the text that Ray puts before each line of this actor's log."""
        return f"replay {self._spec.name}, shard {self._number} of {self._spec.num_shards}"

    def describe(self) -> tuple[ClusterSpec, ShardReport]:
        """Return the cluster's definition, and the shard's report."""
        return self._spec, self.report()

    def report(self) -> ShardReport:
        """Return the shard's report."""
        child, end = self._child, self._child.end
        if end is None:
            self._status = child.status() or self._status
        status = self._status
        state, detail = end or _state(status, is_asked=child.is_asked)
        claim = newest_claim(self._spec.shard_folder(self._number))
        if claim is not None and claim.pid == child.pid:
            self._generation = claim.number
            state = claim.phase if state == "serving" else state  # the file, which clients read, is written later
        return ShardReport(
            self._spec.shard_names()[self._number],
            f"{self._node}:{child.port}" if child.port else "",
            state,
            detail,
            self._generation,
            self._node,
            child.pid,
            status.get("memory", {}).get("used_bytes", 0),
            status.get("checkpoints", {}).get("age_s"),
        )

    def stop(self) -> ShardReport:
        """Make the server write its last checkpoint and end; return the shard's report. Idempotent."""
        self._child.stop()
        return self.report()

    def _server_has_ended(self, end: ChildEnd) -> None:
        """End the actor, for ever if `stop` was called; called in the thread that started the server."""
        import ray  # noqa: PLC0415  # of the extra

        if self._child.is_asked:
            time.sleep(_STOPPED_S)
        elif end.state == "stopped":
            time.sleep(_SENT_AWAY_S)
        elif not self._child.has_served:
            time.sleep(_FAILED_S)
        if not self._child.is_asked:  # `stop` may have been called meanwhile
            os._exit(1)  # so that Ray restarts it, here or elsewhere
        ray.kill(self._itself, no_restart=True)


class ChildEnd(NamedTuple):
    """The end of a server."""

    state: str  # "stopped" if a program asked it to end, otherwise "failed"
    detail: str  # the last lines of its log, if it failed


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
            python: path of the interpreter.
            configuration: TOML or JSON, without ports.
            ended: called from the thread when the server has ended.
            port: port of the server; None for a free one.
            options: options of the command line, which override the environment.
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
        """Make the server write its last checkpoint and end; `end` is set when it has ended. Idempotent."""
        if not self.is_asked:
            self.is_asked = True
            if self._process is not None:
                self._process.terminate()

    def status(self) -> Mapping[str, Any]:
        """Return the content of the server's status page; {} if it does not answer."""
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
        with open(os.memfd_create("server.json"), "r+") as file:  # noqa: PTH123  # a descriptor
            file.write(self._configuration)
            file.flush()
            line = [self._python, "-m", "reverb_writer_server", "serve", "--config", f"/dev/fd/{file.fileno()}"]
            line += ["--port", str(self.port), "--http-port", str(self._http_port), "--end-with-input", *self._options]
            if self.is_asked:
                return 0
            self._process = process = subprocess.Popen(  # noqa: S603  # the interpreter that the user has named
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=[file.fileno()],
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS},
                start_new_session=True,
            )
        with process:
            if self.is_asked:  # `stop` was called meanwhile
                process.terminate()
            for text in process.stdout or ():
                self._lines.append(text.rstrip())
                self.has_served = self.has_served or text.startswith(_READY)
                with contextlib.suppress(OSError, ValueError):  # an error of the log must not end a server
                    print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201  # Ray shows it
        return process.returncode

    def _describe(self, code: int) -> ChildEnd:
        detail = f"the server has ended with code {code}:\n" + "\n".join(self._lines)
        if self.is_asked:
            return ChildEnd("stopped", detail if code and self.has_served else "")
        if code == 0:
            return ChildEnd("stopped", "another program has asked the server to end")
        return ChildEnd("failed", detail)


def free_port() -> int:
    """Return a port on which no process listens now, on any address."""
    with socket.create_server(("", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def _state(status: Mapping[str, Any], *, is_asked: bool) -> tuple[str, str]:
    """Return the state of a shard whose server runs, and its detail."""
    phase, detail = str(status.get("phase", "starting")), str(status.get("detail", ""))
    if phase == "serving" and not status.get("ready"):
        detail = str(status.get("reason", ""))
    return ("draining", "") if is_asked or phase == "stopped" else (phase, detail)


def server_configuration(spec: ClusterSpec, number: int) -> str:
    """Return the configuration of a shard's server without its ports, as JSON.

    Raises:
        SpecError: a table cannot be split, or the server's configuration cannot express it.
    """
    folder = spec.shard_folder(number)
    shares = (share_of(table, number, spec.num_shards) for table in spec.tables)
    values: dict[str, Any] = {"tables": {share.name: table_to_dict(share) for share in shares}}
    if folder is not None:
        values["checkpoints"] = {"directory": str(folder / "checkpoints"), "every_s": spec.checkpoint_every_s}
    return json.dumps(values)
