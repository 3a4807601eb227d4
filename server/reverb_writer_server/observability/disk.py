"""What lies on disk, looked at every ten seconds: room for checkpoints, the newest of them, the gateway's certificate.

A thread of its own looks, because a network file system may answer late or never: then these facts become old, and
nothing else waits.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

_logger = logging.getLogger(__name__)
_EVERY_S = 10.0
_JOIN_S = 1.0


@dataclass(frozen=True)
class DiskFacts:
    """What was found; None if there is no such file or folder, or it does not answer."""

    free_bytes: int | None = None  # on the file system of the checkpoints
    total_bytes: int | None = None  # of that file system
    certificate_expires_at: float | None = None  # Unix time at which the first of the gateway's certificates ends


class DiskWatch:
    """Looks at once, and then every ten seconds in its own thread until it is closed."""

    def __init__(self, directory: Path | None, certificate: Path | None, found: Callable[[DiskFacts], None]) -> None:
        """Look, and start the thread; `found` is called with what was found."""
        self._directory, self._certificate, self._found = directory, certificate, found
        self._told = ""
        self._look()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, or leave it behind if the disk does not answer. Idempotent."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._look()

    def _look(self) -> None:
        trouble = []
        free = total = expires_at = None
        if self._directory is not None:
            try:
                total, _, free = shutil.disk_usage(self._directory)
            except OSError as error:
                trouble.append(f"cannot look at the checkpoints: {error}")
        if self._certificate is not None:
            try:
                certificates = x509.load_pem_x509_certificates(self._certificate.read_bytes())
                expires_at = min(one.not_valid_after_utc.timestamp() for one in certificates)
            except (OSError, ValueError) as error:
                trouble.append(f"cannot read the gateway's certificate {self._certificate}: {error}")
        self._found(DiskFacts(free, total, expires_at))
        if trouble and (told := "; ".join(trouble)) != self._told:
            self._told = told
            _logger.warning("%s", told)
