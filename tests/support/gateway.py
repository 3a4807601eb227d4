"""The gateway and the sidecar of docker/, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from waiting import eventually

SYSTEM = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
HAPROXY = shutil.which("haproxy", path=SYSTEM)
NGINX = shutil.which("nginx", path=SYSTEM)
FOLDER = Path(__file__).parents[2] / "docker"


@contextlib.contextmanager
def listening(line: list[str], port: int, log: Path | None = None, **environment: str) -> Iterator[None]:
    """Run a proxy until the end of the block; it listens on `port` when the block begins, and logs to `log`."""
    with (
        Path(log or os.devnull).open("a") as stderr,
        subprocess.Popen(line, env={**os.environ, **environment}, stderr=stderr) as process,
    ):
        try:
            eventually(lambda: process.poll() is not None or _listens(port), "it listens")
            assert process.poll() is None, f"{line[0]} refuses {environment}"
            yield
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
