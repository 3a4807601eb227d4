"""The end of gRPC when the process forks, and when the interpreter ends.

Neither gRPC's clients nor its servers survive a fork: a child of a process that has used gRPC must neither call gRPC
nor delete its objects.
"""

from __future__ import annotations

import ctypes
import os

from reverb_writer.errors import ClosedError

_pid: int | None = None  # number of the process that uses gRPC


def claim() -> None:
    """Note that this process uses gRPC from now on.

    Raises:
        ClosedError: a parent process used gRPC before the fork. Both would read from the same sockets.
    """
    global _pid  # noqa: PLW0603  # one per process
    own = os.getpid()
    if _pid not in (None, own):
        raise ClosedError(
            f"process {_pid} had a client or a server when it forked this child {own}. gRPC does not survive a fork: "
            "start the child with `spawn`, or fork before you make the first client or server."
        )
    _pid = own


def is_forked() -> bool:
    """Return whether a parent process has used gRPC."""
    return _pid not in (None, os.getpid())


def keep_for_ever(thing: object) -> None:
    """Keep an object and everything that it refers to undeleted, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
