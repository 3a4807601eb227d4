"""The signals that stop a server, and that of its parent's end, which the kernel sends. Linux only, as the server is.

Handlers queue them, and the service reads them from the queue.

SIGHUP is one: it comes when a terminal is closed, and would otherwise end the process without a checkpoint.

`signal.sigtimedwait` is not used: in CPython 3.11 it returns a signal that was not sent if the process is stopped for
longer than its time-out and continued (SIGSTOP, a debugger, a frozen container).
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal

PARENT_ENDED = signal.SIGUSR1
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NO_SIGNAL = 0
_PR_SET_PDEATHSIG = 1
_received: queue.SimpleQueue[int] = queue.SimpleQueue()  # a handler may put while the same thread gets


def install_handlers(*, has_parent: bool) -> None:
    """Queue these signals for `next_signal`, instead of ending the process; call it in the main thread.

    `PARENT_ENDED` is left as it is without a parent: Slurm's script ignores it for all processes.
    """
    for handled in (*_ENDING, *([PARENT_ENDED] if has_parent else [])):
        signal.signal(handled, lambda number, _: _received.put(number))


def ignore() -> None:
    """Ignore them from now on: the interpreter takes their handlers away when it ends, and the next would kill it."""
    for handled in (*_ENDING, PARENT_ENDED):
        signal.signal(handled, signal.SIG_IGN)


def next_signal(timeout_s: float) -> signal.Signals | None:
    """Return the next signal, or None if none is received within `timeout_s` seconds, or before `wake`."""
    try:
        number = _received.get(timeout=timeout_s)
    except queue.Empty:
        return None
    return None if number == _NO_SIGNAL else signal.Signals(number)


def wake() -> None:
    """Have `next_signal` return at once, without a signal."""
    _received.put(_NO_SIGNAL)


def end_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal when the thread that has started this process ends; call it in the main thread.

    It may come more than once: the kernel gives an orphan to the process's other threads, and these end, too. If the
    process `parent` has ended before this call, this one ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
