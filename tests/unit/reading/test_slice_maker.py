"""Slices of a pool, drawn without a server; trajectories of items are found once, and remembered for each by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reverb_writer.decoding.samples import BatchInfo, SampleRows
from reverb_writer.errors import StructureError
from reverb_writer.reading.slice_dataset import SlicesOfPools
from reverb_writer.slices import SliceSampler
from reverb_writer.slices.boundaries import KnownTrajectories


def rows_of(*columns: Any, lengths: list[int]) -> SampleRows:
    sizes = np.array(lengths, np.int64)
    keys = np.arange(len(sizes), dtype=np.uint64)
    info = BatchInfo(keys, np.ones(len(sizes)), np.ones(len(sizes)), sizes, sizes.astype(np.int32), sizes, 0.0)
    return SampleRows([(np.asarray(column), None) for column in columns], info)


class Pool:
    """Stands for the assembler of a pool."""

    def __init__(self, rows: SampleRows, pack: Callable[[Any], Any]) -> None:
        self._rows, self.pack = rows, pack

    def rows(self) -> Any:
        return self._rows


def two_items() -> SampleRows:
    return rows_of(np.arange(6.0), [False, True, False, False, False, True], lengths=[2, 4])


def pack(leaves: Any) -> dict[str, Any]:
    return dict(zip(("reward", "done"), leaves, strict=True))


def test_slices_that_do_not_fill_a_batch_wait_for_the_next_pool() -> None:
    maker: Any = SlicesOfPools(SliceSampler(3, 2), np.random.default_rng(0), slices_per_item=2)
    made = [maker.make(Pool(two_items(), pack), "") for _ in range(3)]  # of four slices each
    assert [[len(batch.info) for batch in batches] for batches in made] == [[3], [3], [3, 3]]
    assert maker.rest() is None


def test_each_trajectory_has_its_slices_and_a_number_that_no_other_pool_has() -> None:
    maker: Any = SlicesOfPools(SliceSampler(4, 2, by="trajectory"), np.random.default_rng(0), slices_per_item=2)
    batches = [batch for _ in range(2) for batch in maker.make(Pool(two_items(), pack), "")]
    ids = [batch.markers.traj_ids[batch.markers.slices.first_rows].tolist() for batch in batches]
    assert ids == [[0, 1, 0, 1], [2, 3, 2, 3]]


@pytest.mark.parametrize("slices_per_item", [1, 4])
def test_pool_is_freed_without_the_collector(slices_per_item: int) -> None:
    """Each pool has the rows of whole items: thirty of them were 190 MB."""
    rows = two_items()
    gc.collect()
    gc.disable()
    try:
        alive, pool = weakref.ref(rows), Pool(rows, pack)
        maker: Any = SlicesOfPools(SliceSampler(2, 2), np.random.default_rng(0), slices_per_item)
        batches = maker.make(pool, "")
        del rows, pool
        assert [len(batch.markers) for batch in batches] == [4] * slices_per_item
        assert alive() is None
    finally:
        gc.enable()


# Known trajectories.


# Item `a` has rows 0 to 2 and one end within it; item `b`, rows 3 and 4 and no end.
DONE = {b"a": [0, 1, 0], b"b": [0, 0]}


class Rows:
    """Rows of items that lie end to end, and a record of which were read."""

    def __init__(self, items: list[bytes]) -> None:
        self.items, self.lengths = items, np.array([len(DONE[item]) for item in items])
        self._done = np.concatenate([DONE[item] for item in items])
        self.was_read: list[int] = []

    def __call__(self, rows: Any) -> dict[str, Any]:
        self.was_read += rows.tolist()
        return {"done": self._done[rows]}

    def found_by(self, known: KnownTrajectories) -> tuple[Any, ...]:
        trajectories, item_of = known.find(self.items, self.lengths, self)
        return trajectories.starts.tolist(), trajectories.lengths.tolist(), item_of.tolist(), trajectories.storage_shape


def test_only_rows_of_items_that_are_new_are_read() -> None:
    known = KnownTrajectories()
    first = Rows([b"a"])
    assert first.found_by(known) == ([0, 2], [2, 1], [0, 0], (3,))
    second = Rows([b"b", b"a", b"b"])
    assert second.found_by(known) == ([0, 2, 4, 5], [2, 2, 1, 2], [0, 1, 1, 2], (7,))
    assert (first.was_read, second.was_read) == ([0, 1, 2], [0, 1, 5, 6])
    third = Rows([b"b", b"a"])
    assert third.found_by(known) == ([0, 2, 4], [2, 2, 1], [0, 1, 1], (5,))
    assert third.was_read == []


def test_items_are_forgotten_when_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reverb_writer.slices.boundaries._MAX_BYTES", 400)  # one item: 200 + 4 x 40
    known = KnownTrajectories()
    for items, was_read in [([b"a"], [0, 1, 2]), ([b"a"], []), ([b"b"], [0, 1]), ([b"a"], [0, 1, 2])]:
        rows = Rows(items)
        rows.found_by(known)
        assert rows.was_read == was_read


def test_item_whose_markers_contradict_each_other_is_not_remembered() -> None:
    known = KnownTrajectories()
    with pytest.raises(StructureError, match="markers must all have the shape of the rows"):
        known.find([b"a"], np.array([3]), lambda _: {"done": np.zeros(3), "truncated": np.zeros((3, 2))})
    assert Rows([b"a"]).found_by(known) == ([0, 2], [2, 1], [0, 0], (3,))
