"""Make Reverb write checkpoints at the right times, keep them, and write the last checkpoint.

Reverb saves in one call, which returns when all data are written. It does not report progress, and two saves at once
delete each other. So the call has its own connection and is never sent twice, and before each save the service waits
for a save that a client requested. A save has succeeded when its checkpoint was read to its end and kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import reverb_writer as rw
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import parse
from reverb_writer.transport.channel import Channel
from reverb_writer_server.checkpoints.contents import Checkpoint
from reverb_writer_server.checkpoints.folder import CheckpointFolder
from reverb_writer_server.checkpoints.owner import advice_on_room
from reverb_writer_server.jobs import Jobs
from reverb_writer_server.observability.banner import format_bytes
from reverb_writer_server.observability.state import ServiceState
from reverb_writer_server.reverb.supervisor import ReverbProcess, ReverbProcessError
from reverb_writer_server.save_numbers import begin_save, publish_safe

_logger = logging.getLogger(__name__)
_POLL_S = 0.05
_FOR_EVER_S = 1e9
_CONNECT_TIMEOUT_S = 10.0
_STILL_S = 60.0  # a save that neither writes nor computes for this time stands still
_REFRESH_S = 10.0  # interval of tests whether kept checkpoints were removed by hand
_YOUNG_S = 2.0  # within this time, a client's save has opened its first file
_LOOK_S = 1.0  # within less time, even a save that progresses may have written nothing
_BUSY_PART = 0.1  # share of a processor's time from which on the process counts as computing
_ATTEMPTS = 3
_LAST_ATTEMPTS = 2


class SaveProgress:
    """The progress of a save of Reverb, which shows in growing files, or in processor time.

    Used by one thread.
    """

    def __init__(self, process: ReverbProcess, incoming: Path) -> None:
        """Start to watch; `incoming` is the folder to which the process writes."""
        self._process, self._incoming = process, incoming
        self._moved_at, self._written, self._cpu_s = time.monotonic(), self._written_bytes(), process.cpu_s()

    def moves(self) -> bool:
        """Return whether a save of the service or of a client is under way and progresses."""
        return self._process.has_open(self._incoming) and self.still_s() < _LOOK_S

    def still_s(self) -> float:
        """Return the seconds for which the process has neither written nor computed, according to earlier calls."""
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
        try:
            return sum(file.stat().st_size for file in self._incoming.rglob("*"))
        except OSError:  # a file was deleted meanwhile
            return 0


class SaveError(rw.errors.ReverbWriterError):
    """A save gave no checkpoint."""


class Saver:
    """The saves of one Reverb process. Used by one thread."""

    def __init__(
        self,
        folder: CheckpointFolder,
        process: ReverbProcess,
        state: ServiceState,
        jobs: Jobs,
        stop: threading.Event,
        *,
        restored: Checkpoint | None = None,
        safe_after: int = 1,
    ) -> None:
        """Connect, while the server still has descriptors.

        Args:
            folder: folder of the checkpoints.
            process: process that serves.
            state: state of the service.
            jobs: runs the saves, and counts failures.
            stop: ends a save early, because the last one follows.
            restored: checkpoint with which the process has begun; None if it began empty.
            safe_after: number of kept checkpoints that must have an item before its writer releases it.
        """
        self._restored, self._safe_after = -1 if restored is None else restored.sequence, safe_after
        self._first = folder.owner.mark.sequence  # the restored checkpoint and older ones have the same data
        self._is_unpublished = True  # whether writers do not know the newest safe save
        self._folder, self._process, self._state, self._jobs, self._stop = folder, process, state, jobs, stop
        self._channel = Channel(state.address, permanent=True)
        self._refreshed_at = self._began_at = time.monotonic()
        self._is_last = self._was_full = False  # whether the disk was full in the save before
        self._is_requested = threading.Event()
        self._pause = threading.Event()  # never set
        self._jobs.run("connect", self.connect)

    def tick(self) -> None:
        """Keep finished checkpoints, and save if a save is due."""
        self._jobs.run("keep", self._keep_finished)
        if self._is_unpublished:
            self._jobs.run("number", self._publish)
        is_due = 0 < self._state.checkpoint_every_s <= time.monotonic() - self._began_at
        if (is_due or self._is_requested.is_set()) and not self._stop.is_set():
            self._is_requested.clear()
            self._jobs.run("checkpoint", self._save)
        if time.monotonic() - self._refreshed_at >= _REFRESH_S:
            self._jobs.run("keep", self._refresh)

    def request(self) -> None:
        """Make the next `tick` save, even if no save is due. Any thread may call it."""
        self._is_requested.set()

    def connect(self) -> None:
        """Connect, or test the existing connection, which survives the end of the clients' connections."""
        self._channel.call(messages.SERVER_INFO, b"", _CONNECT_TIMEOUT_S)

    def save_last(self) -> bool:
        """Save all data after clients were disconnected; return whether the checkpoint is on disk and was read again.

        If a client's save is still under way, it is ended.
        """
        self._is_last = True
        self._jobs.run("keep", self._keep_finished)
        for _ in range(_LAST_ATTEMPTS):
            if self._jobs.run("checkpoint", self._save):
                return True
            self._pause.wait(_LOOK_S)  # a killed process loses its connections before it ends
            if not self._process.alive():
                break
        return False

    def _refresh(self) -> None:
        """Read the kept checkpoints from disk, and report them."""
        self._refreshed_at = time.monotonic()
        self._state.kept = self._folder.kept()

    def _publish(self) -> None:
        """Tell writers the newest save that `safe_after` checkpoints of the served data have."""
        ours = [one for one in self._folder.sound() if one.sequence > self._first or one.sequence <= self._restored]
        if len(ours) >= self._safe_after:
            publish_safe(self._channel, ours[self._safe_after - 1].save()[1])
        self._is_unpublished = False

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._channel.close()

    def _is_superseded(self) -> bool:
        """Return whether the last save will have all data of the save under way."""
        return self._stop.is_set() and not self._is_last

    def _save(self) -> None:
        """Save, and keep the result."""
        self._began_at = time.monotonic()
        for _ in range(_ATTEMPTS):
            if self._save_once():
                return
        raise SaveError(f"{_ATTEMPTS} saves in a row were deleted by saves that clients requested.")

    def _save_once(self) -> bool:
        """Save once; return False if another save has deleted the result."""
        self._wait_for_others()
        if self._is_superseded():
            return True
        self._folder.clear_unfinished(0.0 if self._stop.is_set() else _YOUNG_S)
        self._keep_finished()
        self._make_room()
        self._jobs.run("number", lambda: begin_save(self._channel))
        started = time.monotonic()
        reply = self._channel.start(messages.CHECKPOINT, b"", _FOR_EVER_S)
        try:
            if not self._wait(reply.done, self._is_superseded):
                return True
            path = Path(parse("CheckpointResponse", messages.CheckpointResponse, reply.result()).checkpoint_path)
        except ReverbProcessError:
            raise
        except rw.errors.ReverbWriterError as error:
            if self._keep_finished():  # a client's later save has the same data, and has deleted ours
                return True
            self._was_full = bool(advice_on_room(error))
            which = "the last checkpoint" if self._is_last else "a checkpoint"  # so that the log names the last one
            raise SaveError(f"Reverb could not write {which}: {error}") from error
        finally:
            reply.cancel()
        self._state.checkpoint_took_s = time.monotonic() - started
        _logger.debug("Reverb wrote %s", path)
        if not path.exists():
            self._wait_for_others()  # it began later, so it has all data of ours
        return self._keep_finished()

    def _wait(self, is_done: Callable[[], bool], may_end: Callable[[], bool]) -> bool:
        """Wait for a save, or end it when `may_end`; return whether it ended by itself."""
        progress = SaveProgress(self._process, self._folder.incoming)
        while not is_done():
            if not self._process.alive():
                raise ReverbProcessError("the Reverb process has died during a checkpoint.")
            if may_end():
                with self._process.without_room():
                    self._wait(is_done, lambda: False)
                self._folder.clear_incoming()
                _logger.info("the checkpoint under way was ended: the last one follows, and has all its data")
                return False
            self._pause.wait(_POLL_S)
            self._state.work_runs()
            if progress.still_s() > _STILL_S:
                raise SaveError(
                    f"the save stands still: for {_STILL_S:g} s the Reverb process has neither written nor "
                    "computed. It may be stopped, or its disk does not answer."
                )
        return True

    def _wait_for_others(self) -> None:
        """Wait for a save that a client requested, because two saves at once delete each other."""
        if self._process.has_open(self._folder.incoming):
            _logger.info("a checkpoint that a client requested is under way")
            self._wait(lambda: not self._process.has_open(self._folder.incoming), self._stop.is_set)

    def _make_room(self) -> None:
        """Delete older kept checkpoints if the disk has no room for another; keep the newest sound one."""
        latest = self._folder.latest()
        is_full = self._was_full or (latest is not None and self._folder.free_bytes() < latest.size_bytes)
        self._was_full = False
        if is_full and (pruned := self._folder.prune(1)):
            _logger.warning(
                "the disk has no room for another checkpoint: %d older ones are deleted, and one of checkpoints.keep = "
                "%d remains. Give it more room, or lower checkpoints.keep.",
                pruned,
                self._folder.keep,
            )

    def _keep_finished(self) -> bool:
        """Keep the checkpoints that Reverb has finished, ours or a client's; return whether one was sound."""
        adopted = self._folder.adopt_finished()
        for one in adopted.kept.values():
            _logger.info("checkpoint %s, %s", one.name, format_bytes(one.size_bytes))
        if adopted.kept:
            self._is_unpublished = True
            self._refresh()
        elif adopted.refused:
            raise SaveError(f"Reverb reported success, but its checkpoint is damaged: {adopted.refused}")
        return bool(adopted.kept)
