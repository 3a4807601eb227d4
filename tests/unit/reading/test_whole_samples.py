"""Batches of whole samples, made without a server: packed, padded, limited by rows and by age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from reverb_writer.decoding.joined_rows import JoinedRows
from reverb_writer.decoding.samples import BatchInfo, SampleRows
from reverb_writer.errors import StructureError
from reverb_writer.reading.whole_samples import WholeSamples
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING


class Samples:
    """Stands for the assembler of samples: their rows count on from `first`, and have a version."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        first: int = 0,
        versions: Sequence[int] | None = None,
        kinds: Sequence[int] | None = None,
        dtype: Any = np.int64,
    ) -> None:
        sizes = np.array(lengths, np.int64)
        self.num_samples = len(sizes)
        numbers = np.ones(len(sizes))
        info = BatchInfo(sizes.astype(np.uint64), numbers, numbers / 4, sizes, sizes.astype(np.int32), sizes, 0.0)
        rows = JoinedRows.end_to_end(sizes) if lengths else None
        of_rows = np.arange(first, first + sizes.sum()).astype(dtype)
        version = np.zeros(sizes.sum(), np.int64) if versions is None else np.array(versions)
        sources: Any = [(of_rows, rows), (version, rows)]
        self._rows = SampleRows(sources, info, None if kinds is None else (np.array(kinds, np.uint8), rows))  # type: ignore[arg-type]

    def rows(self) -> SampleRows:
        return self._rows

    def lengths(self) -> Any:
        return self._rows.info.lengths

    @staticmethod
    def pack(columns: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(("x", "version"), columns, strict=True))


def made(maker: Any, samples: Samples) -> list[list[Any]]:
    return [batch.data["x"].tolist() for batch in maker.make(samples, "")]


def test_packed_samples_are_slices_that_no_sampler_has_cut() -> None:
    kinds = [FIRST | ACTION, LAST, ACTION, ACTION, LAST]
    (batch,) = WholeSamples(2, "pack").make(Samples([2, 3], first=10, kinds=kinds), "a:1")  # type: ignore[arg-type]
    slices = batch.slices
    assert batch.data["x"].tolist() == [10, 11, 12, 13, 14]
    assert batch.kinds.tolist() == kinds
    assert (slices.lengths.tolist(), slices.first_rows.tolist(), slices.last_rows.tolist()) == ([2, 3], [0, 2], [1, 4])
    assert slices.offsets.tolist() == [0, 2, 5]
    assert slices.starts.tolist() == [True, False, True, False, False]
    assert (slices.mask.all(), slices.cut_by_sampler.any(), slices.probabilities.tolist()) == (True, False, [0.25] * 2)
    assert batch.is_last.tolist() == [False, True, False, False, True]
    assert batch.info.server == "a:1"


def test_padded_samples_have_kinds_of_padding() -> None:
    kinds = [FIRST | ACTION, LAST, FIRST | ACTION, ACTION, LAST]
    (batch,) = WholeSamples(2, "pad").make(Samples([2, 3], first=1, kinds=kinds), "")  # type: ignore[arg-type]
    assert batch.data["x"].tolist() == [[1, 2, 0], [3, 4, 5]]
    assert batch.kinds.tolist() == [[3, 4, PADDING], [3, 2, 4]]


def test_batch_ends_before_the_sample_that_would_exceed_the_rows() -> None:
    maker: Any = WholeSamples(9, "pack", max_rows=5)
    # 2 + 3 rows fill a batch; 4 + 2 are too many; 7 rows are a batch by themselves.
    assert made(maker, Samples([2, 3, 4, 2, 7, 1])) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10],
        [11, 12, 13, 14, 15, 16, 17],
    ]
    assert made(maker, Samples([3, 2], first=100)) == [[18, 100, 101, 102]]
    assert maker.rest().data["x"].tolist() == [103, 104]
    assert maker.rest() is None


def test_padding_counts_as_rows() -> None:
    maker: Any = WholeSamples(9, "pad", max_rows=6)
    assert made(maker, Samples([1, 2, 2, 3, 1])) == [[[0, 0], [1, 2], [3, 4]], [[5, 6, 7], [8, 0, 0]]]


def test_limit_of_samples_holds_beside_the_limit_of_rows() -> None:
    maker: Any = WholeSamples(2, "pack", max_rows=100)
    assert not maker.is_full(Samples([1]))
    assert maker.is_full(Samples([1, 1]))
    assert made(maker, Samples([1, 1, 1])) == [[0, 1]]
    assert maker.is_full(Samples([1]))
    assert made(maker, Samples([1], first=5)) == [[2, 5]]


def test_samples_that_are_too_old_are_left_out_and_make_room() -> None:
    maker: Any = WholeSamples(2, "pack", max_age=1)
    assert made(maker, Samples([1, 1], versions=[3, 4])) == [[0, 1]]  # no version is known
    maker.newest = 5
    assert made(maker, Samples([1, 1, 1], first=10, versions=[3, 4, 3])) == []
    assert maker.num_left_out == 2
    (batch,) = maker.make(Samples([1, 1], first=20, versions=[5, 6]), "")
    assert (batch.data["x"].tolist(), batch.info.versions.tolist()) == ([11, 20], [4, 5])
    maker.newest = 8  # the sample that remained has become too old
    assert made(maker, Samples([1], first=30, versions=[7])) == []
    assert maker.num_left_out == 3
    assert maker.rest().data["x"].tolist() == [30]


def test_one_batch_at_a_time_is_made_if_samples_age() -> None:
    maker: Any = WholeSamples(1, "pack", max_age=0)
    maker.newest = 1
    assert made(maker, Samples([1, 1, 1], versions=[1, 1, 2])) == [[0]]
    maker.newest = 2
    assert maker.is_full(Samples([]))
    assert made(maker, Samples([])) == [[2]]
    assert maker.num_left_out == 1


def test_version_of_a_sample_is_the_smallest_of_its_rows_with_an_action() -> None:
    kinds = [ACTION, ACTION, LAST, PADDING, LAST]
    maker: Any = WholeSamples(2, "pad", max_age=9)
    (batch,) = maker.make(Samples([4, 1], versions=[6, 5, 0, 0, 7], kinds=kinds), "")
    assert batch.info.versions.tolist() == [5, 7]
    maker = WholeSamples(2, "pad", max_age=9)
    (batch,) = maker.make(Samples([4, 1], versions=[6, 5, 4, 8, 7]), "")
    assert batch.info.versions.tolist() == [4, 7]


def test_leaf_without_a_version_is_refused() -> None:
    with pytest.raises(StructureError, match=r"no leaf `age`.*`version`"):
        WholeSamples(1, max_age=1, version="age").make(Samples([1]), "")  # type: ignore[arg-type]
    with pytest.raises(StructureError, match=r"`x`: float32.*expected an integer"):
        WholeSamples(1, max_age=1, version="x").make(Samples([1], dtype=np.float32), "")  # type: ignore[arg-type]


def test_rest_of_another_dtype_is_a_batch_of_its_own() -> None:
    maker: Any = WholeSamples(2, "pack", max_rows=9)
    assert made(maker, Samples([1])) == []
    assert made(maker, Samples([1], first=7, dtype=np.float32)) == [[0]]
    assert maker.rest().data["x"].tolist() == [7.0]
