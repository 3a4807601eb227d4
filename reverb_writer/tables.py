"""What a table of a replay server is: which item is sampled, which is removed, and who waits for whom.

    TableConfig(name, max_size, sampler, remover, rate_limiter, max_times_sampled, signature)
        sampler, remover   "fifo" | "lifo" | "uniform" | "max_heap" | "min_heap" | Prioritized(exponent)
        rate_limiter       MinSize | SampleToInsertRatio | Queue | Stack

Every rate limiter keeps one balance, `diff = inserts * samples_per_insert - samples`:

    a sample waits   while the table holds fewer than min_size items, or while diff would fall below min_diff
    an insert waits  while diff would rise above max_diff, unless the table holds fewer than min_size items

What could only ever wait is refused here, with the numbers: a server would start with it and hang.

Source: Reverb 0.14, `rate_limiters.py`, `server.py` and `rate_limiter.cc`.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from reverb_writer.arguments import integer, number
from reverb_writer.errors import SpecError

__all__ = [
    "Balance",
    "MinSize",
    "Prioritized",
    "Queue",
    "RateLimiter",
    "SampleToInsertRatio",
    "Selector",
    "Stack",
    "TableConfig",
]

_MAX_COUNT = 2**31 - 1  # Reverb counts a table's items in 32 bits


class Balance(NamedTuple):
    """The four numbers that every rate limiter comes down to; the module's first lines have the rule.

    Attributes:
        samples_per_insert: What one insert adds to `diff`; a sample takes 1 away.
        min_size: Items that must be there before anything is sampled.
        min_diff: The lowest `diff` that a sample may lead to.
        max_diff: The highest `diff` that an insert may lead to.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float


@dataclass(frozen=True)
class MinSize:
    """Let nobody sample before `min_size` items are there; an insert never waits.

    Attributes:
        min_size: Items, >= 1.

    Raises:
        SpecError: `min_size` is no integer or too small.

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
    """Let `samples_per_insert` samples be taken for each insert, and whoever runs ahead wait.

    Attributes:
        samples_per_insert: The ratio, > 0.
        min_size: Items that must be there before anything is sampled, >= 1.
        error_buffer: How far `diff` may stray, in samples: a distance, >= max(1, samples_per_insert), to either side of
            `samples_per_insert * min_size`; or the pair `(min_diff, max_diff)`. What a learner fetches ahead counts as
            sampled, so leave room for its batches in flight.

    Raises:
        SpecError: A number is of the wrong kind or too small, or one side would wait for ever.

    >>> SampleToInsertRatio(samples_per_insert=8, min_size=100, error_buffer=200).balance
    Balance(samples_per_insert=8.0, min_size=100, min_diff=600.0, max_diff=1000.0)
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        ratio = number("samples_per_insert", self.samples_per_insert)
        if ratio <= 0:
            raise SpecError(f"`samples_per_insert` must be > 0, got {ratio:g}. Use MinSize to keep no ratio.")
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
    """Hand out each item once, oldest first; an insert waits while `size` items are there. For `TableConfig.queue`.

    Attributes:
        size: Items, >= 1.

    Raises:
        SpecError: `size` is no integer or too small.

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
    """Hand out each item once, newest first; an insert waits while `size` items are there. For `TableConfig.stack`.

    Attributes:
        size: Items, >= 1.

    Raises:
        SpecError: `size` is no integer or too small.
    """


RateLimiter: TypeAlias = MinSize | SampleToInsertRatio | Queue | Stack


@dataclass(frozen=True)
class Prioritized:
    """Choose an item with a probability proportional to `priority ** exponent`.

    Attributes:
        exponent: 0 or more; with 0, all items of a priority above 0 are equally likely.

    Raises:
        SpecError: `exponent` is no finite number, or negative.
    """

    exponent: float

    def __post_init__(self) -> None:
        exponent = number("exponent", self.exponent)
        if exponent < 0:
            raise SpecError(f"`exponent` must be >= 0, got {exponent:g}. With 0 the priorities play no part.")
        object.__setattr__(self, "exponent", exponent)


SelectorName: TypeAlias = Literal["fifo", "lifo", "uniform", "max_heap", "min_heap"]
Selector: TypeAlias = SelectorName | Prioritized


@dataclass(frozen=True)
class TableConfig:
    """Describe one table of a replay server.

    Immutable and safe to share between threads; hashable, though the signature plays no part in the hash.

    Attributes:
        name: What writers and learners call it.
        max_size: Items that it holds at most, 1 to 2**31 - 1. One more, and `remover` chooses which one goes.
        sampler: Which item is sampled next.
        remover: Which item goes when the table is full. With "fifo", the oldest, overlapping windows take the least
            memory: a step is freed when no item holds it any more.
        rate_limiter: Who waits for whom.
        max_times_sampled: Samples after which an item is removed; 0 for no limit.
        signature: Nest whose leaves have `shape` ([T, ...], None where unknown) and `dtype`, such as `ArraySpec`. With
            one, dm-reverb's own writers and datasets check their items against it.

    Raises:
        SpecError: A field is of the wrong kind or out of range, or the fields together could only ever wait.

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
            _check_selector(role, getattr(self, role))
        if not isinstance(self.rate_limiter, RateLimiter):
            expected = "MinSize, SampleToInsertRatio, Queue or Stack"
            raise SpecError(f"`rate_limiter` must be a {expected}, got {self.rate_limiter!r}.")
        max_size = integer("max_size", self.max_size, minimum=1, maximum=_MAX_COUNT)
        times = integer("max_times_sampled", self.max_times_sampled, minimum=0, maximum=_MAX_COUNT)
        object.__setattr__(self, "max_size", max_size)
        object.__setattr__(self, "max_times_sampled", times)
        self._check_together()

    @classmethod
    def queue(cls, name: str, size: int, signature: Any = None) -> TableConfig:
        """Describe a queue: each item is sampled once, oldest first; a writer waits while it is full.

        Args:
            name: What writers and learners call it.
            size: Items that it holds at most, >= 1.
            signature: As in `TableConfig`.

        Raises:
            SpecError: `name` is empty, or `size` is no integer or out of range.
        """
        return cls(name, size, "fifo", "fifo", Queue(size), max_times_sampled=1, signature=signature)

    @classmethod
    def stack(cls, name: str, size: int, signature: Any = None) -> TableConfig:
        """Describe a stack: each item is sampled once, newest first; a writer waits while it is full.

        Args:
            name: What writers and learners call it.
            size: Items that it holds at most, >= 1.
            signature: As in `TableConfig`.

        Raises:
            SpecError: `name` is empty, or `size` is no integer or out of range.
        """
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


def _bounds(samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]) -> tuple[float, float]:
    """Return `(min_diff, max_diff)`."""
    if isinstance(error_buffer, tuple):
        return error_buffer
    centre = samples_per_insert * min_size
    return (centre - error_buffer, centre + error_buffer)


def _check_room(ratio: float, min_size: int, buffer: float | tuple[float, float]) -> None:
    """Refuse bounds too narrow to move between, or out of reach of the first samples."""
    min_diff, max_diff = _bounds(ratio, min_size, buffer)
    needed = 2 * max(1.0, ratio)
    first = f"`samples_per_insert` x `min_size` = {ratio:g} x {min_size} = {ratio * min_size:g}"
    if max_diff - min_diff < needed:
        move = f"one insert moves diff by {ratio:g}, one sample by 1, and either could stay blocked"
        if isinstance(buffer, tuple):
            raise SpecError(
                f"`error_buffer` must span >= 2 x max(1, `samples_per_insert`) = {needed:g}, got "
                f"{max_diff - min_diff:g} ({min_diff:g} to {max_diff:g}): {move}. "
                f"Raise max_diff to {min_diff + needed:g}."
            )
        raise SpecError(
            f"`error_buffer` must be >= max(1, `samples_per_insert`) = {needed / 2:g}, got {buffer:g}: {move}. "
            f"Raise it to {needed / 2:g}, better to what a learner has in flight."
        )
    if min_diff > ratio * min_size:
        raise SpecError(
            f"`error_buffer`: min_diff must be <= {first}, got {min_diff:g}: with `min_size` items there, nothing "
            f"could be sampled yet. Lower min_diff to {ratio * min_size:g}."
        )
    if max_diff < ratio * min_size:
        warnings.warn(
            f"`error_buffer`: max_diff {max_diff:g} is below {first}: after the first {min_size} inserts writers wait "
            f"until a learner has sampled. A process that does both in turn would wait for ever.",
            stacklevel=4,  # past __post_init__ and the generated __init__: whoever called SampleToInsertRatio()
        )


def _check_selector(role: str, selector: object) -> None:
    names = get_args(SelectorName)
    if not isinstance(selector, Prioritized) and selector not in names:
        expected = ", ".join(map(repr, names))
        raise SpecError(f"`{role}` must be one of {expected} or Prioritized(exponent), got {selector!r}.")
