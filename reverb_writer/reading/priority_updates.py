"""Send new priorities while the learner continues.

put(keys, priorities) -> the newest for each key -> a thread -> TableSource.set_priorities
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.background import Flag, LateThread
from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.errors import ClosedError, ReplayTimeoutError, SpecError
from reverb_writer.leaves import host_array
from reverb_writer.reading.table_source import Unset
from reverb_writer.slices.batch import Batch
from reverb_writer.tables.table_info import TableInfo
from reverb_writer.transitions import Transitions
from reverb_writer.transport import process_hooks

_LOG = logging.getLogger(__package__)

_BY_PRIORITY = {"prioritized", "max_heap", "min_heap"}
_MAX_KEYS = 1 << 20
_MAX_REQUEST_KEYS = 1 << 14
_LOOK_S = 0.05
_PAUSE_S = 0.1  # after priorities that were not set


class PriorityUpdates:
    """Sets priorities in one table, in a thread that starts with the first call. Thread-safe.

    Attributes:
        num_sent, num_failed, num_gone: priorities that were set; that a server did not take, or that were dropped
            unsent; and that were not sent because no server that may have their items can be reached.
    """

    def __init__(self, table: TableInfo, set_priorities: Callable[[Mapping[int, float]], Unset]) -> None:
        """Start without priorities; `set_priorities` is that of a `TableSource`."""
        self._table, self._set = table.name, set_priorities
        self._warning = (
            None
            if {table.sampler, table.remover} & _BY_PRIORITY
            else f"table `{table.name}`: neither its sampler ({table.sampler}) nor its remover ({table.remover}) uses "
            "priorities, so new ones change only `info.priorities`. Use `rw.Prioritized`, or set no priorities."
        )
        self._lock = threading.Lock()
        self._changed, self._sent = Flag(), Flag()
        self._pending: dict[int, float] = {}
        self._is_sending = self._is_closed = False
        self.num_sent = self.num_failed = self.num_gone = 0
        self._thread = LateThread(self._run, "reverb-writer-priorities")

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
            self.num_failed += drop_oldest(self._pending)
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
            self._sent.set()
            if batch:
                self._send(batch)
            elif is_closed:
                return
            else:
                self._changed.wait(None)

    def _send(self, batch: Mapping[int, float]) -> None:
        """Set priorities; count each key once, and log those that a server did not take."""
        unset = self._set(batch)
        if not self._is_closed:
            for keys, error in unset.refused:
                _LOG.warning("%d priorities of `%s` were not set: %s", len(keys), self._table, error)
            if unset.refused:
                time.sleep(_PAUSE_S)
        failed = set[int]().union(*[keys for keys, _ in unset.refused])
        with self._lock:
            self.num_gone += unset.num_gone
            self.num_failed += len(failed)
            self.num_sent += len(batch) - unset.num_gone - len(failed)


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


def drop_oldest(entries: dict[int, Any]) -> int:
    """Leave the newest `_MAX_KEYS` entries; return how many were dropped."""
    oldest = list(itertools.islice(entries, max(len(entries) - _MAX_KEYS, 0)))
    for key in oldest:
        del entries[key]
    return len(oldest)
