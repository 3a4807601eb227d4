"""Periodic work of a service. A job that fails is counted and logged, and the service continues."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable

from reverb_writer.errors import ReverbWriterError
from reverb_writer_server.checkpoints.owner import advice_on_room
from reverb_writer_server.observability.state import Job

_logger = logging.getLogger(__name__)
_TICK_S = 1.0


class Jobs:
    """Runs jobs by name, in the caller's thread or periodically in its own thread. Thread-safe."""

    def __init__(self, failures: Counter[Job]) -> None:
        """Take the counter of failures; `start` starts the thread."""
        self._failures = failures
        self._told: dict[Job, str] = {}
        self._periodic: list[tuple[Job, float, Callable[[], object]]] = []
        self._began_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run_periodic, name="jobs", daemon=True)

    def run(self, name: Job, job: Callable[[], object]) -> bool:
        """Run a job and return whether it succeeded; an error that repeats is logged once."""
        try:
            job()
        except Exception as error:  # the service continues after any error
            self._failures[name] += 1
            text = f"{type(error).__name__}: {error}"
            reason = re.sub(r"\d", "", text)  # a path may contain the name of a checkpoint, which is new each time
            if self._told.get(name) != reason:
                self._told[name] = reason
                expected = isinstance(error, ReverbWriterError | OSError)  # its message is enough
                said = f"{error if expected else text}{advice_on_room(error)}"
                _logger.log(logging.ERROR, "%s failed: %s", name, said, exc_info=not expected)
            return False
        self._told.pop(name, None)
        return True

    def every(self, name: Job, every_s: float, job: Callable[[], object]) -> None:
        """Make the thread run a job every `seconds`, 0 for never; call this before `start`."""
        if every_s:
            self._periodic.append((name, every_s, job))

    def start(self, *, at_once: bool = False) -> None:
        """Start the thread, which runs all jobs `at_once` or after their first interval."""
        self._began_at = -math.inf if at_once else time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, without waiting for a running job. Idempotent."""
        self._closed.set()

    def _run_periodic(self) -> None:
        ran_at = dict.fromkeys((name for name, _, _ in self._periodic), self._began_at)
        while not self._closed.is_set():
            for name, every_s, job in self._periodic:
                if time.monotonic() - ran_at[name] >= every_s:
                    ran_at[name] = time.monotonic()
                    self.run(name, job)
            self._closed.wait(_TICK_S)
