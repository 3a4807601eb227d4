"""The end of gRPC when the process forks, and when the interpreter ends.

gRPC does not survive a fork, neither its clients nor its servers: in the child of a process that has used it, no call
of it may be made, and no object of it may be deleted.
"""

from __future__ import annotations

import ctypes
import os

from reverb_writer.errors import ClosedError

_pid: int | None = None  # of the process that uses gRPC


def claim() -> None:
    """Note that this process uses gRPC from now on.

    Raises:
        ClosedError: the process that forked this one used it. Both would read from the same sockets.
    """
    global _pid  # noqa: PLW0603  # one for each process
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
    """Keep an object, and all that it refers to, from being deleted, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
