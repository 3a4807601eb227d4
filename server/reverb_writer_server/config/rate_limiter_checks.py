"""Checks of tables and rate limiters before the server starts.

`TableConfig` refuses rate limiters that always block. These checks find limiters that block the declared use: a learner
that fetches more than the limiter ever allows, and a ratio that the table's other rules make unreachable.
"""

from __future__ import annotations

import math

from reverb_writer.errors import SpecError
from reverb_writer.tables import MinSize, Queue, SampleToInsertRatio, Stack, TableConfig
from reverb_writer.tables.table_dicts import TableKeyError


def check(table: TableConfig, samples_in_flight: int) -> None:
    """Refuse a rate limiter that never allows as many samples as a learner fetches before its actor inserts.

    Args:
        table: the table with its rate limiter.
        samples_in_flight: samples that a learner fetches before its actor goes on; 0 if they do not alternate.

    Raises:
        TableKeyError: there is nothing to check, because samples never wait for inserts.
        SpecError: the message has the numbers and the smallest change that works.
    """
    limiter, balance = table.rate_limiter, table.rate_limiter.balance
    if samples_in_flight and isinstance(limiter, MinSize) and not table.max_times_sampled:
        checks = 'it checks a rate_limiter "ratio", "queue" or "stack", or max_times_sampled'
        raise TableKeyError("samples_in_flight", f"got {samples_in_flight}, allowed: nothing here; {checks}.")
    room = balance.max_diff - balance.min_diff
    fetches = f"table `{table.name}`: a learner fetches {samples_in_flight} samples before its actor goes on"
    waits = "If its actor waits for it, both wait for ever. Fetch fewer, or"
    if isinstance(limiter, Queue) and samples_in_flight > limiter.size:
        kind = "stack" if isinstance(limiter, Stack) else "queue"
        raise SpecError(
            f"{fetches}, but a {kind} of {limiter.size} items, each sampled once, never holds as many. {waits} raise "
            f"`max_size` to {samples_in_flight}."
        )
    if isinstance(limiter, SampleToInsertRatio) and samples_in_flight > room:
        is_pair = isinstance(limiter.error_buffer, tuple)
        wider = f"[{balance.min_diff:g}, {balance.min_diff + samples_in_flight:g}]" if is_pair else ""
        raise SpecError(
            f"{fetches}, but without an insert in between the rate limiter allows at most max_diff - min_diff = "
            f"{balance.max_diff:g} - {balance.min_diff:g} = {room:g}. {waits} widen `error_buffer` to "
            f"{wider or format(samples_in_flight / 2, 'g')}."
        )
    stored = table.max_size * table.max_times_sampled
    if table.max_times_sampled and samples_in_flight > stored:
        raise SpecError(
            f"{fetches}, but the table allows {table.max_size} items x {table.max_times_sampled} times sampled = "
            f"{stored}. Raise `max_size`."
        )


def advice(table: TableConfig) -> list[str]:
    """Return warnings about rules that have unexpected effects, a sentence each."""
    balance = table.rate_limiter.balance
    times = table.max_times_sampled
    if not times or not math.isfinite(balance.max_diff) or balance.samples_per_insert <= times:
        return []
    grows = balance.samples_per_insert - times
    inserts = math.floor(balance.max_diff / grows)
    sentence = (
        f"table `{table.name}`: samples_per_insert {balance.samples_per_insert:g} cannot be reached, because an "
        f"item is removed after {times} samples: each insert raises diff by {grows:g} for good. After {inserts} "
        f"inserts the limiter blocks inserts that would take the table above min_size {balance.min_size}. Raise "
        f"max_times_sampled to {math.ceil(balance.samples_per_insert)}."
    )
    return [sentence]
