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
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reverb_writer.background import start_thread
from reverb_writer.ray.addresses import newest_claim
from reverb_writer.ray.shard_report import ClusterSpec, ShardReport
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import table_to_dict

_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # the other nodes must reach it
# Seconds for which an actor outlives its server. In this time `stop` learns about the last checkpoint, `start` learns
# why a server does not start, and a node that a server had to leave vanishes before the next server starts.
_OUTLIVES_S = 20.0
_READY = re.compile(r"reverb_writer_server: ready at \S+:(\d+),")
_NUM_LAST_LINES = 15
_NOT_FOR_OTHERS = ("PYTHONBREAKPOINT", "PYTHONHOME", "PYTHONSTARTUP")  # variables for this interpreter only


class ReplayShard:
    """One shard of a cluster; runs as an actor of Ray."""

    def __init__(self, spec: ClusterSpec, number: int) -> None:
        """Start the server of a shard, whose `number` is >= 0."""
        import ray  # noqa: PLC0415  # of the extra

        self._spec, self._number = spec, number
        self._itself = ray.get_runtime_context().current_actor
        self._node: str = ray.util.get_node_ip_address()
        bind = _LOOPBACK if self._node == _LOOPBACK else _ALL  # the address that other nodes use
        port = 0 if spec.port is None else spec.port + number
        options = ["--port", str(port), "--bind", bind, "--claim", self._node]
        self._child = ServerChild(spec.python, server_configuration(spec, number), options, self._server_has_ended)

    def __repr__(self) -> str:
        """Return the text that Ray puts before each line of this actor's log."""
        return f"replay {self._spec.name}, shard {self._number} of {self._spec.num_shards}"

    def describe(self) -> tuple[ClusterSpec, ShardReport]:
        """Return the cluster's definition, and the shard's report."""
        return self._spec, self.report()

    def report(self) -> ShardReport:
        """Return the shard's report."""
        child = self._child
        state, detail = child.end or (self._state(), child.last_line)
        return ShardReport(
            self._spec.shard_names()[self._number],
            f"{self._node}:{child.port}" if child.port else "",
            state,
            "" if state == "serving" else detail,
            self._node,
            child.pid,
        )

    def stop(self) -> ShardReport:
        """Make the server write its last checkpoint and end; return the shard's report. Idempotent."""
        self._child.stop()
        return self.report()

    def _state(self) -> str:
        """Return the state of a server that runs."""
        claim = newest_claim(self._spec.shard_folder(self._number))
        is_ours = claim is not None and claim.pid == self._child.pid
        phase = claim.phase if claim is not None and is_ours else "serving"
        if self._child.is_asked or phase in ("stopped", "ended"):
            return "draining"
        # Both are necessary: clients read the file, and the server writes its line when clients can connect.
        return "starting" if phase == "serving" and not self._child.port else phase

    def _server_has_ended(self, child: ServerChild, end: ChildEnd) -> None:
        """End the actor, for ever if `stop` was called; called in the server's thread, maybe before `_child` is set."""
        import ray  # noqa: PLC0415  # of the extra

        if end.state == "stopped" or not child.port:
            time.sleep(_OUTLIVES_S)
        if not child.is_asked:  # `stop` may have been called meanwhile
            os._exit(1)  # so that Ray restarts it, here or elsewhere
        ray.kill(self._itself, no_restart=True)


class ChildEnd(NamedTuple):
    """The end of a server."""

    state: str  # "stopped" if a program asked it to end, otherwise "failed"
    detail: str  # the last lines of its log, if it failed


class ServerChild:
    """A server, started by a thread that waits for its end. Thread-safe.

    Attributes:
        port: its port; 0 before clients can connect for the first time.
        is_asked: whether `stop` was called.
        end: the end of the server; None while it runs.
    """

    def __init__(
        self, python: str, configuration: str, options: Sequence[str], ended: Callable[[ServerChild, ChildEnd], object]
    ) -> None:
        """Start the thread.

        Args:
            python: path of the interpreter.
            configuration: TOML or JSON.
            options: options of the command line, which override the environment.
            ended: called from the thread when the server has ended, maybe before this returns.
        """
        self._python, self._configuration, self._options, self._ended = python, configuration, options, ended
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._process: subprocess.Popen[str] | None = None
        self.port = 0
        self.is_asked = False
        self.end: ChildEnd | None = None
        start_thread(self._run, "replay-server")

    @property
    def pid(self) -> int | None:
        """The server's process; None if none runs."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return next(iter([*self._lines][-1:]), "")

    def stop(self) -> None:
        """Make the server write its last checkpoint and end; `end` is set when it has ended. Idempotent."""
        if not self.is_asked:
            self.is_asked = True
            if self._process is not None:
                self._process.terminate()

    def _run(self) -> None:
        try:
            end = self._describe(self._serve())
        except OSError as error:
            end = ChildEnd("failed", f"{self._python} cannot be run on node {os.uname().nodename}: {error}")
        self.end = end
        self._ended(self, end)

    def _serve(self) -> int:
        """Run a server to its end; return its exit code."""
        with open(os.memfd_create("server.json"), "r+") as file:  # noqa: PTH123  # a descriptor
            file.write(self._configuration)
            file.flush()
            line = [self._python, "-m", "reverb_writer_server", "serve", "--config", f"/dev/fd/{file.fileno()}"]
            line += ["--http-port", "0", "--end-with-input", *self._options]
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
                if ready := _READY.match(text):
                    self.port = int(ready[1])
                with contextlib.suppress(OSError, ValueError):  # an error of the log must not end a server
                    print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201  # Ray shows it
        return process.returncode

    def _describe(self, code: int) -> ChildEnd:
        detail = f"the server has ended with code {code}:\n" + "\n".join(self._lines)
        if self.is_asked:
            return ChildEnd("stopped", detail if code and self.port else "")
        if code == 0:
            return ChildEnd("stopped", "another program has asked the server to end")
        return ChildEnd("failed", detail)


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
