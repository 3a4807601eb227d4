"""`docker-compose.yml` under a name of its own, on free ports, with a real engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from ports import free_port
from waiting import eventually

ROOT = Path(__file__).parents[2]
_DOCKER = shutil.which("docker") or "docker"
_BUILD_S = 1800
_CALL_S = 300


def engine() -> bool:
    """Return whether there is a Docker engine."""
    return shutil.which("docker") is not None and not _quiet([_DOCKER, "info"])


def _compose_command() -> list[str]:
    """Return Compose v2 if it is there, else docker-compose 1.29."""
    return [_DOCKER, "compose"] if not _quiet([_DOCKER, "compose", "version"]) else ["docker-compose"]


def _quiet(line: list[str]) -> int:
    return subprocess.run(line, capture_output=True, timeout=60, check=False).returncode


def docker(*arguments: str, check: bool = True, timeout_s: float = _CALL_S) -> subprocess.CompletedProcess[str]:
    """Run docker."""
    return subprocess.run([_DOCKER, *arguments], capture_output=True, text=True, timeout=timeout_s, check=check)


class Project:
    """The services, until it is closed."""

    def __init__(self, name: str, **environment: str) -> None:
        """Choose ports; nothing is started. `environment` may be changed between calls."""
        self.http_port, self.port, self.gateway_port = free_port(), free_port(), free_port()
        self._name = name
        self.environment = {
            **os.environ,
            "REPLAY_PORT": str(self.port),
            "REPLAY_HTTP_PORT": str(self.http_port),
            "GATEWAY_PORT": str(self.gateway_port),
            **environment,
        }
        self._command = _compose_command()

    def __call__(self, *arguments: str, timeout_s: float = _CALL_S) -> str:
        """Run Compose and return what it says."""
        line = [*self._command, "-f", str(ROOT / "docker-compose.yml"), "-p", self._name, *arguments]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=timeout_s, check=False, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def build(self, *services: str) -> None:
        """Build images."""
        self("build", *services, timeout_s=_BUILD_S)

    def container(self, service: str) -> str:
        """Return the identity of a service's only container."""
        return self("ps", "--all", "-q", service).split()[0]

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of a service's container."""
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)).stdout)[0]
        return found

    def run(self, service: str, *line: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container."""
        return docker("exec", self.container(service), *line, check=check)

    def status(self) -> dict[str, Any]:
        """Return what the status page shows."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status.json", timeout=30) as reply:
            value: dict[str, Any] = json.load(reply)
        return value

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each table; none while the server does not answer."""
        try:
            return {table["name"]: table for table in self.status()["tables"]}
        except OSError:
            return {}

    def wait_for(self, table: str, figure: str, at_least: float) -> None:
        """Wait until a figure of a table is that high."""
        eventually(lambda: self.tables().get(table, {}).get(figure, -1) >= at_least, f"{table}: {figure} >= {at_least}")

    def close(self) -> None:
        """Remove containers, networks and volumes."""
        self("down", "--volumes", "--timeout", "30")
