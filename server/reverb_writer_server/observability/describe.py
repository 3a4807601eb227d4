"""A table in sentences: its rules, and when it blocks inserts and samples."""

from __future__ import annotations

import math

from reverb_writer.tables import Prioritized, Queue, Selector, TableConfig

_SELECTED_ITEM = {
    "fifo": "the oldest item",
    "lifo": "the newest item",
    "uniform": "any item, all equally likely",
    "max_heap": "the item of highest priority",
    "min_heap": "the item of lowest priority",
}
_KB = 1024


def describe(table: TableConfig) -> list[str]:
    """Return the rules of a table, a sentence each.

    >>> describe(TableConfig("weights", 1))[0]
    'holds up to 1 item; when it is full, an insert removes the oldest item'
    >>> for sentence in describe(TableConfig.queue("q", 10)):
    ...     print(sentence)
    holds up to 10 items
    samples the oldest item, each once
    blocks samples while it is empty
    blocks inserts while it holds 10 items
    """
    limiter, balance = table.rate_limiter, table.rate_limiter.balance
    holds = f"holds up to {_items(table.max_size)}"
    times = {0: "", 1: ", each once"}.get(table.max_times_sampled, f", each {table.max_times_sampled} times at most")
    sentences = [
        holds
        if isinstance(limiter, Queue)
        else f"{holds}; when it is full, an insert removes {_describe_selector(table.remover)}",
        f"samples {_describe_selector(table.sampler)}{times}",
    ]
    if isinstance(limiter, Queue):
        return [*sentences, "blocks samples while it is empty", f"blocks inserts while it holds {_items(limiter.size)}"]
    low, high = math.isfinite(balance.min_diff), math.isfinite(balance.max_diff)
    diff = f"inserts x {balance.samples_per_insert:g} - samples"
    few = "while it is empty" if balance.min_size == 1 else f"while it holds fewer than {balance.min_size:,} items"
    sentences.append(
        f"blocks samples {few}" + (f", or when {diff} would fall below {balance.min_diff:,g}" if low else "")
    )
    if high:
        sentences.append(
            f"blocks inserts when {diff} would rise above {balance.max_diff:,g}, once it holds {balance.min_size:,}"
        )
        behind = math.floor((balance.max_diff - balance.min_diff) / balance.samples_per_insert)
        sentences.append(
            f"a learner takes {balance.samples_per_insert:g} samples per insert and may fall {behind:,} inserts behind"
        )
    else:
        sentences.append("never blocks inserts")
    return sentences


def format_bytes(number: float) -> str:
    """Return a number of bytes with a unit.

    >>> format_bytes(1_610_612_736)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < _KB:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= _KB
    return f"{number:.1f} TiB"


def _items(count: int) -> str:
    return f"{count:,} item" + "s" * (count != 1)


def _describe_selector(selector: Selector) -> str:
    if isinstance(selector, Prioritized):
        return f"an item with probability ~ priority ** {selector.exponent:g}"
    return _SELECTED_ITEM[selector]
