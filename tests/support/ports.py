"""Ports for servers of the tests, which nothing else on the machine takes between two tests, or two starts of a server.

The kernel chooses ports of its own range for clients, and for servers that ask for any. A port from there that a test
has found free may be taken when its server starts, seconds later. So these are from below that range, and each process
of tests has a block of them for itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
from collections.abc import Iterator

_BLOCKS = range(12_000, 32_000, 250)


def free_port() -> int:
    """Return a port that nothing listens on, and that no other process of tests returns; not one of the last 100."""
    for port in _ports(os.getpid()):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("unreachable: the ports never end")


@functools.cache
def _ports(process: int) -> Iterator[int]:
    """Return the ports of the first block, from one on that differs between processes, that no process has."""
    first = process % len(_BLOCKS)
    for block in (*_BLOCKS[first:], *_BLOCKS[:first]):
        if _locked(block):
            return itertools.cycle(range(block, block + _BLOCKS.step))
    raise AssertionError(f"{len(_BLOCKS)} processes of tests have all ports that there are for them")


def _locked(block: int) -> bool:
    """Take a block until this process ends: the lock is a name in the abstract namespace, which vanishes with it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0reverb-writer-tests/{block}")
    except OSError:
        lock.close()
        return False
    _locks.append(lock)
    return True


_locks: list[socket.socket] = []
