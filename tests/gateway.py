"""HAProxy with a configuration of docker/, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from service_process import eventually

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
FOLDER = Path(__file__).parent.parent / "docker"


@contextlib.contextmanager
def haproxy(configuration: Path, port: int, **environment: str) -> Iterator[None]:
    """Run HAProxy until the end of the block; it listens on `port` when the block begins."""
    assert HAPROXY is not None
    with subprocess.Popen(
        [HAPROXY, "-db", "-f", str(configuration)], env={**os.environ, **environment}, stderr=subprocess.DEVNULL
    ) as process:
        try:
            eventually(lambda: process.poll() is not None or _listens(port), "HAProxy listens")
            assert process.poll() is None, f"HAProxy refuses {configuration}"
            yield
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
