"""The state of the service, for health checks, metrics, status page and log."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from reverb_writer_server.checkpoints.contents import Checkpoint
from reverb_writer_server.observability.memory import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import Monitor

__all__ = ["CheckpointStatus", "ServiceState"]

_ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class CheckpointStatus:
    """The checkpoints so far.

    Attributes:
        latest: the newest complete one; None if there is none.
        size_bytes: size of the latest one.
        kept: number of complete checkpoints on disk.
        took_s: duration of the last checkpoint of this service, in seconds; None before the first.
        failures: number of checkpoints that failed.
    """

    latest: Checkpoint | None = None
    size_bytes: int = 0
    kept: int = 0
    took_s: float | None = None
    failures: int = 0

    def age_s(self) -> float | None:
        """Return the age of the newest checkpoint in seconds; None if there is none."""
        return None if self.latest is None else max(0.0, time.time() - self.latest.written_at.timestamp())


class ServiceState:
    """The state of the service, written by it alone. Thread-safe for readers: each attribute is replaced as a whole.

    Attributes:
        phase: "starting", "restoring", "serving", "draining", "stopped", or "failed" if it cannot start.
        detail: more about the phase, such as the progress of a restore.
        monitor: None before the server runs.
        checkpoints: the checkpoints so far.
        keeps_checkpoints: whether there is a checkpoint folder.
        starts: number of starts of a server with that folder; 1 without one.
        process_ids: ids of the processes of the server.
        damaged: names of the checkpoints that could not be restored.
        failures: how often each job has failed.
    """

    def __init__(self) -> None:
        """Begin in the phase "starting"."""
        self.phase = "starting"
        self.detail = ""
        self.address = ""
        self.monitor: Monitor | None = None
        self.checkpoints = CheckpointStatus()
        self.keeps_checkpoints = False
        self.starts = 1
        self.started_at = time.time()
        self._began_at = time.monotonic()
        self.process_ids: tuple[int | str, ...] = ("self",)
        self.damaged: tuple[str, ...] = ()
        self.failures: Counter[str] = Counter()
        self.estimates: dict[str, int | None] = {}
        self._lock = threading.Lock()

    def ready(self) -> tuple[bool, str]:
        """Return whether clients can use the server now, and a reason."""
        if self.phase != "serving" or self.monitor is None:
            return False, f"{self.phase} {self.detail}".strip()
        if not self.monitor.answers(_ANSWER_TIMEOUT_S):
            return False, f"the server does not answer within {_ANSWER_TIMEOUT_S:g} s"
        return True, "serving"

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        log = self.checkpoints
        return {
            "phase": self.phase,
            "detail": self.detail,
            "address": self.address,
            "uptime_s": time.monotonic() - self._began_at,
            "starts": self.starts,
            "memory": {
                "used_bytes": used_bytes(self.process_ids),
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
                "damaged": self.damaged,
            },
            "job_failures": dict(self.failures),
            "tables": self.monitor.snapshot() if self.monitor is not None else [],
        }
