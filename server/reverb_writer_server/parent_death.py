"""The end of a process with the thread that has started it, or a signal then. Linux only, as the server is."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the thread that has started this process ends; call it in the main thread.

    It may come more than once: the kernel gives an orphan to the process's other threads, and these end, too.

    Args:
        parent: id of the process of that thread. If it has ended before this call, this process ends at once.
        number: the signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
