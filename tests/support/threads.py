"""The threads of the package in this process."""

from __future__ import annotations

import threading

from reverb_writer.transport.loop import THREAD_NAME


def our_threads(prefix: str = "reverb-writer") -> list[str]:
    """Return the names of the package's threads that run now, sorted.

    Not the loop's, which never ends; nor those of a `LocalServer` in this process, which end with it.
    """
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefix))
    return [name for name in names if name != THREAD_NAME and not name.startswith("reverb-writer-local")]
