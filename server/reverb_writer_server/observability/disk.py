"""The disk, looked at every ten seconds: room for checkpoints, the newest checkpoint, the gateway's certificate.

A thread of its own looks, because a network file system may answer late or never: then these facts become old, and
nothing else waits.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

_logger = logging.getLogger(__name__)
_EVERY_S = 10.0
_JOIN_S = 1.0


@dataclass(frozen=True)
class DiskFacts:
    """The result; None if the file or folder does not exist or does not answer."""

    free_bytes: int | None = None  # on the file system of the checkpoints
    total_bytes: int | None = None  # of that file system
    certificate_expires_at: float | None = None  # Unix time at which the first of the gateway's certificates ends


@contextlib.contextmanager
def watching(directory: Path | None, certificate: Path | None, found: Callable[[DiskFacts], None]) -> Iterator[None]:
    """Call `found` with the facts, at once and every ten seconds in the block; a thread that hangs is left behind."""
    closed, told = threading.Event(), ""

    def run() -> None:
        nonlocal told
        while not closed.wait(_EVERY_S):
            told = _look(directory, certificate, found, told)

    told = _look(directory, certificate, found, told)
    thread = threading.Thread(target=run, name="disk-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_JOIN_S)


def _look(directory: Path | None, certificate: Path | None, found: Callable[[DiskFacts], None], told: str) -> str:
    """Look once; log what cannot be read unless it was `told`, and return it."""
    trouble = []
    free = total = expires_at = None
    if directory is not None:
        try:
            total, _, free = shutil.disk_usage(directory)
        except OSError as error:
            trouble.append(f"cannot look at the checkpoints: {error}")
    if certificate is not None:
        try:
            certificates = x509.load_pem_x509_certificates(certificate.read_bytes())
            expires_at = min(one.not_valid_after_utc.timestamp() for one in certificates)
        except (OSError, ValueError) as error:
            trouble.append(f"cannot read the gateway's certificate {certificate}: {error}")
    found(DiskFacts(free, total, expires_at))
    if trouble and "; ".join(trouble) != told:
        _logger.warning("%s", "; ".join(trouble))
    return "; ".join(trouble) or told
