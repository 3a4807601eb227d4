"""The state of the service, for health checks, metrics, status page and log."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Literal, TypeAlias

from reverb_writer_server.checkpoints.folder import Kept
from reverb_writer_server.machine import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import Monitor

_MAX_PAUSE_S = 30.0  # limit of a pause of a live thread, whose calls end within seconds
# Factor of `max_silence_s` for the thread that waits for disks: a slow disk syncs gigabytes for minutes.
_DISK_PATIENCE = 10

Job: TypeAlias = Literal["checkpoint", "keep", "number", "connect", "figures", "memory", "disk", "certificate"]
"""The kinds of periodic work, by which failures are counted."""


class ServiceState:
    """The state of the service, which only the service writes. Thread-safe for readers: attributes are replaced."""

    def __init__(self) -> None:
        """Begin in the phase "starting"."""
        self.phase = "starting"  # then "restoring", "serving", "draining", "stopped"; or "failed" if it cannot start
        self.detail = ""  # more about the phase, such as the progress of a restore
        self.address = ""
        self.monitor: Monitor | None = None  # None before the server runs
        self.kept = Kept()
        self.keeps_checkpoints = False  # whether a folder is configured
        self.checkpoint_every_s = 0.0
        self.checkpoint_took_s: float | None = None  # duration of the last checkpoint of this service
        self.starts = 1  # number of starts with this folder
        self.previous_end = "stopped"  # end of the previous server, from the mark of the folder
        self.damaged: tuple[str, ...] = ()  # names of the checkpoints that could not be restored
        self.disk: tuple[int, int] | None = None  # free bytes and all bytes of the checkpoints' disk, if it answers
        self.certificate_expires_at: float | None = None  # Unix time at which the gateway's first certificate ends
        self.failures: Counter[Job] = Counter()
        self.reverb_pid: int | None = None  # None before it runs
        self.estimates: dict[str, int | None] = {}  # bytes of each table when it is full
        self.memory_is_high = False  # True above memory.alert_bytes, until memory is well below it
        self.max_silence_s = 0.0  # silence of Reverb after which the service is not alive; 0 for no limit
        self.started_at = time.time()
        self._began_at = self._loop_ran_at = self._work_ran_at = time.monotonic()

    @property
    def process_ids(self) -> tuple[int | str, ...]:
        """The ids of the processes of the server."""
        return ("self",) if self.reverb_pid is None else ("self", self.reverb_pid)

    def loop_runs(self) -> None:
        """Note that the service's own loop runs; the loop calls this at least once per second."""
        self._loop_ran_at = time.monotonic()

    def work_runs(self) -> None:
        """Note that the thread that keeps checkpoints runs or computes."""
        self._work_ran_at = time.monotonic()

    def work_hangs(self) -> bool:
        """Return whether that thread stands still, for example because a disk no longer answers."""
        return 0 < _DISK_PATIENCE * self.max_silence_s < time.monotonic() - self._work_ran_at

    def work_fault(self) -> str:
        """Return a sentence about the time for which that thread has stood still."""
        return f"the thread that keeps checkpoints has stood still for {time.monotonic() - self._work_ran_at:.0f} s"

    def alive(self) -> tuple[bool, str]:
        """Return whether the service works, and a reason. If it does not, it must be restarted.

        Its loop and its monitor must run. While it serves, the thread that keeps checkpoints must also run, and Reverb
        must answer at least once in `max_silence_s`, except while it writes a checkpoint that progresses.
        """
        now = time.monotonic()
        if now - self._loop_ran_at > _MAX_PAUSE_S:
            return False, f"the service's loop has not run for {now - self._loop_ran_at:.0f} s"
        monitor = self.monitor
        if monitor is None or self.phase != "serving":
            return True, "alive"
        if now - monitor.ran_at > _MAX_PAUSE_S:
            return False, f"the monitor has not run for {now - monitor.ran_at:.0f} s"
        if self.work_hangs():
            return False, self.work_fault()
        silence_s = monitor.standstill_s()
        if 0 < self.max_silence_s < silence_s:
            fault = monitor.fault() or f"the server has been silent for {silence_s:.0f} s"
            return False, f"{fault}; http.max_silence_s is {self.max_silence_s:g}"
        return True, "alive"

    def ready(self) -> tuple[bool, str]:
        """Return whether clients can use the server now, and a reason."""
        if self.phase != "serving" or self.monitor is None:
            return False, f"{self.phase} {self.detail}".strip()
        fault = self.monitor.fault()
        if not self.monitor.wait(0):
            return False, f"starting ({fault})"
        return fault is None, fault or "serving"

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        kept = self.kept
        ready, reason = self.ready()
        return {
            "phase": self.phase,
            "ready": ready,
            "reason": reason,
            "age_s": self.monitor.age_s() if self.monitor else None,
            "detail": self.detail,
            "address": self.address,
            "uptime_s": time.monotonic() - self._began_at,
            "starts": self.starts,
            "memory": {
                "used_bytes": used_bytes(self.process_ids),
                "available_bytes": available_bytes(),
                "is_high": self.memory_is_high,
                "estimated_bytes": sum(size or 0 for size in self.estimates.values()),
                "is_partial": None in self.estimates.values(),
            },
            "checkpoints": {
                "kept": kept.number,
                "age_s": None if kept.written_at is None else max(0.0, time.time() - kept.written_at),
                "name": kept.newest,
                "size_bytes": kept.size_bytes,
                "took_s": self.checkpoint_took_s,
                "failures": self.failures["checkpoint"],
                "on_disk": self.keeps_checkpoints,
                "damaged": self.damaged,
                "left_out": kept.left_out,
            },
            "job_failures": dict(self.failures),
            "tables": [
                {**table, "estimated_bytes": self.estimates.get(table["name"])}
                for table in (self.monitor.snapshot() if self.monitor is not None else [])
            ],
        }
