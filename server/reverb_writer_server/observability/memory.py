"""The memory that the server takes, and that it may take."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reverb_writer.writing.memory_estimate import Estimate
from reverb_writer.writing.memory_estimate import estimate as estimate_table
from reverb_writer_server.config.schema import ServedTable

_CGROUP = Path("/sys/fs/cgroup")
_REARM_SHARE = 0.85  # of the limit of an alert, below which it may be crossed again
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63


class MemoryAlert:
    """Tells when memory crosses a limit: once, until it has fallen well below the limit.

    Attributes:
        is_above: whether the limit was crossed, and memory has not fallen below 85 % of it since.
    """

    def __init__(self, alert_bytes: int) -> None:
        """Begin below the limit."""
        self._alert_bytes, self.is_above = alert_bytes, False

    def crosses(self, now_bytes: int) -> bool:
        """Return whether memory has crossed the limit, now that it is `now_bytes`."""
        was_above = self.is_above
        self.is_above = now_bytes > self._alert_bytes * (_REARM_SHARE if was_above else 1)
        return self.is_above and not was_above


def estimate(table: ServedTable) -> Estimate:
    """Return the estimated memory of a table when it is full."""
    return estimate_table(table.config, table.sequence_length, table.stride_length, table.episode_length)


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
    """Return the resident memory of those processes that run."""
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    return total


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
