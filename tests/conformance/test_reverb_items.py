"""dm-reverb's writers and our readers, and the reverse: the same arrays, dtypes and structure."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reverb
import tensor_codec
import tensorflow as tf
import tree
from reverb import structured_writer as structured

import reverb_writer as rw
from reverb_writer.protocol.messages import TensorProto

from .nests import assert_equal, step, window, write_windows

STEPS = 3
NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
BITS = np.random.default_rng(0).bytes(STEPS * 4 * 16)
BFLOAT16 = np.frombuffer(BITS, ml_dtypes.bfloat16, STEPS * 4).reshape(STEPS, 4)


def of_dtype(dtype: str, *shape: int) -> Any:
    """Return an array of bits that are the same in every run, without NaN."""
    array = np.frombuffer(BITS, "u1" if dtype == "?" else dtype, int(np.prod(shape))).reshape(shape)
    return array % 2 == 1 if dtype == "?" else np.nan_to_num(array)


ARRAYS = {
    **{dtype: of_dtype(dtype, STEPS, 4) for dtype in NUMBERS},
    "scalar steps": of_dtype("f4", STEPS),
    "image": of_dtype("u1", STEPS, 2, 2, 1),
    "zero-size steps": np.zeros((STEPS, 0, 2), "i2"),
    "constant": np.zeros((STEPS, 1000), "f8"),
    "bytes": np.array([[b"a", b""], [b"\xff\x00b", b"c\x00"], [b"x" * 300, b"y"]], object),
    "text": np.array([["a", ""], ["\u00e9", "\u65e5\u672c"], ["x" * 300, "y"]]),
    "S": np.array([b"a", b"", b"abc"]),
}


def as_read(array: Any) -> Any:
    """Return an array as any reader of Reverb sees it: strings are objects of type bytes."""
    if array.dtype.kind in "SU":
        strings = [element.encode() if isinstance(element, str) else bytes(element) for element in array.flat]
        return np.array([*strings, None], object)[:-1].reshape(array.shape)
    return array


READ = tuple(map(as_read, ARRAYS.values()))


# Theirs, read by us.


@pytest.mark.parametrize("chunk_length", [1, 2, STEPS])
def test_we_read_arrays_of_every_kind(peer: Any, our_client: rw.Client, chunk_length: int) -> None:
    with peer.trajectory_writer(num_keep_alive_refs=STEPS) as writer:
        for index in range(len(ARRAYS)):
            writer.configure((index,), num_keep_alive_refs=STEPS, max_chunk_length=chunk_length)
        for number in range(STEPS):
            writer.append([array[number] for array in ARRAYS.values()])
        writer.create_item("theirs", 1.0, [column[:] for column in writer.history])
        writer.flush(timeout_ms=30_000)
    (sample,) = our_client.sample("theirs")
    assert_equal(sample.data, READ)


@pytest.mark.parametrize("delta_encoded", [False, True])
@pytest.mark.parametrize("chunk_length", [1, 3, 8])
def test_we_read_the_legacy_writer(peer: Any, our_client: rw.Client, delta_encoded: bool, chunk_length: int) -> None:
    def row(number: int) -> list[Any]:
        wrapped = np.array([250 + 3 * number, -7 * number])
        others = [np.uint64(2**64 - 1 - 5 * number), np.int32(number), np.array([b"a" * number, b""], object)]
        return [*(wrapped.astype(dtype) for dtype in NUMBERS), *others]

    with peer.writer(max_sequence_length=8, delta_encoded=delta_encoded, chunk_length=chunk_length) as writer:
        for number in range(20):
            writer.append(row(number))
            if number >= 7:
                writer.create_item("theirs", 8, 1.0)
    for start, sample in enumerate(our_client.sample("theirs", 13)):
        columns = zip(*(row(number) for number in range(start, start + 8)), strict=True)
        assert_equal(sample.data, tuple(np.stack(column) for column in columns))


def test_both_read_a_bfloat16_tensor_of_the_other(address: str, peer: Any, our_client: rw.Client) -> None:
    client = reverb.TFClient(address)  # the only writer of theirs that takes one
    client.insert([tf.constant(BFLOAT16)], tables=tf.constant(["theirs"]), priorities=tf.constant([1.0], tf.float64))
    (sample,) = our_client.sample("theirs")
    assert_equal(sample.data, (BFLOAT16[None],))
    our_client.insert([BFLOAT16], {"ours": 1.0})
    dataset = reverb.TrajectoryDataset(
        address, "ours", dtypes=(tf.bfloat16,), shapes=(tf.TensorShape(BFLOAT16.shape),),
        max_in_flight_samples_per_worker=1, max_samples=1,
    )  # fmt: skip
    (sample,) = dataset.as_numpy_iterator()
    assert_equal(sample.data[0], BFLOAT16)


@pytest.mark.parametrize("chunk_length", [None, 1, 2, 7])
def test_we_read_trajectory_writer(peer: Any, our_client: rw.Client, chunk_length: int | None) -> None:
    with peer.trajectory_writer(num_keep_alive_refs=8) as writer:
        for number in range(20):
            writer.append(step(number))
            if number == 0 and chunk_length:
                for path, _ in tree.flatten_with_path(step(0)):
                    writer.configure(path, num_keep_alive_refs=8, max_chunk_length=chunk_length)
            if number >= 4:
                trajectory = tree.map_structure(lambda column: column[-5:], writer.history)
                writer.create_item("windows", number, trajectory)
        writer.flush()
    samples = list(our_client.sample("windows", 16))
    for start, sample in enumerate(samples):
        assert_equal(sample.data, window(start, start + 5))
        assert sample.info.priority == start + 4


def test_we_read_squeezed_columns_columns_of_different_lengths_and_partial_steps(
    peer: Any, our_client: rw.Client
) -> None:
    with peer.trajectory_writer(num_keep_alive_refs=6) as writer:
        for number in range(6):
            writer.append(step(number))
        history = writer.history
        trajectory = {
            "last": history["number"][-1],
            "one": history["number"][-1:],
            "sparse": history["camera"][[-6, -3, -1]],
            "states": history["state"][1][-4:],
        }
        writer.create_item("ours", 1.0, trajectory)
        writer.flush()
    with peer.trajectory_writer(num_keep_alive_refs=4) as writer:
        for number in range(4):
            writer.append({"observation": np.float32(number)}, partial_step=True)
            writer.append({"action": np.int32(-number)})
        writer.create_item("ours", 1.0, tree.map_structure(lambda column: column[:], writer.history))
        writer.flush()
    squeezed, partial = our_client.sample("ours", 2)
    steps = window(0, 6)
    expected = (steps["number"][-1], steps["number"][-1:], steps["camera"][[0, 3, 5]], steps["state"][1][-4:])
    assert_equal(squeezed.data, tuple(map(np.asarray, expected)))
    assert_equal(partial.data, (-np.arange(4, dtype=np.int32), np.arange(4, dtype=np.float32)))


def test_we_read_what_their_client_inserts(peer: Any, our_client: rw.Client) -> None:
    peer.insert([np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.5)], {"ours": 4.0})
    (sample,) = our_client.sample("ours", 1)
    assert_equal(sample.data, (np.arange(6, dtype=np.int16).reshape(1, 2, 3), np.array([0.5])))
    assert sample.info.priority == 4.0


def test_we_read_the_structured_writer(peer: Any, our_client: rw.Client) -> None:
    pattern = structured.pattern_from_transform(
        tree.map_structure(lambda _: None, step(0)),
        lambda ref: {"last": ref["number"][-1], "past": ref["state"][1][-3:], "strided": ref["camera"][-5::2]},
    )
    config = structured.create_config(pattern, "ours", conditions=[structured.Condition.step_index() >= 4])
    writer = peer.structured_writer([config])
    for number in range(8):
        writer.append(step(number))
    writer.end_episode()
    for start, sample in enumerate(our_client.sample("ours", 4)):
        steps = window(start, start + 5)
        assert_equal(sample.data, (np.asarray(steps["number"][-1]), steps["state"][1][-3:], steps["camera"][::2]))


# Ours, read by their client and datasets.


def test_client_sample_reads_arrays_of_every_kind(peer: Any, our_client: rw.Client) -> None:
    with closing(rw.TrajectoryObserver(our_client, "ours", STEPS)) as observer:
        for number in range(STEPS):
            observer([array[number] for array in ARRAYS.values()])
    (sample,) = peer.sample("ours", 1, emit_timesteps=False)
    assert_equal(sample.data, [*READ])


@pytest.mark.parametrize("name", list(ARRAYS))
def test_tensors_are_written_and_strings_read_as_by_tensorflow(name: str) -> None:
    array, encoded = as_read(ARRAYS[name]), tensor_codec.encode(ARRAYS[name])
    theirs = tf.make_tensor_proto(array, tf.string if array.dtype == object else None)
    ours = TensorProto.FromString(encoded)
    assert ours.dtype == theirs.dtype
    assert ours.tensor_shape.SerializeToString() == theirs.tensor_shape.SerializeToString()
    if array.dtype == object:
        assert_equal(tf.io.parse_tensor(encoded, tf.string).numpy(), array)
        serialized = tf.io.serialize_tensor(ARRAYS[name]).numpy()  # in `string_val`
        assert_equal(tensor_codec.decode(TensorProto.FromString(serialized)), array)


@pytest.mark.parametrize(
    ("length", "stride", "num_steps"), [(1, 1, 5), (3, 1, 40), (4, 4, 40), (20, 10, 100), (5, 2, 37)]
)
def test_client_sample_reads_our_windows(
    peer: Any, our_client: rw.Client, length: int, stride: int, num_steps: int
) -> None:
    write_windows(our_client, "windows", num_steps, length, stride)
    starts = range(0, num_steps - length + 1, stride)
    samples = list(peer.sample("windows", len(starts), emit_timesteps=False, unpack_as_table_signature=True))
    for start, sample in zip(starts, samples, strict=True):
        assert_equal(sample.data, window(start, start + length))


def test_client_sample_reads_what_we_insert(peer: Any, our_client: rw.Client) -> None:
    data = {"a": np.arange(6, dtype=np.float32).reshape(3, 2), "b": {"c": np.arange(5, dtype=np.int32)}}
    our_client.insert(data, {"blobs": 0.5, "ours": 2.0})
    (sample,) = peer.sample("blobs", 1, emit_timesteps=False, unpack_as_table_signature=True)
    assert_equal(sample.data, data)
    assert sample.info.priority == 0.5
    (sample,) = peer.sample("ours", 1, emit_timesteps=False)
    assert_equal(sample.data, tree.flatten(data))
    assert sample.info.priority == 2.0
    our_client.insert({"return": 0.1, "steps": np.arange(3)}, {"ours": 1.0}, squeeze={"return": True, "steps": False})
    (sample,) = peer.sample("ours", 1, emit_timesteps=False)
    assert_equal(sample.data, [np.array(0.1), np.arange(3)])


def test_client_sample_reads_items_of_an_item_writer_that_do_not_shrink(peer: Any, our_client: rw.Client) -> None:
    """After the first item the writer stores the arrays as one literal each, of up to four length bytes."""
    rng = np.random.default_rng(0)
    items = [
        tuple(rng.integers(0, 256, size, np.uint8) for size in (10, 300, 70_000, 1 + number)) for number in range(3)
    ]
    with rw.ItemWriter(our_client, "ours") as writer:
        for item in items:
            writer.write(item)
    for sample, item in zip(peer.sample("ours", 3, emit_timesteps=False), items, strict=True):
        for read, written in zip(sample.data, item, strict=True):
            np.testing.assert_array_equal(read, written)


def test_datasets_of_the_signature_read_our_windows(address: str, peer: Any, our_client: rw.Client) -> None:
    def read(kind: Any, table: str, num_items: int) -> list[Any]:
        options = {"max_in_flight_samples_per_worker": 2, "num_workers_per_iterator": 1, "max_samples": num_items}
        dataset = kind.from_table_signature(address, table, **options)
        return [tree.map_structure(lambda leaf: leaf.numpy(), sample.data) for sample in dataset]

    write_windows(our_client, "windows", 30, 4, 2)
    for start, data in zip(range(0, 27, 2), read(reverb.TrajectoryDataset, "windows", 14), strict=True):
        assert_equal(data, window(start, start + 4))
    write_windows(our_client, "steps", 12, 4, 4)
    for number, data in enumerate(timesteps := read(reverb.TimestepDataset, "steps", 3)):
        assert_equal(data, tree.map_structure(np.asarray, step(number)))
    assert len(timesteps) == 12


def test_a_dataset_ends_when_its_rate_limiter_timeout_is_over(address: str, peer: Any) -> None:
    peer.insert([np.arange(3, dtype=np.int64)], {"ours": 1.0})
    options = {"max_in_flight_samples_per_worker": 1, "num_workers_per_iterator": 1, "rate_limiter_timeout_ms": 300}
    dataset = reverb.TrajectoryDataset(address, "ours", (tf.int64,), (tf.TensorShape([1, 3]),), **options)
    assert [sample.data[0].numpy().tolist() for sample in dataset] == [[[0, 1, 2]]]
