"""Tensors that dm-reverb's writers store are ours to read, and ours are theirs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tensor_codec

from reverb_writer.protocol import messages

reverb = pytest.importorskip("reverb")
tf = pytest.importorskip("tensorflow")
ml_dtypes = pytest.importorskip("ml_dtypes")

Array = np.ndarray[Any, np.dtype[Any]]

TIMEOUT_S = 30.0
STEPS = 3
KEYS = itertools.count(1)  # of items and of chunks
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
BITS = np.random.default_rng(0).bytes(STEPS * 4 * 16)


def of_dtype(dtype: Any, shape: tuple[int, ...] = (STEPS, 4)) -> Array:
    """Return an array of bits that are the same in every run, without NaN."""
    dtype = np.dtype(dtype)
    array: Array
    if dtype.kind == "b":
        array = np.frombuffer(BITS, "u1", int(np.prod(shape))).reshape(shape) % 2 == 1
        return array
    array = np.frombuffer(BITS, dtype, int(np.prod(shape))).reshape(shape)
    numbers: Array = array if dtype.kind in "iu" else np.nan_to_num(array)
    return numbers


ARRAYS = {
    **{dtype: of_dtype(dtype) for dtype in NUMBERS},
    "scalar steps": of_dtype("f4", (STEPS,)),
    "image": of_dtype("u1", (STEPS, 2, 2, 1)),
    "zero-size steps": np.zeros((STEPS, 0, 2), "i2"),
    "constant": np.zeros((STEPS, 1000), "f8"),
    "bytes": np.array([[b"a", b""], [b"\xff\x00b", b"c\x00"], [b"x" * 300, b"y"]], object),
    "text": np.array([["a", ""], ["\u00e9", "\u65e5\u672c"], ["x" * 300, "y"]]),
    "S": np.array([b"a", b"", b"abc"]),
}


def as_read(array: Array) -> Array:
    """Return an array as any reader of Reverb sees it: strings are objects of type bytes."""
    if array.dtype.kind in "SU":
        strings = [element.encode() if isinstance(element, str) else bytes(element) for element in array.flat]
        return np.array([*strings, None], object)[:-1].reshape(array.shape)
    return array


def assert_same(actual: Array, expected: Array) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual, expected)


@pytest.fixture(scope="module")
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: bytes, response: Any) -> Any:
    """Send one request on a stream and return the first response."""
    answered = threading.Event()

    def requests() -> Iterator[bytes]:
        yield request
        answered.wait(TIMEOUT_S)  # a server that sees the end of the requests may end without a response

    try:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
        return response.FromString(next(call(requests(), timeout=TIMEOUT_S)))
    finally:
        answered.set()


def sampled(channel: grpc.Channel, table: str) -> list[Array]:
    """Sample one item as bytes, decode its chunks and concatenate their slices by column."""
    request = messages.SampleStreamRequest(table=table, num_samples=1).SerializeToString()
    (entry,) = call(channel, messages.SAMPLE_STREAM, request, messages.SampleStreamResponse).entries
    assert entry.end_of_sequence
    chunks = {chunk.chunk_key: chunk for chunk in entry.data}
    columns = []
    for column in entry.info.item.flat_trajectory.columns:
        slices = []
        for part in column.chunk_slices:
            chunk = chunks[part.chunk_key]
            array = tensor_codec.decode(chunk.data.tensors[part.index], delta_encoded=chunk.delta_encoded)
            slices.append(array[part.offset : part.offset + part.length])
        columns.append(np.concatenate(slices))
    return columns


def insert(channel: grpc.Channel, table: str, columns: list[Array]) -> None:
    """Insert one item of one chunk."""
    key = next(KEYS)
    request = messages.InsertStreamRequest()
    chunk = request.chunks.add(chunk_key=key, data_tensors_len=len(columns))
    chunk.sequence_range.episode_id = 1
    chunk.sequence_range.end = len(columns[0]) - 1
    item = request.items.add(key=key, table=table, priority=1.0)
    for index, column in enumerate(columns):
        chunk.data.tensors.add().MergeFromString(tensor_codec.encode(column))
        item.flat_trajectory.columns.add().chunk_slices.add(chunk_key=key, length=len(column), index=index)
    response = call(channel, messages.INSERT_STREAM, request.SerializeToString(), messages.InsertStreamResponse)
    assert response.keys == [key]


@pytest.mark.parametrize("chunk_length", [1, 2, STEPS])
def test_what_their_trajectory_writer_stores_is_decoded(peer: Any, channel: grpc.Channel, chunk_length: int) -> None:
    with peer.trajectory_writer(num_keep_alive_refs=STEPS) as writer:
        for index in range(len(ARRAYS)):
            writer.configure((index,), num_keep_alive_refs=STEPS, max_chunk_length=chunk_length)
        for step in range(STEPS):
            writer.append([array[step] for array in ARRAYS.values()])
        writer.create_item("theirs", 1.0, [column[:] for column in writer.history])
        writer.flush(timeout_ms=int(1000 * TIMEOUT_S))
    for actual, expected in zip(sampled(channel, "theirs"), ARRAYS.values(), strict=True):
        assert_same(actual, as_read(expected))


def test_what_their_writer_stores_as_differences_is_decoded(peer: Any, channel: grpc.Channel) -> None:
    arrays = [of_dtype(dtype) for dtype in NUMBERS] + [of_dtype("i4", (STEPS,)), ARRAYS["bytes"]]
    with peer.writer(max_sequence_length=STEPS, chunk_length=STEPS, delta_encoded=True) as writer:
        for step in range(STEPS):
            writer.append([array[step] for array in arrays])
        writer.create_item("theirs", STEPS, 1.0)
    for actual, expected in zip(sampled(channel, "theirs"), arrays, strict=True):
        assert_same(actual, expected)


def test_a_bfloat16_tensor_of_theirs_is_decoded(address: str, channel: grpc.Channel) -> None:
    expected = of_dtype(BFLOAT16)
    client = reverb.TFClient(address)  # the only writer of theirs that takes one
    client.insert([tf.constant(expected)], tables=tf.constant(["theirs"]), priorities=tf.constant([1.0], tf.float64))
    (actual,) = sampled(channel, "theirs")
    assert_same(actual, expected[np.newaxis])


def test_what_we_encode_is_sampled_by_their_client(peer: Any, channel: grpc.Channel) -> None:
    insert(channel, "ours", list(ARRAYS.values()))
    (sample,) = peer.sample("ours", emit_timesteps=False)
    for actual, expected in zip(sample.data, ARRAYS.values(), strict=True):
        assert_same(actual, as_read(expected))


def test_what_we_encode_of_any_layout_is_sampled_by_their_client(peer: Any, channel: grpc.Channel) -> None:
    expected = of_dtype("i4")
    insert(channel, "ours", [expected.astype(">i4"), np.asfortranarray(expected), expected[:, ::-1], expected[::-1]])
    (sample,) = peer.sample("ours", emit_timesteps=False)
    for actual, meant in zip(sample.data, [expected, expected, expected[:, ::-1], expected[::-1]], strict=True):
        assert_same(actual, meant)


def test_a_bfloat16_tensor_of_ours_is_read_by_their_dataset(address: str, peer: Any, channel: grpc.Channel) -> None:
    expected = of_dtype(BFLOAT16)
    insert(channel, "ours", [expected])
    dataset = reverb.TrajectoryDataset(
        address, "ours", dtypes=(tf.bfloat16,), shapes=(tf.TensorShape(expected.shape),),
        max_in_flight_samples_per_worker=1, max_samples=1,
    )  # fmt: skip
    (sample,) = dataset.as_numpy_iterator()
    assert_same(sample.data[0], expected)


@pytest.mark.parametrize("name", list(ARRAYS))
def test_shape_and_dtype_are_written_as_by_tensorflow(name: str) -> None:
    array = as_read(ARRAYS[name])
    theirs = tf.make_tensor_proto(array, tf.string if array.dtype == object else None)
    ours = messages.TensorProto.FromString(tensor_codec.encode(ARRAYS[name]))
    assert ours.dtype == theirs.dtype
    assert ours.tensor_shape.SerializeToString() == theirs.tensor_shape.SerializeToString()


def test_strings_are_written_and_read_as_by_tensorflow() -> None:
    for name in ("bytes", "text", "S"):
        encoded = tensor_codec.encode(ARRAYS[name])
        assert_same(tf.io.parse_tensor(encoded, tf.string).numpy(), as_read(ARRAYS[name]))
        theirs = tf.io.serialize_tensor(ARRAYS[name]).numpy()  # in `string_val`
        assert_same(tensor_codec.decode(messages.TensorProto.FromString(theirs)), as_read(ARRAYS[name]))
