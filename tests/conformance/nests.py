"""Tables and steps for tests in which dm-reverb and ours read and write the same items."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import tensorflow as tf
import tree
from reading import fifo

import reverb_writer as rw

STEP = {
    "camera": tf.TensorSpec([2, 3, 1], tf.uint8),
    "state": (tf.TensorSpec([], tf.float64), tf.TensorSpec([4], tf.float32)),
    "number": tf.TensorSpec([], tf.int64),
}
WINDOW = tree.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), STEP)
BLOB = {"a": tf.TensorSpec([None, 2], tf.float32), "b": {"c": tf.TensorSpec([None], tf.int32)}}
TABLES = [
    *map(fifo, ("ours", "ours_too", "theirs", "theirs_too")),
    rw.TableConfig("kept", sampler="fifo"),
    fifo("windows", signature=WINDOW),
    fifo("steps", signature=STEP),  # TimestepDataset takes the signature for that of a step, not of a window
    fifo("blobs", signature=BLOB),
    rw.TableConfig("heap", sampler="max_heap"),
    rw.TableConfig("prioritized", sampler="prioritized"),
]


def step(number: int) -> dict[str, Any]:
    return {
        "camera": np.full((2, 3, 1), number, np.uint8),
        "state": (np.float64(number) / 3, np.arange(4, dtype=np.float32) + number),
        "number": np.int64(number),
    }


def window(start: int, stop: int) -> dict[str, Any]:
    steps: dict[str, Any] = tree.map_structure(lambda *leaves: np.stack(leaves), *map(step, range(start, stop)))
    return steps


def assert_equal(got: Any, expected: Any) -> None:
    """Fail unless two nests agree in structure, and in dtype, shape and values of each leaf."""
    tree.assert_same_structure(got, expected)
    for path, (one, other) in zip(
        (path for path, _ in tree.flatten_with_path(expected)),
        zip(tree.flatten(got), tree.flatten(expected), strict=True),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other, err_msg=str(path), strict=True)


def write_windows(client: Any, table: str, num_steps: int, length: int, stride: int = 1) -> None:
    with closing(rw.TrajectoryObserver(client, table, length, stride)) as observer:
        for number in range(num_steps):
            observer(step(number))
