"""Tables that cannot be served, and rate limiters that could only ever wait: found before the server starts.

`TableConfig` refuses those that block whatever anyone does. Here are those that block what somebody has said to do: a
learner that fetches more than the limiter can ever let out, and a ratio that the table's own rules put out of reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from reverb_writer.errors import SpecError
from reverb_writer.tables import Queue, SampleToInsertRatio, Stack, TableConfig

__all__ = ["advice", "check", "refuse_twice"]


def refuse_twice(names: Iterable[str]) -> None:
    """Refuse tables of one name.

    Raises:
        SpecError: names them.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SpecError(f"`tables` must have different names, got {', '.join(twice)} more than once.")


def check(table: TableConfig, samples_in_flight: int) -> None:
    """Refuse a limiter that can never let out what a learner needs before it goes on.

    Args:
        table: with its rate limiter.
        samples_in_flight: what a learner that takes turns with its actor fetches at once; 0 if there is none such.

    Raises:
        SpecError: with the numbers, and the smallest change that works.
    """
    limiter, balance = table.rate_limiter, table.rate_limiter.balance
    room = balance.max_diff - balance.min_diff
    fetches = f"table `{table.name}`: a learner fetches {samples_in_flight} samples before it goes on"
    waits = "If its actor waits for it, both wait for ever. Fetch fewer, or"
    if isinstance(limiter, Queue) and samples_in_flight > limiter.size:
        kind = "stack" if isinstance(limiter, Stack) else "queue"
        raise SpecError(
            f"{fetches}, and a {kind} of {limiter.size} items, each sampled once, never holds as many. {waits} raise "
            f"`max_size` to {samples_in_flight}."
        )
    if isinstance(limiter, SampleToInsertRatio) and samples_in_flight > room:
        is_pair = isinstance(limiter.error_buffer, tuple)
        wider = f"[{balance.min_diff:g}, {balance.min_diff + samples_in_flight:g}]" if is_pair else ""
        raise SpecError(
            f"{fetches}, and without an insert between the rate limiter lets out at most max_diff - min_diff = "
            f"{balance.max_diff:g} - {balance.min_diff:g} = {room:g}. {waits} widen `error_buffer` to "
            f"{wider or format(samples_in_flight / 2, 'g')}."
        )
    stored = table.max_size * table.max_times_sampled
    if table.max_times_sampled and samples_in_flight > stored:
        raise SpecError(
            f"{fetches}, and the table gives {table.max_size} items x {table.max_times_sampled} times sampled = "
            f"{stored}. Raise `max_size`."
        )


def advice(table: TableConfig) -> list[str]:
    """Return what will surprise, a sentence each."""
    balance = table.rate_limiter.balance
    times = table.max_times_sampled
    if not times or not math.isfinite(balance.max_diff) or balance.samples_per_insert <= times:
        return []
    grows = balance.samples_per_insert - times
    inserts = math.floor(balance.max_diff / grows)
    sentence = (
        f"table `{table.name}`: samples_per_insert {balance.samples_per_insert:g} is out of reach, as an item goes "
        f"after {times} samples: each insert leaves {grows:g} behind, and after {inserts} inserts the limiter lets in "
        f"only what keeps the table at min_size {balance.min_size} or below. Raise max_times_sampled to "
        f"{math.ceil(balance.samples_per_insert)}."
    )
    return [sentence]
