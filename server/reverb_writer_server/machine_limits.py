"""What the kernel tells: limits of descriptors, processes that it ended for want of memory, and processor time."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

# The container's counts, by version 2 and 1 of control groups, and the machine's: lines of a name and a number.
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many files and sockets as the system allows; return how many.

    Each connection needs one. gRPC's listener does not recover once it has failed to get one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # no limit, which not every system accepts
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def num_oom_kills() -> int:
    """Return a number that rises whenever the kernel ends a process of this machine for want of memory."""
    total = 0
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in Path(path).read_text().splitlines())
            total += sum(int(words[1]) for words in lines if words[0] == "oom_kill")
    return total


def statistics(entry: str) -> list[str]:
    """Return the fields of /proc/ENTRY/stat from the state on; none if that process or thread has ended."""
    try:
        return Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(entry: str) -> float:
    """Return how many seconds of processor time the process or thread of /proc/ENTRY has had; 0 if it has ended."""
    return sum(map(int, statistics(entry)[11:13])) / os.sysconf("SC_CLK_TCK")
