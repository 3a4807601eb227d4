"""The connections of a client, which follow its target, and calls to all servers at once.

source -> look_up(), every five seconds and when a shard is unreachable -> Target -> a Server per shard

If the source fails or its target is invalid, the client keeps the last target. When a shard's address changes, its
connection object remains, so the streams of the connection reach the new address by themselves.

The connection to a shard that has left the target is closed when nothing refers to it. Observers that wait for
confirmations, and datasets that read samples in flight, refer to it until they use other shards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from reverb_writer.background import Flag, in_background, start_thread
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import LEAST_S, Deadline
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.shards.targets import Shard, ShardState, Target, TargetSource
from reverb_writer.tables.table_info import ServerInfo, check_tables_exist

_T = TypeVar("_T")

_LOG = logging.getLogger(__package__)

LOG_EVERY_S = 10.0  # while a call waits
_ANSWER_WITHIN_S = 2.0  # time for an answer, if there are several servers
_RETRY_S = 0.1
_REFRESH_S = 5.0
_NOT_BEFORE_S = 0.5  # least time between two questions to the source
_LOOK_UP_TIMEOUT_S = 10.0


class ServerSet:
    """A connection for each shard of a target. Thread-safe.

    Attributes:
        source: of targets.
        target: the newest target of the source.
        shards: the connections, in the order of the target; a new target makes a new tuple.
    """

    def __init__(self, source: TargetSource, target: Target, connect: Callable[[Shard], Server]) -> None:
        """Prepare the connections to the first `target`; follow the source, unless it is a fixed target."""
        self.source, self.target, self._connect = source, target, connect
        self._lock = threading.Lock()
        # By name, also of earlier targets while anything uses them, because a shard may return.
        self._known: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
        self._closed, self._wanted = Flag(), Flag()
        self._trouble: str | None = None  # why the newest target is not followed
        self.shards = self._connections_of(target)
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

    def in_state(self, *states: ShardState) -> Sequence[Server]:
        """Return the servers in one of these states, or all if no server is; raises as `check_usable`."""
        self.check_usable()
        return [shard for shard in self.shards if shard.shard.state in states] or self.shards

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
        for reference in self._known.valuerefs():  # a list, because the thread may add a connection meanwhile
            if (connection := reference()) is not None:
                connection.close()

    def _take(self, target: Target) -> None:
        with self._lock:
            if target == self.target:
                return
            _LOG.info("The target has changed: %s.", _text(target))
            self.shards = self._connections_of(target)
            self.target = target
        if self.is_closed:  # since the call began
            self.close()

    def _connections_of(self, target: Target) -> tuple[Server, ...]:
        connections = []
        for shard in target.shards:
            connection = self._known.get(shard.name)
            if connection is None:
                connection = self._known[shard.name] = self._connect(shard)
            else:
                connection.follow(shard)
            connections.append(connection)
        return tuple(connections)


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


# --------------------------------------------------------------------------------------------- calls to several servers


def on_each(shards: Sequence[Server], verb: Callable[[Server], _T]) -> tuple[dict[Server, _T], dict[Server, Exception]]:
    """Call all shards at once; return the results, and the errors of unreachable shards.

    Any other error is raised when all calls have ended; the first one if several fail.
    """
    outcomes = {shard: in_background(functools.partial(verb, shard)) for shard in shards}
    for outcome in outcomes.values():
        outcome.wait()
    done: dict[Server, _T] = {}
    unreachable: dict[Server, Exception] = {}
    for shard, outcome in outcomes.items():
        try:
            done[shard] = outcome.result()
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            unreachable[shard] = error
    return done, unreachable


def on_all(shards: Sequence[Server], verb: Callable[[Server], _T]) -> list[_T]:
    """Call all shards at once, and return the results in the shards' order.

    The first error is raised when all calls have ended; errors of reachable shards have precedence.
    """
    if len(shards) == 1:
        return [verb(shards[0])]
    done, unreachable = on_each(shards, verb)
    for error in unreachable.values():
        raise error
    return [done[shard] for shard in shards]


def answering(
    shards: Sequence[Server], timeout_s: float, tables: Iterable[str], *, needs_all: bool = False
) -> dict[Server, ServerInfo]:
    """Return the tables of the shards that answer. Several shards have two seconds, and are asked until one answers.

    With `needs_all`, each shard has `timeout_s` seconds, and the first error of a shard is raised.

    Raises ServerUnavailableError if no shard answers within `timeout_s` seconds, ReplayTimeoutError if the only shard
    is connected but does not answer, or StructureError if a shard lacks one of the `tables`.
    """
    if needs_all or len(shards) == 1:
        answers = on_all(shards, lambda shard: shard.channel.server_info(timeout_s))
        infos = dict(zip(shards, answers, strict=True))
    else:
        infos = _first_answers(shards, timeout_s)
    for shard, info in infos.items():
        check_tables_exist(tables, info, shard.address)
    return infos


def _first_answers(shards: Sequence[Server], timeout_s: float) -> dict[Server, ServerInfo]:
    until = time.monotonic() + timeout_s
    while True:
        wait_s = max(min(until - time.monotonic(), _ANSWER_WITHIN_S), _RETRY_S)
        found, unreachable = on_each(shards, functools.partial(_ask, timeout_s=wait_s))
        if found:
            return found
        if time.monotonic() + _RETRY_S > until:
            names = ", ".join(shard.name for shard in shards)
            why = "".join(f" {error}" for error in unreachable.values())
            raise ServerUnavailableError(f"none of {names} answers within {timeout_s:.1f} s.{why}")
        time.sleep(_RETRY_S)


def first_that_answers(shards: Sequence[Server], deadline: Deadline) -> Server:
    """Return the first server that answers within two seconds, or within half of the time left; else the first one."""
    for shard in shards if len(shards) > 1 else ():
        with contextlib.suppress(ServerUnavailableError, ReplayTimeoutError):
            _ask(shard, min(deadline.left_s() / 2, _ANSWER_WITHIN_S))
            return shard
    return shards[0]


def _ask(shard: Server, timeout_s: float) -> ServerInfo:
    return shard.channel.start_info(timeout_s).result()


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log the text of `describe` and the time spent in the block, every ten seconds."""
    # An interrupt may keep `done` from being set. Only this frame refers to `block`, so `block` ends with the frame.
    done, block = Flag(), Flag()
    is_alive = weakref.ref(block)
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S) and is_alive():
            _LOG.warning("%s (%.0f s so far).", describe(), time.monotonic() - start)

    try:
        in_background(run, or_here=False)  # it ends with the block
        yield
    finally:
        done.set()
