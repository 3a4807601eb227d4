"""Slices of a pool, drawn without a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reverb_writer.decoding.sample_rows import SampleRows
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.reading.slice_maker import SliceOptions, SlicesOfPools
from reverb_writer.slices import SliceSampler


def rows_of(*columns: Any, lengths: list[int]) -> SampleRows:
    sizes = np.array(lengths, np.int64)
    keys = np.arange(len(sizes), dtype=np.uint64)
    info = BatchInfo(keys, np.ones(len(sizes)), np.ones(len(sizes)), sizes, sizes.astype(np.int32), sizes, 0.0)
    return SampleRows.of_columns([Column(np.asarray(column), sizes, False) for column in columns], info)


class Pool:
    """Stands for the assembler of a pool: has its rows until the next one begins."""

    def __init__(self, rows: SampleRows) -> None:
        self._rows: SampleRows | None = rows

    def rows(self) -> Any:
        return self._rows

    def begin_next(self) -> None:
        self._rows = None


def maker(pack: Callable[[Any], Any], num_slices: int, slice_len: int, **options: Any) -> SlicesOfPools:
    how: dict[str, Any] = {
        "slices_per_item": 1,
        "replacement": True,
        "row_priority_fn": None,
        "emit_init": True,
        "with_next": False,
    }
    sampler = SliceSampler(num_slices, slice_len)
    structure: Any = SimpleNamespace(pack=pack)
    return SlicesOfPools(structure, SliceOptions(sampler, **(how | options)), np.random.default_rng(0))


@pytest.mark.parametrize("slices_per_item", [1, 4])
def test_pool_is_freed_without_the_collector(slices_per_item: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool has the rows of whole items: thirty of them were 190 MB."""
    monkeypatch.setattr("reverb_writer.reading.slice_maker._COPY_BYTES", 1)  # one batch after the other
    rows = rows_of(np.arange(6.0), [False, True, False, False, False, True], lengths=[2, 4])

    def pack(leaves: Any) -> dict[str, Any]:
        return dict(zip(("reward", "done"), leaves, strict=True))

    gc.collect()
    gc.disable()
    try:
        alive, pool = weakref.ref(rows), Pool(rows)
        del rows
        batches: Any = maker(pack, 2, 2, slices_per_item=slices_per_item).make(pool, "")  # type: ignore[arg-type]
        assert [len(batch.markers) for batch, _ in batches] == [4] * slices_per_item
        del batches
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["mask", "is_first", "step_type"])
def test_padding_is_in_no_slice(how: str) -> None:
    """Two windows of an episode of three steps, padded as observers pad: with a mask, or after its end."""
    numbers, last = np.array([1, 2, 3, 0, 2, 3, 0, 0]), np.array([0, 0, 1, 0, 0, 1, 0, 0])
    first, types = np.array([1, 0, 0, 0, 0, 0, 0, 0]), np.array([0, 1, 2, 2, 1, 2, 2, 2])
    columns: dict[str, list[Any]] = {
        "mask": [numbers, last, numbers != 0],
        "is_first": [numbers, last, first],
        "step_type": [numbers, types],
    }
    rows = rows_of(*columns[how], lengths=[4, 4])

    def pack(leaves: Any) -> Any:
        if how == "mask":
            return {"number": leaves[0], "is_last": leaves[1]}, leaves[2]
        names = ["number", "is_last", "is_first"] if how == "is_first" else ["number", "step_type"]
        return dict(zip(names, leaves, strict=True))

    pool: Any = Pool(rows)
    drawn: Any = next(maker(pack, 8, 3, slices_per_item=4).make(pool, ""))[0]
    steps = drawn.data[0] if how == "mask" else drawn.data
    found = [part.tolist() for part in np.split(steps["number"], drawn.markers.slices.first_rows[1:])]
    assert found == [[1, 2, 3], [2, 3]] * 4
    assert drawn.markers.done.tolist() == [False, False, True, False, True] * 4
