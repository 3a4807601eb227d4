"""The server's command in a process of its own, with all that surrounds it: configuration, HTTP, log, signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ports import free_port
from server_process import SERVER_PYTHON, START_TIMEOUT_S
from waiting import PATIENCE_S

import reverb_writer as rw


def run_command(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `reverb-writer-server` to its end."""
    return subprocess.run(
        [SERVER_PYTHON, "-m", "reverb_writer_server", *arguments],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
        env={**os.environ, **(environment or {})},
    )


class ServiceProcess:
    """`reverb-writer-server serve` on free ports."""

    def __init__(
        self, folder: Path, configuration: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        """Start it; `configuration` is TOML without the ports, `environment` is added to that of the tests."""
        self._environment = environment or {}
        self.port, self.http_port = free_port(), free_port()
        self.address = f"localhost:{self.port}"
        file = folder / "server.toml"
        file.write_text(configuration)
        self._log = (folder / "server.log").open("a+")
        self._line = [SERVER_PYTHON, "-m", "reverb_writer_server", "serve", "--config", str(file), *arguments]
        self.process = self._start()

    def restart(self) -> None:
        """Start it again on its ports, after its end."""
        self.process.communicate()
        self.process = self._start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait for the line that says that it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(f"reverb_writer_server: ready at {self.address}, tables: "), self.log()

    def log(self) -> str:
        """Return its log so far."""
        return Path(self._log.name).read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body of its answer over HTTP; 0 if nothing listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=PATIENCE_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        """Return what the status page shows."""
        value: dict[str, Any] = json.loads(self.get("/status.json")[1])
        return value

    def metrics(self) -> dict[str, float]:
        """Return the value of each metric, by its name and labels as the server writes them."""
        status, text = self.get("/metrics")
        assert status == 200
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    def child(self) -> int:
        """Return the number of the process that has Reverb in it."""
        children = self._children()
        assert children, f"the server has lost its child:\n{self.log()}"
        return int(children[0])

    def restores(self) -> bool:
        """Return whether a child of it reads the chunks of a checkpoint."""
        for child in self._children():
            with contextlib.suppress(OSError):  # a file was closed, or the child has ended
                if any(file.readlink().name == "chunks.tfrecord" for file in Path(f"/proc/{child}/fd").iterdir()):
                    return True
        return False

    def _children(self) -> list[str]:
        """Return the processes that its threads have started."""
        found: list[str] = []
        for thread in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # the thread has ended
                found += thread.read_text().split()
        return found

    def _start(self) -> subprocess.Popen[str]:
        ports = {"REVERB_WRITER__PORT": str(self.port), "REVERB_WRITER__HTTP__PORT": str(self.http_port)}
        return subprocess.Popen(
            self._line,
            stdin=subprocess.PIPE,  # for --end-with-input
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **self._environment, **ports},
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it for good, whatever it does."""
        self.process.kill()
        self.process.communicate()
        self._log.close()


@contextlib.contextmanager
def service(folder: Path, configuration: str, *arguments: str) -> Iterator[ServiceProcess]:
    """Start a service that is ready, and end it."""
    with contextlib.closing(ServiceProcess(folder, configuration, *arguments)) as process:
        process.wait_ready()
        yield process


def sizes(address: str) -> dict[str, int]:
    """Return how many items each table has."""
    with rw.Client(address) as client:
        return {name: info.current_size for name, info in client.server_info().items()}


def configuration(folder: Path, table: str = "", *, every_s: float = 0, keep: int = 2) -> str:
    """Return that of a table `replay` of 1,000 items, and of checkpoints in `folder`; `table` has more of the table."""
    return f"""
        [log]
        figures_every_s = 0.5
        [checkpoints]
        directory = "{folder / "checkpoints"}"
        every_s = {every_s}
        keep = {keep}
        [tables.replay]
        max_size = 1000
        {table}
    """


def insert(address: str, *numbers: int, table: str = "replay") -> None:
    """Insert items of a number each."""
    with rw.Client(address) as client:
        for number in numbers:
            client.insert(np.array([number]), {table: 1.0})


def kept(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are kept, oldest first."""
    path = folder / "checkpoints" / "kept"
    return sorted(one.name for one in path.iterdir() if one.name[0] != ".") if path.is_dir() else []


def flip(path: Path) -> None:
    """Damage a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
