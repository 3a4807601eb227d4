"""How much memory this machine has."""

from __future__ import annotations

import ctypes
import os
import sys

_UNKNOWN = 8 << 30


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = [
        ("length", ctypes.c_ulong),
        ("load", ctypes.c_ulong),
        *(
            (name, ctypes.c_ulonglong)
            for name in ("total", "free", "page", "free_page", "virtual", "free_virtual", "rest")
        ),
    ]


def machine_bytes() -> int:
    """Return the size of the machine's memory; 8 GiB if it does not tell."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.total if known else _UNKNOWN
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return _UNKNOWN
