"""Which of several servers an actor writes to, and when it goes to another one.

rendezvous hashing of its id -> its order of the shards -> the first that answers
no confirmation for `patience_s`, or the target says "lost" -> the next that takes inserts; what is unconfirmed stays
one that it prefers answers again, or the target says "draining" -> that one, once all is confirmed
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from reverb_writer.background import Outcome, in_background
from reverb_writer.client.client import Client
from reverb_writer.client.server_calls import Server
from reverb_writer.client.targets import rank_shards
from reverb_writer.client.waiting_log import logged
from reverb_writer.errors import ReverbWriterError, ServerUnavailableError
from reverb_writer.rate_limits import inserts_progress
from reverb_writer.table_info import ServerInfo
from reverb_writer.transport.server_info import try_server_info

_LOG = logging.getLogger(__package__)
_ANSWER_WITHIN_S = 2.0
_PROGRESS_WITHIN_S = 1.0
_RETRY_S = 0.1


class ShardChangedError(Exception):
    """The session has gone to another shard, so a writer must not be used any more. Observers catch it."""


class ShardFound(NamedTuple):
    """A shard that an actor can go to."""

    shard: Server  # its connection
    info: ServerInfo  # its tables
    is_rescue: bool  # whether the actor leaves a lost shard, with what is unconfirmed there


def log_change(actor_id: str, left: Server, found: ShardFound, num_left: int, *, resend: bool) -> None:
    """Say that an actor has left a shard for the one that it has found, and what becomes of unconfirmed items."""
    reason = "is lost" if found.is_rescue else "is not the first choice any more"
    text = f"Actor {actor_id} goes to shard {found.shard.address}; {left.address} {reason}."
    if num_left:
        fate = "sent again, and may be there twice" if resend else "dropped, and may be there all the same"
        text += f" {num_left} items were unconfirmed: they are {fate}."
    _LOG.log(logging.WARNING if num_left else logging.INFO, "%s", text)


class ActorShard:
    """The shard of one actor. Not thread-safe."""

    def __init__(self, client: Client, actor_id: str, patience_s: float, tables: Sequence[str]) -> None:
        """Begin with the actor's own shard; nothing is asked yet."""
        self.actor_id = actor_id  # what tells its order of the shards
        self._client, self._patience_s, self._tables = client, patience_s, tables
        self._shards: Sequence[Server] = ()
        self._ranked: list[Server] = []
        self._ask_at = 0.0
        self._search: Outcome[ShardFound | None] | None = None
        self.current = self._order()[0]  # the shard that it writes to

    @property
    def has_choice(self) -> bool:
        """Whether there is another shard."""
        shards = self._client.shards
        return len(shards) > 1 or shards[0] is not self.current

    def connect(self, timeout_s: float) -> ServerInfo:
        """Find the first shard that answers; say in the log every ten seconds that it is waited for.

        Raises:
            ReplayTimeoutError, ServerUnavailableError: none answers in time.
        """
        addresses = ", ".join(shard.address for shard in self._order())
        with logged(lambda: f"an observer waits for the server at {addresses}"):
            return self._ask(timeout_s)

    def is_lost(self, stalled_s: float) -> bool:
        """Whether the actor should leave, and it is time to look for another shard.

        Args:
            stalled_s: seconds without a confirmation that is due.
        """
        return self._is_lost(stalled_s) and time.monotonic() >= self._ask_at

    def look(self, stalled_s: float) -> ShardFound | None:
        """Return where to go now, if there is reason to; waits a few seconds, if the shard seems lost."""
        order, now = self._order(), time.monotonic()
        others = [shard for shard in order if shard is not self.current]
        if self._is_lost(stalled_s):
            if now < self._ask_at:
                return None
            self._ask_at, self._search = now + self._patience_s, None
            if self._makes_progress():
                return None
            self._client.connections.refresh_soon()
            found = self._first_that_takes_inserts(others, is_rescue=True)
            if found is None:
                _LOG.warning(
                    "Shard %s makes no progress, and no other one takes inserts; staying.", self.current.address
                )
            return found
        preferred = order[: order.index(self.current)] if self.current in order else others
        if self._search is not None and self._search.done():
            found, self._search = self._search.result(), None
            return found if found is not None and found.shard in preferred else None
        if preferred and self._search is None and now >= self._ask_at:
            self._ask_at = now + self._patience_s
            self._search = in_background(lambda: self._first_that_takes_inserts(preferred, is_rescue=False))
        return None

    def _makes_progress(self) -> bool:
        """Return whether the shard takes inserts of others while its rate limiters hold ours up: then it is slow."""
        if self.current.shard.state == "lost":
            return False
        answers: list[ServerInfo | None] = []
        for pause_s in (0.0, _PROGRESS_WITHIN_S):
            time.sleep(pause_s)
            try:
                answers.append(try_server_info(self.current.channel, _ANSWER_WITHIN_S))
            except ServerUnavailableError:
                return False
            if answers[-1] is None:
                return False
        before, now = answers
        return before is not None and now is not None and inserts_progress(before, now, {*self._tables})

    def _is_lost(self, stalled_s: float) -> bool:
        return stalled_s >= self._patience_s or self.current.shard.state == "lost"

    def _order(self) -> list[Server]:
        """Return the shards that may be written to, in the actor's order."""
        shards = self._client.shards
        if shards is not self._shards:
            named = {shard.name: shard for shard in self._client.in_state("up")}
            self._ranked = [named[name] for name in rank_shards(self.actor_id, named)]
            self._shards = shards
        return self._ranked

    def _ask(self, timeout_s: float) -> ServerInfo:
        """Ask one shard after the other, again and again; the first that answers is the current one."""
        if not self.has_choice:
            return self.current.request_info(timeout_s)
        until = time.monotonic() + timeout_s
        while True:
            last: ReverbWriterError | None = None
            for shard in self._order():
                try:
                    info = try_server_info(shard.channel, max(min(_ANSWER_WITHIN_S, until - time.monotonic()), 0.001))
                except ServerUnavailableError as error:
                    last = error
                    continue
                if info is not None:
                    self.current = shard
                    return info
            if time.monotonic() + _RETRY_S > until:
                names = ", ".join(shard.address for shard in self._client.shards)
                raise ServerUnavailableError(f"none of the shards answers: {names}. {last or ''}".rstrip())
            time.sleep(_RETRY_S)

    def _first_that_takes_inserts(self, shards: Sequence[Server], *, is_rescue: bool) -> ShardFound | None:
        for shard in shards:
            try:
                info = try_server_info(shard.channel, _ANSWER_WITHIN_S)
            except ReverbWriterError:
                continue
            if info is not None and all(
                name in info.tables and not info.tables[name].blocks_inserts() for name in self._tables
            ):
                return ShardFound(shard, info, is_rescue)
        return None
