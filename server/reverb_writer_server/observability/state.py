"""What the service knows of itself, in one place for health, metrics, page and log."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from reverb_writer_server.checkpoints.contents import Checkpoint
from reverb_writer_server.observability.memory import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import Monitor

__all__ = ["CheckpointLog", "State"]

_ANSWER_WITHIN_S = 2.0


@dataclass(frozen=True)
class CheckpointLog:
    """What became of checkpoints so far.

    Attributes:
        latest: the newest complete one; None if there is none.
        size_bytes: of that one.
        kept: how many there are.
        took_s: seconds that this service's last one took; None before the first.
        failures: how many failed.
    """

    latest: Checkpoint | None = None
    size_bytes: int = 0
    kept: int = 0
    took_s: float | None = None
    failures: int = 0

    def age_s(self) -> float | None:
        """Return the age of the newest one in seconds; None if there is none."""
        return None if self.latest is None else max(0.0, time.time() - self.latest.written_at.timestamp())


class State:
    """Written by the service, read by all others. Thread-safe: what is read is replaced as a whole.

    Attributes:
        phase: "starting", "restoring", "serving", "draining" or "stopped".
        detail: a few words more, such as the progress of a restore.
        monitor: None before the server runs.
        checkpoints: what became of them.
        keeps_checkpoints: whether there is a folder for them.
        starts: how often a server has started on that folder; 1 without one.
        processes: numbers of the processes that make up the server.
    """

    def __init__(self) -> None:
        """Begin to start."""
        self.phase = "starting"
        self.detail = ""
        self.address = ""
        self.monitor: Monitor | None = None
        self.checkpoints = CheckpointLog()
        self.keeps_checkpoints = False
        self.starts = 1
        self.started_at = time.time()
        self.processes: tuple[int | str, ...] = ("self",)
        self.estimates: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def ready(self) -> tuple[bool, str]:
        """Return whether clients can use the server now, and in words why or why not."""
        if self.phase != "serving" or self.monitor is None:
            return False, f"{self.phase} {self.detail}".strip()
        if not self.monitor.answers(_ANSWER_WITHIN_S):
            return False, f"server_info gets no answer within {_ANSWER_WITHIN_S:g} s"
        return True, "serving"

    def snapshot(self) -> dict[str, Any]:
        """Return all of it as JSON scalars."""
        log = self.checkpoints
        return {
            "phase": self.phase,
            "detail": self.detail,
            "address": self.address,
            "uptime_s": time.time() - self.started_at,
            "starts": self.starts,
            "memory": {
                "used_bytes": used_bytes(self.processes),
                "available_bytes": available_bytes(),
                "estimated_bytes": sum(size or 0 for size in self.estimates.values())
                if all(size is not None for size in self.estimates.values())
                else None,
            },
            "checkpoints": {
                "kept": log.kept,
                "age_s": log.age_s(),
                "name": log.latest and log.latest.name,
                "size_bytes": log.size_bytes,
                "took_s": log.took_s,
                "failures": log.failures,
                "on_disk": self.keeps_checkpoints,
            },
            "tables": self.monitor.snapshot() if self.monitor is not None else [],
        }
