"""A thread that watches something until it is closed."""

from __future__ import annotations

import threading


class WatchThread:
    """Base of what watches in a thread of its own; a subclass defines `_run`, which ends when `_closed` is set."""

    def __init__(self, name: str, join_s: float) -> None:
        """Start the thread; `close` waits for it for `join_s` seconds."""
        self._closed = threading.Event()
        self._join_s = join_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, or leave it behind if what it watches does not answer. Idempotent."""
        self._closed.set()
        self._thread.join(self._join_s)

    def _run(self) -> None:
        raise NotImplementedError
