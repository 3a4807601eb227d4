"""The end of a process with the thread that has started it. Linux only, as the server is."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it ends; call it in the main thread.

    Args:
        parent: id of the process of that thread. If it has ended before this call, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
