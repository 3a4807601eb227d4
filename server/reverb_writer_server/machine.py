"""Figures of the kernel: descriptors, memory and its limits, processor time, processes that it ended."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path

# The container's counts, by version 2 and 1 of control groups, and the machine's: lines of a name and a number.
_OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")
_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63


def raise_descriptor_limit() -> int:
    """Let this process and its children open as many descriptors as the system allows; return their number.

    Each connection needs one. gRPC's listener does not recover after it has failed to get one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not every system accepts an infinite limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def num_oom_kills() -> int:
    """Return a number that rises whenever the kernel ends a process of this machine because memory ran out."""
    total = 0
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in Path(path).read_text().splitlines())
            total += sum(int(words[1]) for words in lines if words[0] == "oom_kill")
    return total


def statistics(entry: str) -> list[str]:
    """Return the fields of /proc/ENTRY/stat from the state on; none if the process or thread has ended."""
    try:
        return Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(entry: str) -> float:
    """Return the processor time of the process or thread of /proc/ENTRY in seconds; 0 if it has ended."""
    return sum(map(int, statistics(entry)[11:13])) / os.sysconf("SC_CLK_TCK")


def available_bytes(cgroup: Path = _CGROUP, own_groups: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory limit of the container, of systemd's unit or of Slurm's job; without one, the machine's memory.

    Args:
        cgroup: the mounted control groups; in a container, its own group.
        own_groups: the file that names this process's group, as `0::/system.slice/replay.service`.
    """
    machine = next(
        int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    limits = [_number(cgroup / "memory/memory.limit_in_bytes")]
    groups = own_groups.read_text().splitlines() if own_groups.exists() else []
    own = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), "")
    limits += [_number(cgroup / group / "memory.max") for group in (Path(own), *Path(own).parents)]
    return min([machine, *(limit for limit in limits if limit is not None and limit < _NO_LIMIT)])


def used_bytes(processes: Iterable[int | str] = ("self",)) -> int:
    """Return the resident memory of these processes, as far as they run."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))
    return total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
