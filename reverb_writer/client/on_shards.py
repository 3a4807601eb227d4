"""Calls to all shards at once, from which shards that do not answer are left out; and what a call that waits logs."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from reverb_writer.background import Flag, in_background
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import Deadline
from reverb_writer.errors import ReplayTimeoutError, ServerUnavailableError
from reverb_writer.tables.table_info import ServerInfo

_T = TypeVar("_T")

_LOG = logging.getLogger(__package__)

LOG_EVERY_S = 10.0
_ANSWER_WITHIN_S = 2.0  # each of several servers
_RETRY_S = 0.1


def on_each(shards: Sequence[Server], verb: Callable[[Server], _T]) -> tuple[dict[Server, _T], dict[Server, Exception]]:
    """Do something on all shards at once; return what came of it, and which of them are unreachable, and why.

    Raises:
        ReverbWriterError: the first other error, once all are done.
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
    """Do something on all shards at once; return what came of it, in their order.

    Raises:
        ReverbWriterError: the first error, once all are done; one of a shard that is reachable first.
    """
    if len(shards) == 1:
        return [verb(shards[0])]
    done, unreachable = on_each(shards, verb)
    for error in unreachable.values():
        raise error
    return [done[shard] for shard in shards]


def answering(shards: Sequence[Server], timeout_s: float) -> dict[Server, ServerInfo]:
    """Return the tables of the shards that answer; of several, those that do within two seconds of a question to all.

    All are asked again until one answers.

    Raises:
        ServerUnavailableError: none does within `timeout_s` seconds; of several, whatever keeps them from it.
        ReplayTimeoutError: the only one is there, and does not answer in time.
    """
    if len(shards) == 1:
        return {shards[0]: shards[0].request_info(timeout_s)}
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
    """Return the first server that answers; if none does, or there is one, the first.

    Each is given two seconds, or half of the time that is left until `deadline`.
    """
    for shard in shards if len(shards) > 1 else ():
        left_s = deadline.timeout_s - deadline.spent_s
        with contextlib.suppress(ServerUnavailableError, ReplayTimeoutError):
            if left_s > 0:
                _ask(shard, min(left_s / 2, _ANSWER_WITHIN_S))
                return shard
    return shards[0]


def _ask(shard: Server, timeout_s: float) -> ServerInfo:
    return shard.channel.start_info(timeout_s).result()


@contextlib.contextmanager
def logged(describe: Callable[[], str]) -> Iterator[None]:
    """Log every ten seconds for how long the block has been waiting, and for what: `describe` says it."""
    done, block = Flag(), _Block()
    is_alive = weakref.ref(block)  # an interrupt may keep `done` from being set; nothing keeps the block alive
    start = time.monotonic()

    def run() -> None:
        while not done.wait(LOG_EVERY_S) and is_alive():
            _LOG.warning("%s for %.0f s.", describe(), time.monotonic() - start)

    try:
        in_background(run)
        yield
    finally:
        done.set()


class _Block:
    """Lives as long as the frame of a block that waits."""
