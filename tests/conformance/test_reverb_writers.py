"""What dm-reverb's writers write, we read: the same arrays, dtypes and structure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from reverb import structured_writer as structured

import reverb_writer as rw

from .nests import DTYPES, assert_equal, step, window


@pytest.mark.parametrize("chunk_length", [None, 1, 2, 7])
def test_we_read_trajectory_writer(theirs: Any, ours: rw.Client, chunk_length: int | None) -> None:
    with theirs.trajectory_writer(num_keep_alive_refs=8) as writer:
        for number in range(20):
            writer.append(step(number))
            if number == 0 and chunk_length:
                for path, _ in tree.flatten_with_path(step(0)):
                    writer.configure(path, num_keep_alive_refs=8, max_chunk_length=chunk_length)
            if number >= 4:
                trajectory = tree.map_structure(lambda column: column[-5:], writer.history)
                writer.create_item("windows", number, trajectory)
        writer.flush()
    samples = list(ours.sample("windows", 16))
    for start, sample in enumerate(samples):
        assert_equal(sample.data, window(start, start + 5))
        assert sample.info.priority == start + 4


def test_we_read_squeezed_columns_and_columns_of_different_lengths(theirs: Any, ours: rw.Client) -> None:
    with theirs.trajectory_writer(num_keep_alive_refs=6) as writer:
        for number in range(6):
            writer.append(step(number))
        history = writer.history
        trajectory = {
            "last": history["number"][-1],
            "one": history["number"][-1:],
            "sparse": history["camera"][[-6, -3, -1]],
            "states": history["state"][1][-4:],
        }
        writer.create_item("queue", 1.0, trajectory)
        writer.flush()
    (sample,) = ours.sample("queue", 1)
    steps = window(0, 6)
    expected = (steps["number"][-1], steps["number"][-1:], steps["camera"][[0, 3, 5]], steps["state"][1][-4:])
    assert_equal(sample.data, tuple(map(np.asarray, expected)))


def test_we_read_partial_steps(theirs: Any, ours: rw.Client) -> None:
    with theirs.trajectory_writer(num_keep_alive_refs=4) as writer:
        for number in range(4):
            writer.append({"observation": np.float32(number)}, partial_step=True)
            writer.append({"action": np.int32(-number)})
        writer.create_item("queue", 1.0, tree.map_structure(lambda column: column[:], writer.history))
        writer.flush()
    (sample,) = ours.sample("queue", 1)
    assert_equal(sample.data, (-np.arange(4, dtype=np.int32), np.arange(4, dtype=np.float32)))


@pytest.mark.parametrize("delta_encoded", [False, True])
@pytest.mark.parametrize("chunk_length", [1, 3, 8])
def test_we_read_the_legacy_writer(theirs: Any, ours: rw.Client, delta_encoded: bool, chunk_length: int) -> None:
    def row(number: int) -> list[Any]:
        wrapped = [
            np.array([250 + 3 * number, -7 * number]).astype(dtype)
            for dtype in (np.uint8, np.int8, np.uint16, np.int64)
        ]
        return [*wrapped, np.float32(number) / 7, np.array([number % 2 == 0]), np.uint64(2**64 - 1 - 5 * number)]

    with theirs.writer(max_sequence_length=8, delta_encoded=delta_encoded, chunk_length=chunk_length) as writer:
        for number in range(20):
            writer.append(row(number))
            if number >= 7:
                writer.create_item("queue", 8, 1.0)
    for start, sample in enumerate(ours.sample("queue", 13)):
        columns = zip(*(row(number) for number in range(start, start + 8)), strict=True)
        assert_equal(sample.data, tuple(np.stack(column) for column in columns))


def test_we_read_what_their_client_inserts(theirs: Any, ours: rw.Client) -> None:
    theirs.insert([np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.5)], {"queue": 4.0})
    (sample,) = ours.sample("queue", 1)
    assert_equal(sample.data, (np.arange(6, dtype=np.int16).reshape(1, 2, 3), np.array([0.5])))
    assert sample.info.priority == 4.0


def test_we_read_the_structured_writer(theirs: Any, ours: rw.Client) -> None:
    pattern = structured.pattern_from_transform(
        tree.map_structure(lambda _: None, step(0)),
        lambda ref: {"last": ref["number"][-1], "past": ref["state"][1][-3:], "strided": ref["camera"][-5::2]},
    )
    config = structured.create_config(pattern, "queue", conditions=[structured.Condition.step_index() >= 4])
    writer = theirs.structured_writer([config])
    for number in range(8):
        writer.append(step(number))
    writer.end_episode()
    for start, sample in enumerate(ours.sample("queue", 4)):
        steps = window(start, start + 5)
        assert_equal(sample.data, (np.asarray(steps["number"][-1]), steps["state"][1][-3:], steps["camera"][::2]))


def test_we_read_every_dtype(theirs: Any, ours: rw.Client) -> None:
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 2 if dtype is np.bool_ else 100, (2, 2)).astype(dtype) for dtype in DTYPES]
    theirs.insert(data, {"queue": 1.0})
    (sample,) = ours.sample("queue", 1)
    assert_equal(sample.data, tuple(column[None] for column in data))


@pytest.mark.parametrize("strings", [[b"", b"reverb"], [b"\x00\xff\x00", b"a" * 300]])
def test_we_read_strings(theirs: Any, ours: rw.Client, strings: list[bytes]) -> None:
    with theirs.trajectory_writer(num_keep_alive_refs=2) as writer:
        for string in strings:
            writer.append({"text": np.array(string, object), "pair": np.array([string, string], object)})
        writer.create_item("queue", 1.0, tree.map_structure(lambda column: column[:], writer.history))
        writer.flush()
    (sample,) = ours.sample("queue", 1)
    assert [column.tolist() for column in sample.data] == [[[string, string] for string in strings], strings]


def test_we_read_a_sample_that_is_split_over_messages(theirs: Any, ours: rw.Client) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (60, 1 << 20), dtype=np.uint8)  # more than the 40 MB that one message holds
    with theirs.trajectory_writer(num_keep_alive_refs=60) as writer:
        for frame in frames:
            writer.append([frame])
        writer.create_item("queue", 1.0, [writer.history[0][:]])
        writer.flush()
    (sample,) = ours.sample("queue", 1)
    assert_equal(sample.data, (frames,))
