"""The configuration of a replay server's tables: samplers, removers and rate limiters.

    balance          the rule of every rate limiter
    saves            the reserved table in which a server counts its saves
    table_dicts      a table as plain values, for TOML and JSON
    table_messages   a table in Reverb's messages, and a server's answer about its tables
    shares           one shard's part of a table that several shards serve together
    table_info       the tables that a server reports
    rate_limits      the waiting side of a rate limiter, and the cause

Configurations that always block are refused here: a server would start with them and hang.

Source: Reverb 0.14, `rate_limiters.py` and `server.py`.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from reverb_writer.arguments import integer, number
from reverb_writer.errors import SpecError
from reverb_writer.tables.balance import Balance

__all__ = [
    "Balance",
    "MinSize",
    "Prioritized",
    "RateLimiter",
    "SampleToInsertRatio",
    "Selector",
    "TableConfig",
    "check_tables",
    "check_unique_names",
]

SAVES = "__saves"  # name of the reserved table of `tables.saves`

_MAX_COUNT = 2**31 - 1  # Reverb counts a table's items in 32 bits


@dataclass(frozen=True)
class MinSize:
    """Samples wait until the table holds `min_size` items; inserts never wait.

    Attributes:
        min_size: Number of items, >= 1.

    Raises:
        SpecError: `min_size` is not an integer, or is too small.

    >>> MinSize(1000).balance
    Balance(samples_per_insert=1.0, min_size=1000, min_diff=-inf, max_diff=inf)
    """

    min_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_size", integer("min_size", self.min_size, minimum=1))

    @property
    def balance(self) -> Balance:
        """The rule in numbers."""
        return Balance(1.0, self.min_size, -math.inf, math.inf)


@dataclass(frozen=True)
class SampleToInsertRatio:
    """Keep `samples_per_insert` samples per insert: the faster side waits.

    Attributes:
        samples_per_insert: The ratio, > 0.
        min_size: Number of items that the table needs before sampling starts, >= 1.
        error_buffer: Allowed deviation of `diff`, in samples: a distance, >= max(1, samples_per_insert), to either side
            of `samples_per_insert * min_size`; or the pair `(min_diff, max_diff)`. Items that a learner has fetched
            ahead count as sampled, so leave room for its batches in flight.

    Raises:
        SpecError: A number has the wrong type or is too small, or one side would wait for ever.

    >>> SampleToInsertRatio(samples_per_insert=8, min_size=100, error_buffer=200).balance
    Balance(samples_per_insert=8.0, min_size=100, min_diff=600.0, max_diff=1000.0)
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        ratio = number("samples_per_insert", self.samples_per_insert)
        if ratio <= 0:
            raise SpecError(f"`samples_per_insert` must be > 0, got {ratio:g}. Without a ratio, use MinSize.")
        min_size = integer("min_size", self.min_size, minimum=1)
        buffer: float | tuple[float, float]
        if isinstance(self.error_buffer, tuple | list):
            if len(self.error_buffer) != 2:  # noqa: PLR2004  # a pair
                raise SpecError(f"`error_buffer` must be a number or (min_diff, max_diff), got {self.error_buffer!r}.")
            buffer = (number("min_diff", self.error_buffer[0]), number("max_diff", self.error_buffer[1]))
        else:
            buffer = number("error_buffer", self.error_buffer)
        _check_room(ratio, min_size, buffer)
        for name, value in (("samples_per_insert", ratio), ("min_size", min_size), ("error_buffer", buffer)):
            object.__setattr__(self, name, value)

    @property
    def balance(self) -> Balance:
        """The rule in numbers."""
        min_diff, max_diff = _bounds(self.samples_per_insert, self.min_size, self.error_buffer)
        return Balance(self.samples_per_insert, self.min_size, min_diff, max_diff)


@dataclass(frozen=True)
class Queue:
    """Sample each item once, oldest first; inserts wait while the table holds `size` items. For `TableConfig.queue`.

    Attributes:
        size: Number of items, >= 1.

    Raises:
        SpecError: `size` is not an integer, or is too small.

    >>> Queue(10).balance
    Balance(samples_per_insert=1.0, min_size=1, min_diff=0.0, max_diff=10.0)
    """

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("size", self.size, minimum=1))

    @property
    def balance(self) -> Balance:
        """The rule in numbers."""
        return Balance(1.0, 1, 0.0, float(self.size))


class Stack(Queue):
    """Sample each item once, newest first, otherwise as `Queue`. For `TableConfig.stack`."""


RateLimiter: TypeAlias = MinSize | SampleToInsertRatio | Queue | Stack


@dataclass(frozen=True)
class Prioritized:
    """Choose an item with a probability proportional to `priority ** exponent`.

    Attributes:
        exponent: >= 0. With 0, all items with a priority > 0 are equally likely.

    Raises:
        SpecError: `exponent` is not a finite number, or is negative.
    """

    exponent: float

    def __post_init__(self) -> None:
        exponent = number("exponent", self.exponent)
        if exponent < 0:
            raise SpecError(f"`exponent` must be >= 0, got {exponent:g}. With 0, priorities have no effect.")
        object.__setattr__(self, "exponent", exponent)


SelectorName: TypeAlias = Literal["fifo", "lifo", "uniform", "max_heap", "min_heap", "prioritized"]
Selector: TypeAlias = SelectorName | Prioritized
_BATCHES_AHEAD = 8  # batches on each side of the band: the batches that four learners have in flight by default


@dataclass(frozen=True)
class TableConfig:
    """Describe one table of a replay server.

    Immutable and safe to share between threads; hashable, where the hash ignores the signature.

    Attributes:
        name: The table's name, used by writers and learners.
        max_size: Maximum number of items, 1 to 2**31 - 1.
        sampler: Chooses the next item to sample. "prioritized" is `Prioritized(1.0)`.
        remover: Chooses the item to remove when the table is full. Overlapping windows take the least memory with
            "fifo", because a step is freed when no item refers to it.
        rate_limiter: Decides when inserts and samples wait.
        max_times_sampled: Number of samples after which an item is removed; 0 for no limit.
        signature: Nest whose leaves have `shape` ([T, ...], None where unknown) and `dtype`, such as `ArraySpec`. If
            set, dm-reverb's own writers and datasets also check their items against it.

    Raises:
        SpecError: A field has the wrong type or is out of range, or the fields together always block.

    >>> TableConfig("replay", max_size=100_000, rate_limiter=MinSize(1000)).sampler
    'uniform'
    """

    name: str
    max_size: int = 1_000_000
    sampler: Selector = "uniform"
    remover: Selector = "fifo"
    rate_limiter: RateLimiter = MinSize(1)
    max_times_sampled: int = 0
    signature: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"`name` must be a string that is not empty, got {self.name!r}.")
        for role in ("sampler", "remover"):
            selector, names = getattr(self, role), get_args(SelectorName)
            if selector == "prioritized":
                object.__setattr__(self, role, Prioritized(1.0))
            elif not isinstance(selector, Prioritized) and selector not in names:
                expected = ", ".join(map(repr, names))
                raise SpecError(f"`{role}` must be one of {expected} or Prioritized(exponent), got {selector!r}.")
        if not isinstance(self.rate_limiter, RateLimiter):
            expected = "MinSize, SampleToInsertRatio, Queue or Stack"
            raise SpecError(f"`rate_limiter` must be a {expected}, got {self.rate_limiter!r}.")
        max_size = integer("max_size", self.max_size, minimum=1, maximum=_MAX_COUNT)
        times = integer("max_times_sampled", self.max_times_sampled, minimum=0, maximum=_MAX_COUNT)
        object.__setattr__(self, "max_size", max_size)
        object.__setattr__(self, "max_times_sampled", times)
        self._check_together()

    @classmethod
    def replay(
        cls,
        name: str,
        buffer_size: int,
        learning_starts: int,
        batch_size: int,
        train_frequency: float,
        *,
        sampler: Selector = "uniform",
        signature: Any = None,
    ) -> TableConfig:
        """Return the table of a program that trains on one batch after every few steps, from the program's numbers.

        With it, actors and learners in several processes keep the ratio of such a program in one process.

        The table counts items, and a program counts actions. An item is an action if windows have two rows and stride
        1, in episodes of any length. An episode of T actions has T + 1 rows. Its windows of L rows with stride 1 are
        max(T + 2 - L, 0) items, or T + 1 items with `end_of_episode="tile"`. So with longer windows and short episodes,
        actors play more actions than the numbers say: multiply the three numbers of items by the items per action.

        Args:
            name: The table's name.
            buffer_size: Maximum number of items.
            learning_starts: Number of items before the first batch, >= 1.
            batch_size: Samples in a batch, >= 1.
            train_frequency: Items that are inserted per batch, > 0. The program trains once on each batch.
            sampler: As for `TableConfig`.
            signature: As for `TableConfig`.

        Raises:
            SpecError: A number is out of range.

        >>> TableConfig.replay("replay", 10_000, learning_starts=2_000, batch_size=128, train_frequency=10).rate_limiter
        SampleToInsertRatio(samples_per_insert=12.8, min_size=2000, error_buffer=1024.0)
        """
        batch_size = integer("batch_size", batch_size, minimum=1)
        frequency = number("train_frequency", train_frequency)
        if frequency <= 0:
            raise SpecError(f"`train_frequency` must be > 0 items per batch, got {frequency:g}.")
        min_size = integer("learning_starts", learning_starts, minimum=1)
        size = integer("buffer_size", buffer_size, minimum=1)
        if min_size > size:
            raise SpecError(f"`learning_starts` must be <= `buffer_size`, got {min_size} > {size}.")
        ratio = batch_size / frequency
        limiter = SampleToInsertRatio(ratio, min_size, max(_BATCHES_AHEAD * batch_size, ratio))
        return cls(name, size, sampler, rate_limiter=limiter, signature=signature)

    @classmethod
    def variables(cls, name: str) -> TableConfig:
        """Return a table for `Variables`: it holds one item, the newest version of the weights."""
        return cls(name, max_size=1)

    @classmethod
    def returns(cls, name: str = "returns", max_size: int = 10_000) -> TableConfig:
        """Return a table for `EpisodeReturns`: it gives each episode once; a full table drops the oldest ones."""
        return cls(name, max_size, "fifo", "fifo", max_times_sampled=1)

    @classmethod
    def queue(cls, name: str, size: int, signature: Any = None) -> TableConfig:
        """Return a queue of `size` >= 1 items: each is sampled once, oldest first; writers wait while it is full.

        `name` and `signature` are as for `TableConfig`.

        Raises:
            SpecError: `name` is empty, or `size` is not an integer or out of range.
        """
        return cls(name, size, "fifo", "fifo", Queue(size), max_times_sampled=1, signature=signature)

    @classmethod
    def stack(cls, name: str, size: int, signature: Any = None) -> TableConfig:
        """Return a stack, which samples the newest item first; `name`, `size` and `signature` are as for `queue`."""
        return cls(name, size, "lifo", "lifo", Stack(size), max_times_sampled=1, signature=signature)

    def _check_together(self) -> None:
        limiter, table = self.rate_limiter, f"table `{self.name}`"
        min_size = limiter.balance.min_size
        if min_size > self.max_size:
            raise SpecError(
                f"{table}: `min_size` must be <= `max_size`, got {min_size} > {self.max_size}: the table never holds "
                f"enough items to be sampled. Raise `max_size` or lower `min_size`."
            )
        if isinstance(limiter, Queue):
            kind, order = ("stack", "lifo") if isinstance(limiter, Stack) else ("queue", "fifo")
            got = (self.sampler, self.remover, self.max_times_sampled)
            if got != (order, order, 1) or self.max_size < limiter.size:
                raise SpecError(
                    f"{table}: {limiter} needs `sampler` and `remover` {order!r}, `max_times_sampled` 1 and `max_size` "
                    f">= {limiter.size}, got {got[0]!r}, {got[1]!r}, {got[2]} and {self.max_size}. "
                    f"Use TableConfig.{kind}({self.name!r}, {limiter.size})."
                )


def check_tables(tables: Sequence[TableConfig]) -> None:
    """Refuse `tables` that no server can serve.

    Raises:
        SpecError: The list is empty, two tables have the same name, one has the reserved name, or an element is not a
            table.
    """
    if not isinstance(tables, Sequence) or not all(isinstance(table, TableConfig) for table in tables):
        raise SpecError(f"`tables` must be a sequence of TableConfig, got {tables!r}.")
    if not tables:
        raise SpecError("`tables` must not be empty: a server needs a table to write to.")
    if any(table.name == SAVES for table in tables):
        raise SpecError(
            f"a table must not have the name `{SAVES}`: servers count their saves in it. Name it otherwise."
        )
    check_unique_names([table.name for table in tables])


def check_unique_names(names: Iterable[str]) -> None:
    """Refuse two equal `names` of tables.

    Raises:
        SpecError: Two tables have the same name; the error names it.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SpecError(f"`tables` must have unique names, got {', '.join(twice)} more than once.")


def _bounds(samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]) -> tuple[float, float]:
    if isinstance(error_buffer, tuple):
        return error_buffer
    return samples_per_insert * min_size - error_buffer, samples_per_insert * min_size + error_buffer


def _check_room(ratio: float, min_size: int, buffer: float | tuple[float, float]) -> None:
    """Refuse bounds that are too narrow or that block the first samples."""
    min_diff, max_diff = _bounds(ratio, min_size, buffer)
    needed = 2 * max(1.0, ratio)
    rounding = 2 * math.ulp(max(abs(min_diff), abs(max_diff)))
    first = f"`samples_per_insert` x `min_size` = {ratio:g} x {min_size} = {ratio * min_size:g}"
    if max_diff - min_diff < needed - rounding:
        move = f"one insert moves diff by {ratio:g}, one sample by 1, and either could stay blocked"
        if isinstance(buffer, tuple):
            raise SpecError(
                f"`error_buffer` must span >= 2 x max(1, `samples_per_insert`) = {needed:g}, got "
                f"{max_diff - min_diff:g} ({min_diff:g} to {max_diff:g}): {move}. "
                f"Raise max_diff to {min_diff + needed:g}."
            )
        raise SpecError(
            f"`error_buffer` must be >= max(1, `samples_per_insert`) = {needed / 2:g}, got {buffer:g}: {move}. "
            f"Raise it to {needed / 2:g}, or better to the number of samples that a learner has in flight."
        )
    if min_diff > ratio * min_size:
        raise SpecError(
            f"`error_buffer`: min_diff must be <= {first}, got {min_diff:g}: with `min_size` items in the table, no "
            f"sample would be allowed. Lower min_diff to {ratio * min_size:g}."
        )
    if max_diff < ratio * min_size:
        warnings.warn(
            f"`error_buffer`: max_diff {max_diff:g} is below {first}: after the first {min_size} inserts writers wait "
            f"until a learner has sampled. A process that writes and samples in turn would wait for ever.",
            stacklevel=4,  # past __post_init__ and the generated __init__: the call of SampleToInsertRatio()
        )
