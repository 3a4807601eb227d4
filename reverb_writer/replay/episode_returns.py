"""Returns of episodes from actors in other processes, through a table.

    actors: add(reward, is_over) at every step -> the table's items, one per episode -> read() or as_scalars()

An item is the return and the length of an episode. The table gives each item once, oldest first, and never blocks: a
full table drops its oldest items.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_timeout, integer
from reverb_writer.deadline import Deadline
from reverb_writer.errors import FormatError, StructureError
from reverb_writer.replay.client import as_client
from reverb_writer.replay.observers import SequenceObserver
from reverb_writer.shards.calls import answering, sample_each
from reverb_writer.tables.table_info import TableInfo

_Floats = npt.NDArray[np.float64]
_Integers = npt.NDArray[np.int64]


class EpisodeReturns:
    """Returns and lengths of finished episodes, from actors to the program that draws their curve. A context manager.

        with EpisodeReturns(address, "returns") as returns:  # in an actor
            ...
            returns.add(reward, terminated or truncated)  # after each step

        with EpisodeReturns(address, "returns") as returns:  # in a learner
            for name, value in returns.as_scalars("actor/").items():
                writer.add_scalar(name, value, step)

    `TableConfig.returns(name)` makes the table. Each episode is read once: several readers share the episodes.

    Thread safety: one thread may call `add`, and one thread may read.
    """

    def __init__(
        self, replay: Any, table: str = "returns", timeout_s: float | None = None, *, num_last: int = 100
    ) -> None:
        """Find the table.

        Args:
            replay: a `Client`, or an address, addresses or an object that `Client` takes.
            table: name of the table.
            timeout_s: time-out of a call, in seconds; None for the client's, which is also the constructor's.
            num_last: number of episodes in the means of `as_scalars`, >= 1.

        Raises:
            SpecError: a number is invalid.
            StructureError: the table does not exist, or has other rules than `TableConfig.returns`.
            ServerUnavailableError: no server answers within the time-out.
        """
        num_last = integer("num_last", num_last, minimum=1)
        self._client, self._owns_client = as_client(replay, timeout_s)
        self._table = table
        self._timeout_s = self._client.timeout_s if timeout_s is None else check_timeout(timeout_s)
        self._observer: SequenceObserver | None = None  # made when the first episode ends
        self._returns: _Floats | None = None  # of the episodes under way, [N], or [1] without an axis of environments
        self._lengths = np.zeros(0, np.int64)
        self._last: deque[tuple[float, int]] = deque(maxlen=num_last)
        self._num_read = self._num_steps = 0
        try:
            shards = self._client.connections.in_state("up", "draining")
            for info in answering(shards, self._timeout_s, [table]).values():
                _check_rules(info.tables[table])
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        """Return the table, the server and the number of episodes that were read."""
        return f"<EpisodeReturns of table {self._table!r} at {self._client.address}, {self._num_read} read>"

    def add(self, reward: Any, is_over: Any) -> None:
        """Count a step; if it ends an episode, write the episode's return and length. It does not wait.

        Args:
            reward: reward of the step: a number, or [N] for N environments.
            is_over: whether the episode ended with this step, terminated or truncated: a flag, or [N].

        Raises:
            StructureError: the shapes differ from each other or from the first call. Nothing changed.
            ReverbWriterError: as a step of an observer.
        """
        rewards, ends = np.asarray(reward, np.float64), np.asarray(is_over, bool)
        before = self._lengths.shape if self._returns is not None else (rewards.size,)
        if rewards.shape != ends.shape or rewards.ndim > 1 or (rewards.size,) != before:
            raise StructureError(
                f"`reward` has shape {rewards.shape} and `is_over` {ends.shape}, expected a number and a flag, or "
                f"{before} each, in all calls."
            )
        if self._returns is None:
            self._returns, self._lengths = np.zeros(before), np.zeros(before, np.int64)
        self._returns += rewards.reshape(-1)
        self._lengths += 1
        for environment in np.flatnonzero(ends):
            if self._observer is None:
                self._observer = SequenceObserver(self._client, self._table, 1, timeout_s=self._timeout_s)
            self._observer({"episode_return": self._returns[environment], "length": self._lengths[environment]})
            self._returns[environment] = self._lengths[environment] = 0

    def read(self) -> tuple[_Floats, _Integers]:
        """Read the episodes that were not read before, oldest first; ask each server once, and wait for no episode.

        Returns:
            Returns [n] and lengths [n] of n >= 0 episodes.

        Raises:
            FormatError: an item of the table was not written by `add`.
            ServerUnavailableError, ReplayTimeoutError: no server answers within the time-out.
        """
        connections, deadline = self._client.connections, Deadline(self._timeout_s)
        read = sample_each(connections, self._table, lambda _, info: info.tables[self._table].num_ready(), deadline)
        found = [_episode(sample.data, self._table) for samples in read.values() for sample in samples]
        self._last.extend(found)
        self._num_read += len(found)
        self._num_steps += sum(length for _, length in found)
        return np.array([one for one, _ in found], np.float64), np.array([length for _, length in found], np.int64)

    def as_scalars(self, prefix: str = "") -> dict[str, float]:
        """Read the new episodes; return numbers for any logger of metrics. Raises as `read`.

        Args:
            prefix: beginning of each name, such as "actor/".

        Returns:
            `episodes` and `episode_steps`, the totals that this object has read, and `mean_return` and `mean_length` of
            the last episodes, once there is one.
        """
        self.read()
        numbers = {"episodes": float(self._num_read), "episode_steps": float(self._num_steps)}
        if self._last:
            mean_return, mean_length = np.mean(self._last, axis=0)
            numbers |= {"mean_return": float(mean_return), "mean_length": float(mean_length)}
        return {prefix + name: number for name, number in numbers.items()}

    def close(self) -> None:
        """Write the ended episodes, and close the client if this object has made it. Idempotent.

        Raises:
            ReplayTimeoutError: not all were written in time.
        """
        try:
            if self._observer is not None:
                self._observer.close()
        finally:
            if self._owns_client:
                self._client.close()

    def __enter__(self) -> EpisodeReturns:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_rules(table: TableInfo) -> None:
    if (table.sampler, table.max_times_sampled) != ("fifo", 1) or table.rate_limiter.max_diff < float("inf"):
        raise StructureError(
            f"table `{table.name}`: sampler {table.sampler}, max_times_sampled {table.max_times_sampled}, max_diff "
            f"{table.rate_limiter.max_diff:g}, expected fifo, 1 and inf because it gives each episode once and never "
            f"blocks. Make it by `TableConfig.returns({table.name!r})`."
        )


def _episode(data: Any, table: str) -> tuple[float, int]:
    try:
        return float(data["episode_return"].item()), int(data["length"].item())
    except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
        raise FormatError(
            f"table `{table}`: an item that `EpisodeReturns` has not written. Give it a table of its own."
        ) from error
