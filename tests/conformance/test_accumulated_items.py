"""What an accumulator writes is read by dm-reverb's own client: rows as rows, single values without time."""

from __future__ import annotations

from typing import Any

import numpy as np

import reverb_writer as rw


def test_columns_of_different_lengths_and_single_values_are_read_as_they_were_written(peer: Any) -> None:
    accumulator = rw.TrajectoryAccumulator(
        {
            "step": {"observation": np.zeros((3, 2), np.float32), "action": np.zeros(3, np.int64)},
            "macro": np.zeros((2, 1), np.uint8),
            "rollout": {"return": np.float64(0), "weights": np.zeros((2, 2), np.float16)},
            "final": np.zeros((1, 2), np.float32),
        }
    )
    for t in range(3):
        accumulator.add("step", {"observation": np.full(2, t), "action": t + 10})
    for t in range(2):
        accumulator.add("macro", t + 20)
    accumulator.add("rollout", {"return": 0.1, "weights": np.eye(2)})
    accumulator.add("final", np.array([3.0, 3.0]))
    accumulator.insert(peer, "ours", 0.5)
    (sample,) = peer.sample("ours", 1, emit_timesteps=False)
    expected: list[Any] = [
        np.array([[3, 3]], np.float32),
        np.array([[20], [21]], np.uint8),
        np.array(0.1),
        np.eye(2, dtype=np.float16),
        np.array([10, 11, 12]),
        np.array([[0, 0], [1, 1], [2, 2]], np.float32),
    ]
    assert sample.info.priority == 0.5
    assert len(sample.data) == len(expected)
    for found, wanted in zip(sample.data, expected, strict=True):
        assert np.asarray(found).dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted, strict=True)
