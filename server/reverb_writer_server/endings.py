"""The signals that end a server: waited for, never handled, so that nothing is interrupted unexpectedly."""

from __future__ import annotations

import signal

__all__ = ["block", "wait"]

_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def block() -> None:
    """Hold the signals back for `wait`.

    Call it in the main thread before anything starts a thread, NumPy included: a thread that does not hold them back,
    too, would let them end the process.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)


def wait(timeout_s: float) -> signal.Signals | None:
    """Return the next signal; None if none comes within `timeout_s` seconds."""
    info = signal.sigtimedwait(_ENDINGS, timeout_s)
    return None if info is None else signal.Signals(info.si_signo)
