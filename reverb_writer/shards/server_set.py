"""The connections of a client, which follow its target.

source -> look_up(), every five seconds and when a shard is unreachable -> Target -> a ShardServer per shard

If the source fails or its target is invalid, the client keeps the last target. When a shard's address changes, its
connection object remains, so the streams of the connection reach the new address by themselves.

The connection to a shard that has left the target is closed when nothing refers to it. Observers that wait for
confirmations, and datasets that read samples in flight, refer to it until they use other shards.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from reverb_writer.background import Flag, logged, start_thread
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import LEAST_S, Deadline
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.shards.targets import Shard, ShardState, Target, TargetSource
from reverb_writer.transport.channel import Channel

_LOG = logging.getLogger(__package__)

_RETRY_S = 0.1
_REFRESH_S = 5.0
_NOT_BEFORE_S = 0.5  # least time between two questions to the source
_LOOK_UP_TIMEOUT_S = 10.0


class ShardServer:
    """A shard of a client's target, and the server that it names. Thread-safe.

    Attributes:
        server: remains when the address changes.
    """

    def __init__(self, entry: Shard, server: Server) -> None:
        """Take an entry of the target, and the server at its address."""
        self._entry, self.server = entry, server

    @property
    def name(self) -> str:
        """The shard's name; it remains when the address changes."""
        return self._entry.name

    @property
    def state(self) -> ShardState:
        """The shard's state in the newest target."""
        return self._entry.state

    @property
    def address(self) -> str:
        """The server's address, as given."""
        return self.server.address

    @property
    def channel(self) -> Channel:
        """The connection to the server."""
        return self.server.channel

    def follow(self, entry: Shard) -> None:
        """Take the shard's entry in the newest target; connect to its address if that is another one."""
        if entry.address != self._entry.address:
            self.channel.redirect(entry.address)
        self._entry = entry


class ServerSet:
    """A server for each shard of a target. Thread-safe.

    Attributes:
        source: of targets.
        target: the newest target of the source.
        shards: in the order of the target; a new target makes a new tuple.
    """

    def __init__(self, source: TargetSource, target: Target, connect: Callable[[str], Server]) -> None:
        """Prepare the first `target`; follow the source, unless it is a fixed target. `connect` gets an address."""
        self.source, self.target, self._connect = source, target, connect
        self._lock = threading.Lock()
        # By name, also of earlier targets while anything uses them, because a shard may return.
        self._known: weakref.WeakValueDictionary[str, ShardServer] = weakref.WeakValueDictionary()
        self._closed, self._wanted = Flag(), Flag()
        self._trouble: str | None = None  # why the newest target is not followed
        self.shards = self._shards_of(target)
        if not isinstance(source, Target):
            # The thread must not keep an unused client alive.
            follow = functools.partial(_follow, weakref.ref(self), self._closed, self._wanted)
            start_thread(follow, "reverb-writer-target")

    @property
    def address(self) -> str:
        """The servers' addresses, separated by commas."""
        return ",".join(shard.address for shard in self.shards)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def may_have_several(self) -> bool:
        """Whether there are several servers now, or may be later."""
        return len(self.shards) > 1 or not isinstance(self.source, Target)

    def check_usable(self) -> None:
        """Raise ClosedError if the connections are closed, or belong to a parent process."""
        if self.is_closed:
            raise ClosedError(f"the client of {self.address} is closed. Make a new one.")
        for shard in self.shards:
            shard.channel.check_usable()

    def in_state(self, *states: ShardState) -> Sequence[ShardServer]:
        """Return the servers in one of these states, or all if no server is; raises as `check_usable`."""
        self.check_usable()
        return [shard for shard in self.shards if shard.state in states] or self.shards

    def refresh_soon(self) -> None:
        """Ask the source soon because a shard is unreachable. Does not wait."""
        self._wanted.set()

    def refresh(self) -> None:
        """Ask the source and follow its target; if that fails, log each new cause once."""
        try:
            target = _look_up(self.source, _LOOK_UP_TIMEOUT_S)
            self._take(target)
        except Exception as error:  # noqa: BLE001  # a caller's source may raise anything, and nothing is to stop
            if str(error) != self._trouble:
                self._trouble = str(error)
                _LOG.warning("No new target: %s The client keeps %s.", error, _text(self.target))
            return
        if self._trouble is not None:
            self._trouble = None
            _LOG.info("The source returns a target again: %s.", _text(target))

    def close(self) -> None:
        """Close the connections. Idempotent; does nothing in a forked child."""
        self._closed.set()
        self._wanted.set()
        for reference in self._known.valuerefs():  # a list, because the thread may add a shard meanwhile
            if (shard := reference()) is not None:
                shard.server.close()

    def _take(self, target: Target) -> None:
        with self._lock:
            if target == self.target:
                return
            _LOG.info("The target has changed: %s.", _text(target))
            self.shards = self._shards_of(target)
            self.target = target
        if self.is_closed:  # since the call began
            self.close()

    def _shards_of(self, target: Target) -> tuple[ShardServer, ...]:
        shards = []
        for entry in target.shards:
            shard = self._known.get(entry.name)
            if shard is None:
                shard = self._known[entry.name] = ShardServer(entry, self._connect(entry.address))
            else:
                shard.follow(entry)
            shards.append(shard)
        return tuple(shards)


def first_target(source: TargetSource, deadline: Deadline) -> Target:
    """Ask a source until it returns a target; at the deadline, raise the source's error."""
    if isinstance(source, Target):
        return source
    with logged(lambda: f"waiting for the target of {source}"):
        while True:
            try:
                # A pause may take longer than asked for: the source, not the deadline, has the cause of a failure.
                return _look_up(source, max(deadline.timeout_s - deadline.spent_s, LEAST_S))
            except (ServerUnavailableError, ReplayTimeoutError):
                if deadline.spent_s + _RETRY_S >= deadline.timeout_s:
                    raise
            time.sleep(_RETRY_S)


def _look_up(source: TargetSource, timeout_s: float) -> Target:
    target = source.look_up(timeout_s)
    if not isinstance(target, Target):
        raise SpecError(f"`look_up` of {source!r} must return a `Target`, got {target!r}.")
    return target


def _follow(ref: weakref.ref[ServerSet], is_closed: Flag, wanted: Flag) -> None:
    while not is_closed.wait(_NOT_BEFORE_S):
        wanted.wait(_REFRESH_S)
        wanted.clear()
        connections = ref()
        if connections is None or is_closed.is_set():
            return
        connections.refresh()
        del connections


def _text(target: Target) -> str:
    shards = ", ".join(
        shard.name
        + (f" at {shard.address}" if shard.name != shard.address else "")
        + (f" ({shard.state})" if shard.state != "up" else "")
        for shard in target.shards
    )
    return f"{len(target.shards)} shards: {shards}"
