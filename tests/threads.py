"""The threads of the package in this process."""

from __future__ import annotations

import threading


def our_threads(prefix: str = "reverb-writer") -> list[str]:
    """Return the names of the package's threads that run now, sorted."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefix))
