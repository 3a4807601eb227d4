"""A `Prefetch` in a process of its own: the learner's process neither fetches nor decodes.

    Worker -- take, rest, stats, why, close --> worker_process: Prefetch -> batches in shared memory
           <-- batch, stats, ...             --

A batch takes no copy if its arrays may be overwritten later, and one if they are to be the caller's own.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from reverb_writer.client import Client
from reverb_writer.errors import ClosedError, ReverbWriterError, SpecError
from reverb_writer.reading.prefetch import Fetched, Plan
from reverb_writer.reading.shared_memory import MappedArrays, SharedPlace, is_supported
from reverb_writer.reading.stats import PrefetchStats
from reverb_writer.wire.samples import Column

__all__ = ["Worker"]

_ANSWER_S = 5.0
_END_S = 3.0


class Worker:
    """The samples of one table on one server, fetched ahead in another process.

    Like a `Prefetch`, of which it has the methods that readers use.

    Attributes:
        address: of the server.
        gone_since: `time.monotonic()` when the connection was lost, as far as `why_waiting` was told; else None.
    """

    def __init__(self, client: Client, plan: Plan, *, wake: Callable[[], None]) -> None:
        """Start the process.

        Args:
            client: of one server; the process makes one like it.
            plan: what is fetched; one batch more than it says may be ahead, and wait here.
            wake: called whenever something is ready, from a thread.

        Raises:
            SpecError: there is no shared memory, or no Python to start, on this system.
        """
        if not is_supported() or not sys.executable:
            raise SpecError("`num_workers` must be 0 here: worker processes need Linux and a Python executable.")
        self.address = client.address
        self.gone_since: float | None = None
        self._copies, self._wake = not plan.reuses_buffers, wake
        self._lock = threading.Lock()  # guards what follows
        self._ready: collections.deque[Fetched | ReverbWriterError] = collections.deque()
        self._stats = PrefetchStats()
        self._ended = self._closed = False
        self._asking = threading.Lock()  # one question at a time
        self._sending = threading.Lock()
        self._answered = threading.Event()
        self._answer: Any = None
        self._connection, theirs = multiprocessing.Pipe()
        self._mapped = MappedArrays(self._connection)
        self._pid = os.getpid()
        with theirs:
            # A script's `__main__` is not run again, as `multiprocessing` would.
            start = f"import sys; sys.path[:] = {sys.path!r}; from reverb_writer.reading import worker_process as w; "
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, with nothing from outside
                [sys.executable, "-c", f"{start}w.main({descriptor})"],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
            )
        self._connection.send((client, dataclasses.replace(plan, reuses_buffers=True)))
        self._thread = threading.Thread(target=self._receive, name="reverb-writer-worker", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- for the reader

    def take(self, *, partial: bool = False) -> Fetched | None:
        """Return the next batch if it is ready; with `partial`, else what there is of one.

        Raises:
            ReverbWriterError: instead of a sample that could not be decoded, or because the process or the table is
                gone.
        """
        if partial and not self._ready and not self._ended:
            self._ask("rest")
        with self._lock:
            if not self._ready:
                return None
            item = self._ready.popleft()
        if isinstance(item, ReverbWriterError):
            raise item
        self._send("take")
        return item

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that reads."""
        return self._pid != os.getpid()

    def check_usable(self) -> None:
        """Raise ClosedError in a forked child, in which nobody reads."""
        if self.is_forked:
            raise ClosedError(
                f"this dataset was made in process {self._pid} and is used in its forked child {os.getpid()}. "
                "Make one there."
            )

    @property
    def has_ended(self) -> bool:
        """Whether nothing will come any more."""
        return self._ended

    def why_waiting(self) -> str:
        """Say what keeps samples from coming."""
        why = self._ask("why")
        if why is not None:
            return str(why)
        return f"The process {self._process.pid} that fetches samples does not answer."

    def stats(self) -> PrefetchStats:
        """Return the counters so far."""
        told = self._ask("stats")
        with self._lock:
            if told is not None:
                self._stats = told
            stats = PrefetchStats(**vars(self._stats))
            stats.ready_samples += sum(len(item.infos.keys) for item in self._ready if isinstance(item, Fetched))
        return stats

    def close(self, drain_s: float = 0.0) -> None:  # noqa: ARG002  # as `Prefetch`
        """End the process; what has come can still be taken. Idempotent.

        Args:
            drain_s: has no meaning here: its tables give no items away.
        """
        if not self._closed and not self._ended:
            self.stats()
        self._closed = True
        self._send("close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._thread.join(_END_S)
        self._connection.close()

    # ----------------------------------------------------------------------------------------- the thread

    def _receive(self) -> None:
        try:
            while True:
                kind, *rest = self._connection.recv()
                if kind == "memory":
                    self._mapped.receive(*rest)
                elif kind == "batch":
                    fetched = self._fetched(*rest)
                    with self._lock:
                        self._ready.append(fetched)
                    self._wake()
                elif kind == "error":
                    with self._lock:
                        self._ready.append(rest[0])
                    self._wake()
                else:
                    if kind != "nothing":
                        self._answer, self.gone_since = rest
                    self._answered.set()
        except (EOFError, OSError):
            if not self._closed:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
                with self._lock:
                    self._ready.append(
                        ReverbWriterError(
                            f"the process {self._process.pid} that fetched samples from {self.address} has ended "
                            f"(exit code {self._process.returncode}). Look at what it printed; make a new dataset."
                        )
                    )
        finally:
            self._ended = True  # before the reader wakes
            self._answered.set()
            self._wake()

    def _fetched(self, columns: list[tuple[Any, Any, bool]], infos: Any, oldest_at: float) -> Fetched:
        made = []
        for rows, lengths, squeezed in columns:
            array = rows
            if isinstance(rows, SharedPlace):
                array = self._mapped.array(rows)
                if self._copies:
                    array = array.copy()
            made.append(Column(array, lengths, squeezed))
        return Fetched(made, infos, oldest_at)

    def _ask(self, question: str) -> Any:
        """Return the process's answer, or None if there is none in time."""
        with self._asking:
            self._answered.clear()
            self._answer = None
            if self._ended or not self._send(question) or not self._answered.wait(_ANSWER_S):
                return None
            return self._answer

    def _send(self, command: str) -> bool:
        try:
            with self._sending:
                self._connection.send(command)
        except OSError:  # the process has ended, or the connection is closed
            return False
        return True
