"""The signals that stop a server. Linux only, as the server is.

Handlers queue the signals, and the service reads the queue.

One of these signals is SIGHUP: a closed terminal sends it, and it would otherwise end the process without a checkpoint.
A server that must end with the program that started it sends SIGHUP to itself.

`signal.sigtimedwait` is not used: in CPython 3.11 it returns a signal that was not sent if the process is stopped for
longer than its time-out and continued (SIGSTOP, a debugger, a frozen container).
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_received: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may put while the same thread gets


def install_handlers() -> None:
    """Queue these signals for `next_signal`, instead of ending the process; call it in the main thread."""
    for handled in _ENDING:
        signal.signal(handled, lambda number, _: _received.put(number))


def ignore() -> None:
    """Ignore these signals from now on: the interpreter removes handlers at its end, and a signal would kill it."""
    for handled in _ENDING:
        signal.signal(handled, signal.SIG_IGN)


def next_signal(timeout_s: float) -> signal.Signals | None:
    """Return the next signal, or None if none arrives within `timeout_s` seconds."""
    try:
        return signal.Signals(_received.get(timeout=timeout_s))
    except queue.Empty:
        return None


def end_with_input() -> None:
    """Send SIGHUP to this process when its standard input ends; a pipe ends with the process at its other end."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGHUP)

    threading.Thread(target=wait, name="input", daemon=True).start()


def end_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; call this in the main thread.

    If the process `parent` ended before this call, this process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
