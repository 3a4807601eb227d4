"""The turns of servers at a folder of checkpoints: one server at a time uses it, even if they are on several machines.

A server takes the next number, exclusively, by creating its file. It begins when each server with a lower number

    has written that it has ended,
    or was on this machine and has released the lock of the folder,
    or has been silent for `LEASE_S` and has released the lock, which NFS keeps for a while after the loss of a machine.

In return, a server that sees a higher number than its own writes its last checkpoint and ends. If a server could not
read the folder for `DOUBT_S`, which is less than `LEASE_S`, the next server may have begun: it stands still and
confirms nothing until it can read the folder again. Clocks of different machines are never compared.

    reverb_writer.ray.addresses  the file of a number, which clients read
    FolderClaim                  takes a number, writes its file, reads the other files
    Turn                         the reaction of the service: wait, stand still, end
    checkpoints.owner            the lock of the folder, which a server without a number also takes
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from reverb_writer.ray.addresses import Claim, numbers_in, path_of, read_claim
from reverb_writer_server.checkpoints.owner import CheckpointError, is_locked
from reverb_writer_server.config.schema import ServerConfig
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.supervisor import ReverbProcess

LEASE_S, DOUBT_S = 20.0, 12.0
_BEAT_S = 1.0
_POLL_S = 0.1
_logger = logging.getLogger(__name__)


class ClaimError(CheckpointError):
    """A server with a higher number has taken the folder."""


class FolderClaim:
    """The claim of this server; a separate thread writes it, because a disk may not answer."""

    def __init__(self, directory: Path, tell: Callable[[], tuple[str, str]], *, machine: str | None = None) -> None:
        """Take the next number.

        `tell` returns the server's address, "" before it has one, and its phase; `machine` is the id of the machine's
        boot.
        """
        self.newer: int | None = None  # the highest number of a later server
        self._folder, self._directory = directory.parent, directory
        self._tell = tell
        self._machine = machine or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._beat, self._has_failed = 0, False
        self._looked_at = time.monotonic()
        self.number = _take_number(self._folder)
        self._write(self._tell())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="claim", daemon=True)
        self._thread.start()

    def in_doubt(self) -> bool:
        """Return whether a newer server may have begun without this one's knowledge."""
        return time.monotonic() - self._looked_at > DOUBT_S

    def wait(self, tell: Callable[[str], None]) -> None:
        """Wait until all servers with lower numbers have ended; remove their claims; refuse if a newer one exists."""
        heard: dict[
            int, tuple[int, float]
        ] = {}  # the last beat of each server, and the time at which it was read first
        while self.newer is None and (what := self._obstacle(heard)):
            tell(what)
            time.sleep(_POLL_S)
        with contextlib.suppress(OSError):  # a remaining claim only delays the next server
            for claim in self._lower() if self.newer is None else ():
                path_of(self._folder, claim.number).unlink(missing_ok=True)
                for partial in self._folder.glob(f".{claim.number}.*"):
                    partial.unlink(missing_ok=True)
        if self.newer is not None:
            raise ClaimError(
                f"{self._directory}: server {self.newer} has taken over from this one, number {self.number}. Clients "
                "find the new address themselves."
            )

    def close(self) -> None:
        """Write that this server has ended. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join(_BEAT_S)
            with contextlib.suppress(OSError):
                self._write((self._tell()[0], "ended"))

    def _keep(self) -> None:
        told, told_at = ("", ""), 0.0
        while not self._closed.wait(_POLL_S):
            now, began_at = self._tell(), time.monotonic()
            if now == told and began_at - told_at < _BEAT_S:
                continue
            told, told_at = now, began_at
            try:
                # A new file in the folder makes NFS read the folder again.
                self._write(now)
                newest = numbers_in(self._folder)[-1]
            except (OSError, IndexError) as error:
                if not self._has_failed:
                    _logger.warning("%s: cannot be written or read (%s)", self._folder, error)
                self._has_failed = True
                continue
            self._has_failed = False
            self.newer = newest if newest > self.number else None
            self._looked_at = began_at

    def _write(self, told: tuple[str, str]) -> None:
        self._beat += 1
        claim = asdict(Claim(self.number, *told, self._machine, os.getpid(), self._beat))
        del claim["number"]
        text, path = json.dumps(claim), path_of(self._folder, self.number)
        partial = self._folder / f".{self.number}.{self._machine}.{os.getpid()}"
        try:
            partial.write_text(text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with path.open("r+") as file:  # a full disk still allows to overwrite data
                file.write(text.ljust(path.stat().st_size))
        else:
            partial.replace(path)

    def _obstacle(self, heard: dict[int, tuple[int, float]]) -> str:
        """Return the reason to wait; "" if all servers with lower numbers have ended."""
        try:
            blocking = [claim for claim in self._lower() if not self._has_ended(claim, heard)]
        except OSError as error:  # for example of NFS, if a file is replaced while it is read
            return f"waits until it can read the claims of other servers ({error})"
        if not blocking:
            return ""
        return f"waits for the end of the previous server ({blocking[-1].address or 'starting'}, {blocking[-1].phase})"

    def _lower(self) -> list[Claim]:
        found = []
        for number in numbers_in(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if number < self.number:
                    found.append(read_claim(self._folder, number))
        return found

    def _has_ended(self, claim: Claim, heard: dict[int, tuple[int, float]]) -> bool:
        if claim.phase == "ended":
            return True
        if claim.machine == self._machine:
            return not is_locked(self._directory)
        now = time.monotonic()
        beat, at = heard.get(claim.number, (-1, now))
        if beat != claim.beat:
            heard[claim.number] = (claim.beat, now)
        return beat == claim.beat and now - at > LEASE_S and not is_locked(self._directory)


class Turn:
    """The turn of one server; a server that claims nothing always has its turn."""

    def __init__(self, config: ServerConfig, host: str | None, state: ServiceState) -> None:
        """Prepare; `host` is the name of this machine for clients, None to claim nothing."""
        self._directory = None if host is None else config.checkpoints_directory
        self._host, self._state = host, state
        self._claim: FolderClaim | None = None
        self.in_doubt = False  # whether another server may have begun

    @property
    def is_claimed(self) -> bool:
        """Whether this server has claimed its checkpoints."""
        return self._claim is not None

    @property
    def is_over(self) -> bool:
        """Whether a newer server has claimed the checkpoints."""
        return self._claim is not None and self._claim.newer is not None

    def take(self, resources: contextlib.ExitStack) -> None:
        """Claim the checkpoints, and wait until no other server uses them; called in the thread that does the work."""
        if self._directory is None:
            return
        self._claim = FolderClaim(self._directory, self._describe)
        resources.callback(self._claim.close)  # closed last, when this server has released everything else
        self._claim.wait(self._tell)
        self._state.detail = ""

    def _describe(self) -> tuple[str, str]:
        """Return the address of this server for clients, "" before it serves, and its phase."""
        phase, (_, colon, port) = self._state.phase, self._state.address.partition(":")
        return f"{self._host}:{port}" if colon else "", phase

    def must_end_at_once(self, process: ReverbProcess | None) -> bool:
        """Pause Reverb while in doubt; return whether a newer server may have begun meanwhile.

        In this case a last checkpoint would be too late. The main thread calls this repeatedly.
        """
        if self._claim is None or (process is not None and not process.alive()):
            self.in_doubt = False
            return False
        was_in_doubt, self.in_doubt = self.in_doubt, self._claim.in_doubt()
        if self.in_doubt and not was_in_doubt:
            _logger.error("the folder of checkpoints does not answer: Reverb is paused, another server may begin")
        if self.in_doubt and process is not None:  # each time, because it may have been started meanwhile
            process.suspend()
        elif was_in_doubt and not self.is_over and process is not None:
            process.resume()
        return was_in_doubt and not self.in_doubt and self.is_over

    def _tell(self, what: str) -> None:
        if what != self._state.detail:
            _logger.info("%s", what)
        self._state.detail = what


def _take_number(folder: Path) -> int:
    while True:
        number = 1 + max(numbers_in(folder), default=0)
        with contextlib.suppress(FileExistsError):  # another server has just taken it
            path_of(folder, number).open("x").close()
            return number
