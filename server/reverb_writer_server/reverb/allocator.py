"""jemalloc for the Reverb process, if it is installed.

Reverb stores an item as a tree of small objects, allocated in one thread and freed in another when its table is full.
glibc's allocator takes most of the time of an insert; jemalloc takes half of that: docs/decisions.md#allocator.
"""

from __future__ import annotations

import ctypes.util
from collections.abc import Mapping

_PRELOAD = "LD_PRELOAD"


def with_jemalloc(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process uses jemalloc.

    The environment is unchanged if it has `LD_PRELOAD`, even an empty one, or if jemalloc is not installed.
    """
    library = None if _PRELOAD in environment else ctypes.util.find_library("jemalloc")
    return dict(environment) if library is None else {**environment, _PRELOAD: library}
