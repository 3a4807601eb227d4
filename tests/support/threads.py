"""The threads of the package in this process, and calls in threads of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from reverb_writer.transport.loop import THREAD_NAME


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what calls return that are made at once, each in a thread of its own; or raise what the first raises."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [made.result() for made in [threads.submit(call) for call in calls]]


@contextlib.contextmanager
def soon(work: Callable[[], object], after_s: float = 0.1) -> Iterator[None]:
    """Have another thread do something while the block waits for it; it has come back when the block has ended."""
    timer = threading.Timer(after_s, work)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def our_threads(prefix: str = "reverb-writer") -> list[str]:
    """Return the names of the package's threads that run now, sorted.

    Not the loop's, which never ends; nor those of a `LocalServer` in this process, which end with it.
    """
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefix))
    return [name for name in names if name != THREAD_NAME and not name.startswith("reverb-writer-local")]
