"""Slices of a pool, drawn without a server."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from reverb_writer.decoding.sample_rows import SampleRows
from reverb_writer.decoding.samples import BatchInfo, Column
from reverb_writer.reading.slice_pools import SliceDrawer, SliceOptions
from reverb_writer.slices import SliceSampler


def rows_of(*columns: Any, lengths: list[int]) -> SampleRows:
    sizes = np.array(lengths, np.int64)
    keys = np.arange(len(sizes), dtype=np.uint64)
    info = BatchInfo(keys, np.ones(len(sizes)), np.ones(len(sizes)), sizes, sizes.astype(np.int32), sizes, 0.0)
    return SampleRows.of_columns([Column(np.asarray(column), sizes, False) for column in columns], info)


def drawer(num_slices: int, slice_len: int, **options: Any) -> SliceDrawer:
    how: dict[str, Any] = {
        "slices_per_item": 1,
        "replacement": True,
        "row_priority_fn": None,
        "emit_init": True,
        "with_next": False,
    }
    sampler = SliceSampler(num_slices, slice_len)
    return SliceDrawer(SliceOptions(sampler, **(how | options)), np.random.default_rng(0), number=0, num_members=1)


@pytest.mark.parametrize("slices_per_item", [1, 4])
def test_pool_is_freed_without_the_collector(slices_per_item: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pool has the rows of whole items: thirty of them were 190 MB."""
    monkeypatch.setattr("reverb_writer.reading.slice_pools._PART_BYTES", 1)  # several parts
    rows = rows_of(np.arange(6.0), [False, True, False, False, False, True], lengths=[2, 4])

    def pack(leaves: Any) -> dict[str, Any]:
        return dict(zip(("reward", "done"), leaves, strict=True))

    gc.collect()
    gc.disable()
    try:
        parts = drawer(2, 2, slices_per_item=slices_per_item).draw(rows, pack, "")
        assert len(parts) == slices_per_item
        alive = weakref.ref(rows)
        for make, _ in parts:
            assert len(make().markers) == 4
        del rows, parts, make
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

    drawn = drawer(8, 3, slices_per_item=4).draw(rows, pack, "")[0][0]()
    steps = drawn.data[0] if how == "mask" else drawn.data
    found = [part.tolist() for part in np.split(steps["number"], drawn.markers.slices.first_rows[1:])]
    assert found == [[1, 2, 3], [2, 3]] * 4
    assert drawn.markers.done.tolist() == [False, False, True, False, True] * 4
