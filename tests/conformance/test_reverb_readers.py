"""dm-reverb's client and datasets read the items that we write; our datasets end as theirs."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import reverb
import tensorflow as tf
import tree

import reverb_writer as rw

from .nests import DTYPES, assert_equal, step, window, write_windows


@pytest.mark.parametrize(
    ("length", "stride", "num_steps"), [(1, 1, 5), (3, 1, 40), (4, 4, 40), (20, 10, 100), (5, 2, 37)]
)
def test_client_sample_reads_our_windows(
    theirs: Any, ours: rw.Client, length: int, stride: int, num_steps: int
) -> None:
    write_windows(ours, "windows", num_steps, length, stride)
    starts = range(0, num_steps - length + 1, stride)
    samples = list(theirs.sample("windows", len(starts), emit_timesteps=False, unpack_as_table_signature=True))
    for start, sample in zip(starts, samples, strict=True):
        assert_equal(sample.data, window(start, start + length))


def test_client_sample_reads_our_windows_as_timesteps(theirs: Any, ours: rw.Client) -> None:
    write_windows(ours, "windows", 5, 3)
    samples = list(theirs.sample("windows", 3, emit_timesteps=True, unpack_as_table_signature=True))
    for start, timesteps in enumerate(samples):
        assert len(timesteps) == 3
        for number, timestep in enumerate(timesteps, start):
            assert_equal(timestep.data, tree.map_structure(np.asarray, step(number)))


def test_client_sample_reads_every_dtype(theirs: Any, ours: rw.Client) -> None:
    rng = np.random.default_rng(0)
    rows = [
        [rng.integers(0, 2 if dtype is np.bool_ else 100, (2, 2)).astype(dtype) for dtype in DTYPES] for _ in range(4)
    ]
    with closing(rw.TrajectoryObserver(ours, "queue", 4)) as observer:
        for row in rows:
            observer(row)
    (sample,) = theirs.sample("queue", 1, emit_timesteps=False)
    assert_equal(sample.data, [np.stack(column) for column in zip(*rows, strict=True)])


@pytest.mark.parametrize("strings", [["", "reverb"], [b"\x00\xff\x00", b"a" * 300], ["größer", "δ"]])
def test_client_sample_reads_strings(theirs: Any, ours: rw.Client, strings: list[Any]) -> None:
    with closing(rw.TrajectoryObserver(ours, "queue", 2)) as observer:
        for string in strings:
            observer({"text": np.array(string, object), "pair": np.array([string, string], object)})
    (sample,) = theirs.sample("queue", 1, emit_timesteps=False)
    stored = [string.encode() if isinstance(string, str) else string for string in strings]
    assert [column.tolist() for column in sample.data] == [[[string, string] for string in stored], stored]


def test_client_sample_reads_what_we_insert(theirs: Any, ours: rw.Client) -> None:
    data = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": {"c": np.arange(5, dtype=np.int32)}}
    ours.insert(data, {"blobs": 0.5, "queue": 2.0})
    (sample,) = theirs.sample("blobs", 1, emit_timesteps=False, unpack_as_table_signature=True)
    assert_equal(sample.data, data)
    assert sample.info.priority == 0.5
    (sample,) = theirs.sample("queue", 1, emit_timesteps=False)
    assert_equal(sample.data, tree.flatten(data))
    assert sample.info.priority == 2.0


def trajectories(dataset: Any) -> list[Any]:
    return [tree.map_structure(lambda leaf: leaf.numpy(), sample.data) for sample in dataset]


def test_trajectory_dataset_of_the_signature_reads_our_windows(server: str, theirs: Any, ours: rw.Client) -> None:
    write_windows(ours, "windows", 30, 4, 2)
    dataset = reverb.TrajectoryDataset.from_table_signature(
        server, "windows", max_in_flight_samples_per_worker=2, num_workers_per_iterator=1, max_samples=14
    )
    for start, data in zip(range(0, 27, 2), trajectories(dataset), strict=True):
        assert_equal(data, window(start, start + 4))


def assert_timesteps(dataset: Any, num_steps: int) -> None:
    timesteps = trajectories(dataset)
    assert len(timesteps) == num_steps
    for number, data in enumerate(timesteps):
        assert_equal(data, tree.map_structure(np.asarray, step(number)))


def test_timestep_dataset_of_the_signature_reads_our_windows(server: str, theirs: Any, ours: rw.Client) -> None:
    write_windows(ours, "steps", 12, 4, 4)
    dataset = reverb.TimestepDataset.from_table_signature(
        server, "steps", max_in_flight_samples_per_worker=2, num_workers_per_iterator=1, max_samples=3
    )
    assert_timesteps(dataset, 12)


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


def test_a_dataset_ends_when_its_rate_limiter_timeout_is_over(address: str, peer: Any) -> None:
    peer.insert([np.arange(3, dtype=np.int64)], {"ours": 1.0})
    dataset = reverb.TrajectoryDataset(
        address,
        "ours",
        (tf.int64,),
        (tf.TensorShape([1, 3]),),
        max_in_flight_samples_per_worker=1,
        num_workers_per_iterator=1,
        rate_limiter_timeout_ms=300,
    )
    assert [sample.data[0].numpy().tolist() for sample in dataset] == [[[0, 1, 2]]]
