"""The actor of a shard: it starts a server on its node, tells how that fares, and ends with it.

Ray starts it again without end, on another node if its own is lost; the server then restores its newest checkpoint.
The server is a child process on another interpreter. It supervises itself: here its log is read until it has ended. Its
standard input is a pipe that the kernel closes when this process ends, however that ends: then it writes its last
checkpoint and ends, too. Its configuration is a file in memory, so that nothing is left on disk.
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
# How long an actor outlives its server, seconds: so that `stop` hears of the last checkpoint, that `start` hears why
# the server does not start, and that a node from which a server was sent away has gone when the next one starts.
_STOPPED_S, _FAILED_S, _SENT_AWAY_S = 10.0, 20.0, 60.0
_READY = "reverb_writer_server: ready at"
_HTTP_TIMEOUT_S = 2.0
_NUM_LAST_LINES = 15
_MAX_PORTS = 6  # free ones, which another process may take first
_NOT_FOR_OTHERS = ("PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONSTARTUP")  # meant for this interpreter
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not reach this machine


class ReplayShard:
    """One shard of a cluster; runs as an actor of Ray."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        """Start the server of a shard, whose `number` is from 0 on."""
        import ray  # noqa: PLC0415  # of the extra

        self._spec, self._number = spec, number
        self._itself = ray.get_runtime_context().current_actor
        self._node: str = ray.util.get_node_ip_address()
        bind = _LOOPBACK if self._node == _LOOPBACK else _ALL  # by which the other nodes know this one
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
        """Return what Ray puts before each line of this actor's log."""
        return f"replay {self._spec.name}, shard {self._number} of {self._spec.num_shards}"

    def describe(self) -> tuple[ClusterSpec, ShardReport]:
        """Return what the cluster is, and how the shard fares."""
        return self._spec, self.report()

    def report(self) -> ShardReport:
        """Return how the shard fares."""
        child, end = self._child, self._child.end
        if end is None:
            self._status = child.status() or self._status
        status = self._status
        state, detail = end or _state(status, is_asked=child.is_asked)
        claim = newest_claim(self._spec.shard_folder(self._number))
        if claim is not None and claim.pid == child.pid:
            self._generation = claim.number
            state = claim.phase if state == "serving" else state  # clients read the file, which comes a moment later
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
        """Have the server write its last checkpoint and end; return how the shard fares. Idempotent."""
        self._child.stop()
        return self.report()

    def _server_has_ended(self, end: ChildEnd) -> None:
        """End the actor, for good if that was asked for; in the thread that has started the server."""
        import ray  # noqa: PLC0415  # of the extra

        if self._child.is_asked:
            time.sleep(_STOPPED_S)
        elif end.state == "stopped":
            time.sleep(_SENT_AWAY_S)
        elif not self._child.has_served:
            time.sleep(_FAILED_S)
        if not self._child.is_asked:  # meanwhile
            os._exit(1)  # so Ray starts it again, here or elsewhere
        ray.kill(self._itself, no_restart=True)


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
            if self.is_asked:  # it was asked meanwhile
                process.terminate()
            for text in process.stdout or ():
                self._lines.append(text.rstrip())
                self.has_served = self.has_served or text.startswith(_READY)
                with contextlib.suppress(OSError, ValueError):  # nothing about a log may end a server
                    print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201  # Ray shows it
        return process.returncode

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


def _state(status: Mapping[str, Any], *, is_asked: bool) -> tuple[str, str]:
    """Return the state and its detail of a shard whose server runs."""
    phase, detail = str(status.get("phase", "starting")), str(status.get("detail", ""))
    if phase == "serving" and not status.get("ready"):
        detail = str(status.get("reason", ""))
    return ("draining", "") if is_asked or phase == "stopped" else (phase, detail)


def server_configuration(spec: ClusterSpec, number: int) -> str:
    """Return the configuration of a shard's server without its ports, as JSON.

    Raises:
        SpecError: a table cannot be split, or cannot be written in the server's configuration.
    """
    folder = spec.shard_folder(number)
    shares = (share_of(table, number, spec.num_shards) for table in spec.tables)
    values: dict[str, Any] = {"tables": {share.name: table_to_dict(share) for share in shares}}
    if folder is not None:
        values["checkpoints"] = {"directory": str(folder / "checkpoints"), "every_s": spec.checkpoint_every_s}
    return json.dumps(values)
