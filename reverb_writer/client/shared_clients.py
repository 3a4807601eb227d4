"""Clients for `client` arguments. Objects that are given the same servers and time-out share connections."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

from reverb_writer.arguments import check_timeout
from reverb_writer.client.client import Client
from reverb_writer.client.targets import TargetSource, source_of
from reverb_writer.errors import SpecError

_ADDRESSES = (str, list, tuple, TargetSource)


def as_client(client: Any, timeout_s: float | None = None) -> tuple[Client, bool]:
    """Return a client for a `client` argument, and whether it was made here, for the caller to close.

    Thread-safe. Clients made here for the same servers and time-out share connections, closed with the last of them.

    Args:
        client: a `Client`, an address or several, a `Target` or its source, or anything with a `server_address`, such
            as `reverb.Client`.
        timeout_s: for a client made here; None for the default.
    """
    if isinstance(client, Client):
        return client, False
    address = client if isinstance(client, _ADDRESSES) else getattr(client, "server_address", None)
    if not isinstance(address, _ADDRESSES):
        raise SpecError(
            f"`client` must be a Client, an address, several, a Target or its source, or a reverb.Client, got "
            f"{type(client).__name__}."
        )
    source = source_of(address)
    timeout_s = Client.DEFAULT_TIMEOUT_S if timeout_s is None else check_timeout(timeout_s)
    # A child that was forked must not use what the parent has.
    key = (os.getpid(), timeout_s, source)
    user = _User()
    while True:
        with _sharing_lock:
            shared = _shared.get(key)
            if shared is not None:
                shared.users.add(user)
                if _shared.get(key) is shared:  # else the garbage collector has just closed its last user
                    break
                continue
        made = _Shared(Client(source, timeout_s=timeout_s))  # may wait for the source
        with _sharing_lock:
            first = _shared.setdefault(key, made)
        if first is not made:
            made.client.close()
    mine: Client = object.__new__(Client)
    mine._use(shared.client.connections, shared.client._arguments, functools.partial(_release, key, shared, user))  # noqa: SLF001
    return mine, True


class _User:
    """Stands for a client that was made here, as long as that lives."""


class _Shared:
    """Connections that several users share."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()


_shared: dict[tuple[Any, ...], _Shared] = {}
_sharing_lock = threading.RLock()  # reentrant, for the garbage collector may close a client in any thread


def _release(key: tuple[Any, ...], shared: _Shared, user: _User) -> None:
    """Close the connections if no one else uses them. Idempotent: an interrupted call is made again."""
    with _sharing_lock:
        shared.users.discard(user)
        is_last = not shared.users
        if is_last and _shared.get(key) is shared:
            del _shared[key]
    if is_last:
        shared.client.close()


def _after_fork() -> None:
    global _sharing_lock  # noqa: PLW0603  # another thread of the parent may have held it
    _sharing_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
