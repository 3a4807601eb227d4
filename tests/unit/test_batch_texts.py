"""Batches as text: shapes instead of numbers."""

from __future__ import annotations

import numpy as np

from reverb_writer.decoding.samples import BatchInfo
from reverb_writer.slices.batch import Batch


def info_of(n: int) -> BatchInfo:
    counts = np.full(n, 2, np.int64)
    return BatchInfo(
        np.arange(n, dtype=np.uint64), np.ones(n), np.ones(n), counts, counts.astype(np.int32), counts, 1.5, "a:1"
    )


INFO_TEXT = (
    "BatchInfo(keys=uint64 [64], priorities=float64 [64], probabilities=float64 [64], table_sizes=int64 [64], "
    "times_sampled=int32 [64], lengths=int64 [64], received_at=1.5, server='a:1')"
)


def test_batch_shows_dtypes_and_shapes() -> None:
    assert repr(info_of(64)) == INFO_TEXT
    data = {"x": np.zeros((64, 5, 3), np.float32), "name": np.full((64, 5), b"", object)}
    assert (
        repr(Batch(data, info_of(64)))
        == f"Batch(data={{'x': float32 [64, 5, 3], 'name': strings [64, 5]}}, info={INFO_TEXT})"
    )


def test_list_of_samples_shows_the_first() -> None:
    assert repr(Batch([{"x": np.zeros((2, 3))}] * 64, info_of(64))).startswith(
        "Batch(data=[{'x': float64 [2, 3]}, ... 64 in all], info="
    )


def test_importance_weights_are_those_of_schaul() -> None:
    # N = 4, P = 1/2 and 1/8, beta = 1/2: (4 / 2) ** -1/2 = 0.7071 and (4 / 8) ** -1/2 = 1.4142, over the largest.
    info = info_of(2)
    info = BatchInfo(**{**vars(info), "probabilities": np.array([0.5, 0.125]), "table_sizes": np.array([4, 4])})
    np.testing.assert_allclose(info.importance_weights(0.5), [0.5, 1.0])
