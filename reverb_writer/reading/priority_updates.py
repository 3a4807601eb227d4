"""Send new priorities to the servers while the learner continues.

put(keys, priorities) -> the newest for each key -> a thread -> the server that owns the key
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.background import Flag, LateThread, in_background
from reverb_writer.client.server_calls import Server
from reverb_writer.deadline import Deadline
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError, SpecError
from reverb_writer.leaves import host_array
from reverb_writer.replay.client import Client
from reverb_writer.slices.batch import Batch
from reverb_writer.tables.table_info import TableInfo
from reverb_writer.transitions import Transitions
from reverb_writer.transport import process_hooks

_LOG = logging.getLogger(__package__)

_BY_PRIORITY = {"prioritized", "max_heap", "min_heap"}
_MAX_KEYS = 1 << 20
_MAX_REQUEST_KEYS = 1 << 14
_LOOK_S = 0.05
_TIMEOUT_S = 5.0  # of one of several servers


class PriorityUpdates:
    """Sets priorities in one table, in a thread that starts with the first call. Thread-safe.

    Attributes:
        lost_servers: returns the names of the servers without a connection.
    """

    lost_servers: Callable[[], set[str]]

    def __init__(self, client: Client, table: TableInfo) -> None:
        """Start without priorities."""
        self._client, self._table = client, table.name
        self._warning = (
            None
            if {table.sampler, table.remover} & _BY_PRIORITY
            else f"table `{table.name}`: neither its sampler ({table.sampler}) nor its remover ({table.remover}) uses "
            "priorities, so new ones change only `info.priorities`. Use `rw.Prioritized`, or set no priorities."
        )
        self._lock = threading.Lock()
        self._changed, self._sent = Flag(), Flag()
        self._pending: dict[int, float] = {}
        self._owners: dict[int, str] = {}
        self._is_sending = self._is_closed = False
        self.num_sent = self.num_failed = self.num_gone = 0
        self._thread = LateThread(self._run, "reverb-writer-priorities")

    def remember_owner(self, keys: Sequence[int], server: Server) -> None:
        """Remember the server of each key, for as many keys as a learner can hold."""
        with self._lock:
            self._owners.update(dict.fromkeys(keys, server.name))
            _drop_oldest(self._owners)

    def put(self, batch_or_keys: Any, priorities: Any) -> None:
        """Set priorities soon; if a key has several, the last one counts."""
        process_hooks.claim()  # in a forked child, a thread of the parent may hold the lock for ever
        keys, priorities = checked_updates(batch_or_keys, priorities)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the dataset is closed. Make a new one.")
            warning, self._warning = self._warning, None
            if warning is not None:
                _LOG.warning("%s", warning)
            self._pending.update(zip(keys.tolist(), priorities.tolist(), strict=True))
            self.num_failed += _drop_oldest(self._pending)
        self._wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until all are set."""
        process_hooks.claim()  # in a forked child, a thread of the parent may hold the lock for ever
        deadline = time.monotonic() + timeout_s
        self._wake()  # `put` may have been interrupted before
        while self._pending or self._is_sending:
            if time.monotonic() >= deadline:
                raise ReplayTimeoutError(
                    f"table `{self._table}`: {len(self._pending)} priorities not set within {timeout_s:.1f} s. The "
                    "server is slow or unreachable; see `stats()` of the dataset."
                )
            self._sent.clear()
            if self._pending or self._is_sending:
                self._sent.wait(min(deadline - time.monotonic(), _LOOK_S))

    def close(self, timeout_s: float) -> None:
        """Send pending updates for at most `timeout_s` seconds, and end. Idempotent; no effect in a forked child."""
        if process_hooks.is_forked():
            return
        self._is_closed = True
        with contextlib.suppress(ReplayTimeoutError):
            self.flush(timeout_s)
        self._changed.set()
        with self._lock:
            self.num_failed += len(self._pending)
            self._pending.clear()

    def _wake(self) -> None:
        if self._pending:
            self._thread.start()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.clear()
            is_closed = self._is_closed  # read first: after the end no priorities arrive
            with self._lock:
                batch = dict(itertools.islice(self._pending.items(), _MAX_REQUEST_KEYS))
                self._is_sending = bool(batch)
                for key in batch:
                    del self._pending[key]
                owners = [self._owners.get(key) for key in batch]
            self._sent.set()
            if batch:
                self._send(batch, owners)
            elif is_closed:
                return
            else:
                self._changed.wait(None)

    def _send(self, batch: dict[int, float], owners: list[str | None]) -> None:
        """Send each key to the server that owns it, or to all servers if the owner is unknown: other servers ignore it.

        Each key is counted once: as gone if no server could get it, as failed if a server that should get it did not.
        """
        num_gone = 0
        if not self._client.connections.may_have_several:
            failed = self._send_to(self._client.shards[0], batch, self._client.timeout_s)
        else:
            lost = self.lost_servers()
            there = [shard for shard in self._client.shards if shard.name not in lost]
            names = {None, *(shard.name for shard in there)}
            num_gone = sum(owner not in names for owner in owners) if there else len(batch)
            sent = []
            for shard in there:
                updates = {key: batch[key] for key, own in zip(batch, owners, strict=True) if own in (None, shard.name)}
                if updates:  # a slow server delays no other
                    timeout_s = min(self._client.timeout_s, _TIMEOUT_S)
                    sent.append(in_background(functools.partial(self._send_to, shard, updates, timeout_s)))
            failed = set().union(*[one.result() for one in sent])
        if num_gone and not self.num_gone:
            _LOG.warning("Priorities of `%s` are not sent to unreachable servers; they are counted.", self._table)
        with self._lock:
            self.num_gone += num_gone
            self.num_failed += len(failed)
            self.num_sent += len(batch) - num_gone - len(failed)

    def _send_to(self, shard: Server, updates: dict[int, float], timeout_s: float) -> set[int]:
        """Send updates to one server; return the keys that were not set."""
        try:
            shard.mutate_priorities(self._table, updates, deadline=Deadline(timeout_s))
        except ReverbWriterError as error:
            if not self._is_closed:
                _LOG.warning("%d priorities of `%s` were not set: %s", len(updates), self._table, error)
                time.sleep(0.1)
            return set(updates)
        return set()


def info_of(batch_or_keys: Any) -> Any:
    """Return the info of a `Batch` or of transitions of one; anything else is returned unchanged."""
    batch = batch_or_keys
    if isinstance(batch_or_keys, Transitions):
        batch = getattr(batch_or_keys, "batch", None)
        if batch is None:
            raise SpecError(
                "these transitions have no batch, which only transitions of `dataset.transitions` have, and which "
                "`_replace` loses. Pass the batch that they are from."
            )
    return batch.info if isinstance(batch, Batch) else batch


def checked_updates(batch_or_keys: Any, priorities: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    """Return keys [n], from a batch, its transitions or info, or an array, and checked priorities [n]."""
    info = info_of(batch_or_keys)
    given = info.keys if isinstance(info, BatchInfo) else info
    keys, priorities = host_array(given), host_array(priorities).astype(np.float64)
    if hasattr(given, "detach") and keys.dtype == np.int64:  # `as_torch` hands out unsigned keys with the same bits
        keys = keys.view(np.uint64)
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or (keys < 0).any():
        raise SpecError(f"`keys` must be [n] integers as in `info.keys`, got {keys.dtype} {keys.shape}.")
    if priorities.shape != keys.shape:
        raise SpecError(f"`priorities` has shape {priorities.shape}, expected {keys.shape}: one per sample, or slice.")
    bad = priorities[~(np.isfinite(priorities) & (priorities >= 0))]
    if len(bad):
        others = f" and {len(bad) - 1} more such" if len(bad) > 1 else ""
        raise SpecError(f"`priorities` must be finite and >= 0, got {bad[0]}{others}.")
    return keys, priorities


def _drop_oldest(entries: dict[int, Any]) -> int:
    """Leave the newest `_MAX_KEYS` entries; return how many were dropped."""
    oldest = list(itertools.islice(entries, max(len(entries) - _MAX_KEYS, 0)))
    for key in oldest:
        del entries[key]
    return len(oldest)
