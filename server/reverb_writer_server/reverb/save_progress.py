"""Whether a save of Reverb moves. Reverb tells nothing of it; but its files grow, or its process computes."""

from __future__ import annotations

import time
from pathlib import Path

from reverb_writer_server.reverb.supervisor import ReverbProcess

_LOOK_S = 1.0  # in less time, even a save that moves may have written nothing
_BUSY_PART = 0.1  # of a processor's time, from which on the process computes


class SaveProgress:
    """What a save has done since it was last looked at. Used by one thread."""

    def __init__(self, process: ReverbProcess, incoming: Path) -> None:
        """Begin to look.

        Args:
            process: the Reverb process.
            incoming: the folder that it writes to.
        """
        self._process, self._incoming = process, incoming
        self._moved_at, self._written, self._cpu_s = time.monotonic(), self._written_bytes(), process.cpu_s()

    def moves(self) -> bool:
        """Return whether a save is under way, of the service or of a client, and comes on."""
        return self._process.has_open(self._incoming) and self.still_s() < _LOOK_S

    def still_s(self) -> float:
        """Return for how many seconds the process has neither written nor computed, as far as calls have seen it."""
        now = time.monotonic()
        seconds = now - self._moved_at
        if seconds < _LOOK_S:
            return seconds
        written, cpu_s = self._written_bytes(), self._process.cpu_s()
        if written == self._written and cpu_s - self._cpu_s <= _BUSY_PART * seconds:
            return seconds
        self._moved_at, self._written, self._cpu_s = now, written, cpu_s
        return 0.0

    def _written_bytes(self) -> int:
        """Return the size of what Reverb has written so far."""
        try:
            return sum(file.stat().st_size for file in self._incoming.rglob("*"))
        except OSError:  # a file has gone
            return 0
