"""jemalloc for the process that has Reverb in it, where the system has it.

Reverb keeps an item as a tree of small objects, made in one thread and deleted in another when its table is full. Most
of an insert is glibc's allocator at work on them; jemalloc takes half the time: docs/decisions/allocator.md.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping

__all__ = ["with_jemalloc"]

_PRELOAD = "LD_PRELOAD"


def with_jemalloc(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process uses jemalloc.

    It is the given one where `LD_PRELOAD` is set already, to nothing maybe, or where there is no jemalloc.
    """
    library = None if _PRELOAD in environment else ctypes.util.find_library("jemalloc")
    return dict(environment) if library is None else {**environment, _PRELOAD: library}
