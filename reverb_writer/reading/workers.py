"""A `Prefetch` in a process of its own: the learner's process neither fetches nor decodes.

    Worker --- take, rest, stats, why, end --> worker_process: Prefetch -> batches in shared memory
           <-- batch, error, memory, answer ---

A batch takes no copy if its arrays may be overwritten later, and one if they are to be the caller's own. What a process
holds that never gives items away is lost to nobody, so processes are ended by SIGKILL: nothing can keep them.
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
from reverb_writer.errors import ClosedError, ReverbWriterError
from reverb_writer.reading.prefetch import Fetched, Plan
from reverb_writer.reading.shared_memory import MappedArrays, SharedPlace, is_supported
from reverb_writer.reading.stats import PrefetchStats
from reverb_writer.wire.samples import Column
from reverb_writer.wire.server_info import ServerInfo

__all__ = ["Worker", "can_start"]

_ANSWER_S = 5.0
_END_S = 3.0


def can_start() -> bool:
    """Return whether there are processes like this on this system: it needs shared memory, and Python to start."""
    return is_supported() and bool(sys.executable)


class Worker:
    """The samples of one table on one server, fetched ahead in another process.

    Like a `Prefetch`, of which it has the methods that readers use.

    Attributes:
        address: of the server.
        gone_since: `time.monotonic()` when the connection was lost, as far as the process was asked; else None.
    """

    def __init__(self, client: Client, info: ServerInfo, plan: Plan, *, wake: Callable[[], None]) -> None:
        """Start the process; `can_start` says where it cannot.

        Args:
            client: of one server; the process makes one like it.
            info: the server's tables at the beginning.
            plan: what is fetched; one batch more than it says may be ahead, and wait here.
            wake: called whenever something is ready, from a thread.
        """
        self.address = client.address
        self.gone_since: float | None = None
        self._copies, self._wake = not plan.reuses_buffers, wake
        self._lock = threading.RLock()  # guards what follows; a garbage collection under it may close a dataset
        self._ready: collections.deque[Fetched | ReverbWriterError] = collections.deque()
        self._stats = PrefetchStats()
        self._num_taken = 0  # samples; `_stats` counts them as ready
        self._heard = self._ended = self._closed = False
        self._asking = threading.Lock()  # one question at a time
        self._sending = threading.Lock()
        self._answered = threading.Event()  # whether no question is open
        self._answered.set()
        self._answer: Any = None
        self._connection, theirs = multiprocessing.Pipe()
        self._mapped = MappedArrays(self._connection)
        self._pid = os.getpid()
        with theirs:
            # A script's `__main__` is not run again, as `multiprocessing` would.
            path, descriptor = list(map(str, sys.path)), theirs.fileno()
            start = f"import sys; sys.path[:] = {path!r}; from reverb_writer.reading import worker_process as w; "
            self._process = subprocess.Popen(  # noqa: S603  # this interpreter, with nothing from outside
                [sys.executable, "-c", f"{start}w.main({descriptor})"],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the learner's, whose end ends the connection
            )
        table = dataclasses.replace(info.tables[plan.table], signature=None)  # of classes that may be there only here
        info = dataclasses.replace(info, tables={plan.table: table})
        with contextlib.suppress(ConnectionError):  # has ended already: the thread will tell
            self._connection.send((client, info, dataclasses.replace(plan, reuses_buffers=True)))
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
            if isinstance(item, Fetched):
                self._num_taken += len(item.infos.keys)
        self._send("take")
        if isinstance(item, ReverbWriterError):
            raise item
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
        return (
            f"The process {self._process.pid} that fetches samples from {self.address} does not answer. It may still "
            "start, be stopped, or lack a processor; look at it."
        )

    def stats(self) -> PrefetchStats:
        """Return the counters so far."""
        return self._latest_stats("stats")

    def _latest_stats(self, question: str) -> PrefetchStats:
        if self.is_forked:  # whose locks a thread that is not there may hold for ever
            return PrefetchStats(**vars(self._stats))
        told = self._ask(question)
        with self._lock:
            if told is not None:
                self._stats = told
            stats = PrefetchStats(**vars(self._stats))
            # The process may have told before what is here now was sent, or taken.
            here = sum(len(item.infos.keys) for item in self._ready if isinstance(item, Fetched))
            stats.ready_samples = max(stats.ready_samples - self._num_taken, here)
        return stats

    def close(self, drain_s: float = 0.0) -> None:  # noqa: ARG002  # as `Prefetch`
        """End the process; what has come can still be taken. Idempotent.

        Args:
            drain_s: has no meaning here: its tables give no items away.
        """
        closed, self._closed = self._closed, True
        is_reader = threading.current_thread() is not self._thread  # else the garbage collector has called
        if self._heard and not closed and is_reader:
            self._latest_stats("end")
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if is_reader:
            self._thread.join(_END_S)
            self._connection.close()

    # ----------------------------------------------------------------------------------------- the thread

    def _receive(self) -> None:
        try:
            while message := self._message():
                self._heard = True
                kind, *rest = message
                if kind == "memory":
                    self._mapped.receive(*rest)
                elif kind == "batch":
                    self._add(self._fetched(*rest))
                elif kind == "error":
                    self._add(*rest)
                else:
                    self._answer, self.gone_since = rest
                    self._answered.set()
            self._add_end()
        except (EOFError, ConnectionError):  # before a file descriptor
            self._add_end()
        except Exception as error:  # noqa: BLE001  # whatever it is, the reader must not wait for this process
            self._process.kill()
            self._add(
                ReverbWriterError(
                    f"cannot read what the process {self._process.pid} fetched from {self.address} ({error!r}). If "
                    "files or memory are at their limit, raise it, or take fewer `num_workers`; make a new dataset."
                )
            )
        finally:
            self._mapped.clear()
            self._ended = True  # before the reader wakes
            self._answered.set()
            self._wake()

    def _message(self) -> tuple[Any, ...] | None:
        """Return what the process sends next; None if it has ended."""
        try:
            message: tuple[Any, ...] = self._connection.recv()
        except (EOFError, OSError):  # between messages, or within one
            return None
        return message

    def _add(self, item: Fetched | ReverbWriterError) -> None:
        with self._lock:
            self._ready.append(item)
        self._wake()

    def _add_end(self) -> None:
        """Tell that the process has ended, unless it was to, or has told why."""
        if self._closed:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        if self._process.returncode != 0:
            self._add(
                ReverbWriterError(
                    f"the process {self._process.pid} that fetched samples from {self.address} has ended with exit "
                    f"code {self._process.returncode}, expected none to end before `close()`. Look at what it printed, "
                    "or whether memory ran out; make a new dataset."
                )
            )

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
            # While a question is open none follows: its answer would be taken for the next one's.
            if self.is_forked or not self._answered.is_set():
                return None
            self._answered.clear()
            self._answer = None
            if self._ended or not self._send(question):
                self._answered.set()
            return self._answer if self._answered.wait(_ANSWER_S) else None

    def _send(self, command: str) -> bool:
        """Send a command, at most a few that are not read yet: this never waits."""
        try:
            with self._sending:
                self._connection.send(command)
        except OSError:  # the process has ended, or the connection is closed
            return False
        return True
