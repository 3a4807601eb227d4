"""Threads for gRPC's server that do not keep the interpreter from ending.

Those of `concurrent.futures.ThreadPoolExecutor` are joined when the interpreter ends, and a stream that waits for a
rate limiter would never return. There is no bound on their number: a stream has a thread for as long as it is open, and
one that had to wait for another's end could wait for ever.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_Task = Callable[[], None]


class DaemonThreads(Executor):
    """Runs each call in a thread that has nothing to do, or in a new one. Thread-safe."""

    def __init__(self) -> None:
        """Begin without threads."""
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_idle = self._num_threads = 0
        self._ended = False

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Run a call, and return its future.

        Raises:
            RuntimeError: `shutdown` was called before.
        """
        future: Future[Any] = Future()

        def task() -> None:
            try:
                future.set_result(call(*arguments, **keywords))
            except BaseException as error:  # noqa: BLE001  # it is raised where the future is read
                future.set_exception(error)

        with self._lock:
            if self._ended:
                raise RuntimeError("the threads have ended.")
            if self._num_idle:
                self._num_idle -= 1
            else:
                self._num_threads += 1
                threading.Thread(target=self._run, name="reverb-writer-local", daemon=True).start()
        self._tasks.put(task)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002  # never waits
        """Let each thread end after its call. Idempotent."""
        with self._lock:
            self._ended = True
            for _ in range(self._num_threads):
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task
            with self._lock:
                self._num_idle += 1
