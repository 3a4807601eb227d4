"""Items of any lengths, padded and packed, within limits, beside a list in memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import fifo

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = st.lists(st.one_of(st.integers(1, 6), st.integers(100, 700)), min_size=1, max_size=12)
CACHES = st.sampled_from([1, 20_000, 1 << 20])
LIMITS = st.sampled_from([None, 1, 10, 700, 2000])


def rows_of(batch: rw.Batch) -> list[dict[str, Any]]:
    """Return the rows of each sample, from a batch in either layout."""
    found = []
    for number, length in enumerate(batch.info.lengths.tolist()):
        if batch.slices is None:
            part: Any = number, slice(0, length)
            for leaf in (batch.data["x"], batch.data["y"]):
                assert not leaf[number, length:].any()
        else:
            first = batch.slices.first_rows[number]
            part = slice(first, first + length)
        sample = {name: batch.data[name][part] for name in ("x", "y")}
        found.append(sample if batch.row_kinds is None else {**sample, "kinds": batch.row_kinds[part]})
    return found


def check_limits(batches: list[rw.Batch], batch_size: int, max_rows: int | None, *, pads: bool) -> None:
    """Check that each batch is within the limits, and that one more sample would not have been."""

    def is_within(lengths: list[int]) -> bool:
        num_rows = len(lengths) * max(lengths) if pads else sum(lengths)
        return len(lengths) <= batch_size and (max_rows is None or num_rows <= max_rows or len(lengths) == 1)

    of_batches = [batch.info.lengths.tolist() for batch in batches]
    assert all(map(is_within, of_batches))
    assert not any(is_within([*one, after[0]]) for one, after in itertools.pairwise(of_batches))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.sampled_from(["pad", "pack"]), LIMITS, CACHES)
def test_single_items_in_batches_of_any_size(
    lengths: list[int], batch_size: int, collate: Any, max_rows: int | None, cache_bytes: int
) -> None:
    numbers = np.arange(sum(lengths))
    items = [
        {"x": numbers[stop - length : stop] + 1, "y": np.stack([numbers[:length] + 1] * 2, 1).astype(np.float32)}
        for length, stop in zip(lengths, np.cumsum(lengths).tolist(), strict=True)
    ]
    with rw.LocalServer([fifo("a")]) as server, rw.Client(server) as client:
        for one in items:
            client.insert(one, {"a": 1.0})
        options: Any = {"collate": collate, "max_rows": max_rows, "max_cache_bytes": cache_bytes}
        with rw.ReplayDataset(client, "a", batch_size, single_pass=True, timeout_s=60, **options) as dataset:
            batches = list(dataset)
    found = [sample for batch in batches for sample in rows_of(batch)]
    assert [{name: leaf.tolist() for name, leaf in sample.items()} for sample in found] == [
        {name: leaf.tolist() for name, leaf in one.items()} for one in items
    ]
    check_limits(batches, batch_size, max_rows, pads=collate == "pad")


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from(["pad", "pack"]), st.sampled_from([1, 7, 300]), CACHES, LIMITS)
def test_episodes_in_many_chunks_keep_the_kinds_of_their_rows(
    lengths: list[int], collate: Any, chunk_length: int, cache_bytes: int, max_rows: int | None
) -> None:
    with rw.LocalServer([fifo("a")]) as server, rw.Client(server) as client:
        with rw.EpisodeObserver(client, "a", 1000, chunk_length=chunk_length) as observer:
            for length in lengths:
                for row in range(length):
                    step = {"x": np.int64(row + 1), "y": np.full(2, row + 1, np.float32)}
                    observer({**step, "is_first": row == 0, "is_last": row == length - 1, "is_terminal": False})
        options: Any = {"collate": collate, "max_rows": max_rows, "max_cache_bytes": cache_bytes}
        with rw.ReplayDataset(client, "a", 3, single_pass=True, timeout_s=60, **options) as dataset:
            batches = list(dataset)
    found = [sample for batch in batches for sample in rows_of(batch)]
    for sample, length in zip(found, lengths, strict=True):
        assert sample["x"].tolist() == list(range(1, length + 1))
        assert sample["y"].tolist() == [[row, row] for row in range(1, length + 1)]
        # The last row only holds the final observation.
        middle = [FIRST | ACTION, *[ACTION] * (length - 2), LAST]
        assert sample["kinds"].tolist() == (middle if length > 1 else [FIRST | LAST])
    if collate == "pad":
        assert all(((batch.row_kinds == PADDING) == ~batch.mask).all() for batch in batches)
