"""Slices of a pool, drawn without a server; trajectories of items are found once, and remembered for each by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.decoding.samples import BatchInfo, SampleRows
from reverb_writer.errors import IncompleteError, StructureError
from reverb_writer.replay.slice_dataset import SlicesOfPools
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL
from reverb_writer.slices import SliceSampler
from reverb_writer.slices.boundaries import KnownTrajectories


def rows_of(*columns: Any, lengths: list[int], kinds: list[int] | None = None) -> SampleRows:
    sizes = np.array(lengths, np.int64)
    keys = np.arange(len(sizes), dtype=np.uint64)
    info = BatchInfo(keys, np.ones(len(sizes)), np.ones(len(sizes)), sizes, sizes.astype(np.int32), sizes, 0.0)
    places = JoinedRows.end_to_end(sizes)
    stored = None if kinds is None else (np.array(kinds, np.uint8), places)
    return SampleRows([(np.asarray(column), places) for column in columns], info, stored)


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
    assert [batch.slices.trajectories.tolist() for batch in batches] == [[0, 1, 0, 1], [2, 3, 2, 3]]


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
        assert [len(batch.slices.rows) for batch in batches] == [4] * slices_per_item
        del batches
        assert alive() is None
    finally:
        gc.enable()


# Kinds of rows.


def made(rows: SampleRows, pack: Callable[[Any], Any], slice_len: int, **options: Any) -> rw.Batch:
    """Return a batch of two slices of a pool."""
    sampler = SliceSampler(2, slice_len, **options.pop("how", {}))
    maker = SlicesOfPools(sampler, np.random.default_rng(0), **options)
    (batch,) = maker.make(Pool(rows, pack), "")  # type: ignore[arg-type]  # stands for an assembler
    return batch


def test_stored_kinds_of_rows_and_of_next_rows_are_given() -> None:
    """The second item ends with padding, and its leaf `done` is wrong: it does not count."""
    kinds = [FIRST | ACTION, LAST | TERMINAL, FIRST | ACTION, ACTION, LAST, PADDING]
    rows = rows_of(np.arange(6.0), [False] * 6, lengths=[2, 4], kinds=kinds)
    batch = made(rows, pack, 2, with_next=True, how={"start": "episode"})
    assert batch.data["reward"].tolist() == [0, 1, 2, 3]
    assert batch.row_kinds.tolist() == [3, 12, 3, 2]
    assert batch.slices.cut_by_sampler.tolist() == [False, True]
    assert batch.next["reward"].tolist() == [1, 4]
    assert batch.next_kinds.tolist() == [12, 4]
    padded = made(rows, pack, 4, how={"short": "pad"})
    assert padded.data["reward"].tolist() == [0, 1, 1, 1, 2, 3, 4, 4]  # the item's padding is not in it
    assert padded.kinds.tolist() == [3, 12, 16, 16, 3, 2, 4, 16]
    assert padded.next_kinds is None


def test_items_of_other_writers_have_the_kinds_that_their_leaves_show() -> None:
    batch = made(two_items(), pack, 2, with_next=True, last_row="action")
    assert batch.row_kinds is batch.next_kinds is None
    assert batch.last_row == "action"
    with pytest.raises(StructureError, match="no leaf shows whether the environment ended"):
        batch.kinds  # noqa: B018  # it raises


@pytest.mark.parametrize("has_flags", [False, True])
def test_mask_of_older_observers_is_read(has_flags: bool) -> None:
    def pair(leaves: Any) -> Any:
        row, mask, *done = leaves
        return ({"row": row, **({"is_last": done[0]} if has_flags else {})}, mask)

    columns = np.arange(6), [True, True, True, False, True, True], [False, False, True, False, False, True]
    rows = rows_of(*columns[: 2 + has_flags], lengths=[4, 2])
    batch = made(rows, pair, 4, how={"by": "row"}, slices_per_item=1)
    assert 3 not in batch.data[0]["row"]
    assert batch.data[1].all()


def test_padding_of_older_items_that_no_leaf_shows_is_refused() -> None:
    """Windows that observers padded before they stored kinds, of steps with `is_last` and without `is_first`."""

    def boundary(leaves: Any) -> Any:
        return dict(zip(("row", "is_last"), leaves, strict=True))

    with pytest.raises(StructureError, match="no leaf shows whether these rows are padding or another episode"):
        made(rows_of(np.arange(4), [False, True, False, False], lengths=[4]), boundary, 2)


def test_items_without_a_real_row_are_left_out_of_no_batch() -> None:
    rows = rows_of(np.arange(2.0), [False] * 2, lengths=[2], kinds=[PADDING] * 2)
    with pytest.raises(IncompleteError, match="all rows of 1 items are padding"):
        made(rows, pack, 2)


def test_items_of_several_short_trajectories_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Ids that alternate from row to row make trajectories of one row. A short item alone is no reason to warn."""

    def with_ids(leaves: Any) -> Any:
        return dict(zip(("row", "traj_ids"), leaves, strict=True))

    maker = SlicesOfPools(SliceSampler(2, 3), np.random.default_rng(0))
    for number, ids in enumerate(([0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 0, 1])):
        rows = rows_of(np.arange(4), ids, lengths=[2, 2])
        rows.info.keys[:] += np.uint64(2 * number)
        list(maker.make(Pool(rows, with_ids), ""))  # type: ignore[arg-type]  # stands for an assembler
    (message,) = caplog.messages
    assert message.startswith("No trajectory has `slice_len` = 3 rows")


# Known trajectories.


# Item `a` has rows 0 to 2 and one end within it; item `b`, rows 3 and 4 and no end.
KINDS = {b"a": [FIRST | ACTION, LAST, FIRST | ACTION], b"b": [ACTION, ACTION]}


class Rows:
    """Rows of items that lie end to end, and a record of which were read."""

    def __init__(self, items: list[bytes]) -> None:
        self.items, self.lengths = items, np.array([len(KINDS[item]) for item in items])
        self._kinds = np.concatenate([KINDS[item] for item in items]).astype(np.uint8)
        self._starts = np.concatenate([np.arange(len(KINDS[item])) == 0 for item in items])
        self.was_read: list[int] = []

    def __call__(self, rows: Any, starts: Any) -> Any:
        assert starts.tolist() == self._starts[rows].tolist()
        self.was_read += rows.tolist()
        return self._kinds[rows]

    def found_by(self, known: KnownTrajectories) -> tuple[Any, ...]:
        found, item_of = known.find(self.items, self.lengths, self)
        parts = found.starts, found.lengths, found.begins_episode, item_of
        return *(part.tolist() for part in parts), found.storage_shape


def test_only_rows_of_items_that_are_new_are_read() -> None:
    known, begins = KnownTrajectories(), [True, True]
    first = Rows([b"a"])
    assert first.found_by(known) == ([0, 2], [2, 1], begins, [0, 0], (3,))
    second = Rows([b"b", b"a", b"b"])
    assert second.found_by(known) == ([0, 2, 4, 5], [2, 2, 1, 2], [False, *begins, False], [0, 1, 1, 2], (7,))
    assert (first.was_read, second.was_read) == ([0, 1, 2], [0, 1, 5, 6])
    third = Rows([b"b", b"a"])
    assert third.found_by(known) == ([0, 2, 4], [2, 2, 1], [False, *begins], [0, 1, 1], (5,))
    assert third.was_read == []


def test_items_are_forgotten_when_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reverb_writer.slices.boundaries._MAX_BYTES", 500)  # one item: 200 + 6 x 40
    known = KnownTrajectories()
    for items, was_read in [([b"a"], [0, 1, 2]), ([b"a"], []), ([b"b"], [0, 1]), ([b"a"], [0, 1, 2])]:
        rows = Rows(items)
        rows.found_by(known)
        assert rows.was_read == was_read


def test_item_whose_flags_contradict_each_other_is_not_remembered() -> None:
    known = KnownTrajectories()

    def contradicts(*_: Any) -> Any:
        raise StructureError("flags contradict each other")

    with pytest.raises(StructureError, match="contradict"):
        known.find([b"a"], np.array([3]), contradicts)
    assert Rows([b"a"]).found_by(known) == ([0, 2], [2, 1], [True, True], [0, 0], (3,))
