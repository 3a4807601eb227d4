"""The protobuf parser reads from encoded items and chunks exactly the arguments of their encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensor_codec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reverb_writer.protocol import item_encoding
from reverb_writer.protocol.messages import InsertStreamRequest, PrioritizedItem, StoredItem, StoredRequest

few = settings(max_examples=30)

KEYS = st.integers(0, item_encoding.KEY_LIMIT - 1)
TABLES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)
# The widths of an index change at 128 columns, those of a column's and an item's length before and after that.
NUM_COLUMNS = st.integers(1, 6) | st.sampled_from([126, 127, 128, 129, 130, 300])


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    num_columns = draw(NUM_COLUMNS)
    n = draw(st.integers(1, 4))
    m = draw(st.integers(1, 9) if num_columns < 100 else st.integers(1, 2))
    c = draw(st.integers(1, 9))
    pieces = st.lists(st.integers(0, item_encoding.MAX_CHUNK_LENGTH), min_size=2, max_size=2, unique=True).map(sorted)
    steps = np.array(draw(st.lists(pieces, min_size=n * m, max_size=n * m)), np.int64).reshape(n, m, 2)
    request = {
        "table": draw(TABLES),
        "keys": np.array(draw(st.lists(KEYS, min_size=n, max_size=n)), np.uint64),
        "priorities": np.array(draw(st.lists(st.floats(0, allow_infinity=False), min_size=n, max_size=n))),
        "chunk_keys": np.array(draw(st.lists(KEYS, min_size=c, max_size=c)), np.uint64),
        "touched": np.array(draw(st.lists(st.integers(0, c - 1), min_size=n * m, max_size=n * m))).reshape(n, m),
        "offsets": steps[..., 0],
        "lengths": steps[..., 1] - steps[..., 0],
        "num_columns": num_columns,
    }
    for argument in request.values():
        if isinstance(argument, np.ndarray):
            argument.flags.writeable = False
    return request


LARGEST: dict[str, Any] = {
    "table": "t" * 20_000,
    "keys": np.array([item_encoding.KEY_LIMIT - 1, 0], np.uint64),
    "priorities": np.array([np.finfo(float).max, 5e-324]),
    "chunk_keys": np.array([item_encoding.KEY_LIMIT - 1], np.uint64),
    "touched": np.zeros((2, 300), np.int64),
    "offsets": np.full((2, 300), item_encoding.MAX_CHUNK_LENGTH - 1),
    "lengths": np.full((2, 300), 1),
    "num_columns": 2,
}


def encode(*, table: str, num_columns: int, **arrays: Any) -> Any:
    slices = item_encoding.encode_slices(*(arrays[name] for name in ("chunk_keys", "touched", "offsets", "lengths")))
    return item_encoding.encode_items(table, arrays["keys"], arrays["priorities"], slices, num_columns)


def parsed_slices(column: Any) -> list[tuple[int, int, int, int]]:
    return [(piece.chunk_key, piece.offset, piece.length, piece.index) for piece in column.chunk_slices]


@given(requests())
@example(LARGEST)
def test_items_are_parsed_as_they_were_encoded(request: dict[str, Any]) -> None:
    rows = encode(**request)
    assert rows.dtype == np.uint8
    assert rows.shape[0] == len(request["keys"])
    message = InsertStreamRequest.FromString(rows.tobytes())
    assert not message.chunks
    assert not message.keep_chunk_keys
    assert [item.key for item in message.items] == request["keys"].tolist()
    assert [item.priority for item in message.items] == request["priorities"].tolist()
    assert {item.table for item in message.items} == {request["table"]}
    for i, item in enumerate(message.items):
        columns = item.flat_trajectory.columns
        assert len(columns) == request["num_columns"]
        assert {column.squeeze for column in columns} == {False}
        chunk_keys = request["chunk_keys"][request["touched"]]
        pieces = [numbers[i].tolist() for numbers in (chunk_keys, request["offsets"], request["lengths"])]
        for index, column in enumerate(columns):
            assert parsed_slices(column) == [(*numbers, index) for numbers in zip(*pieces, strict=True)]


def encoded_items(request: dict[str, Any]) -> list[bytes]:
    return list(StoredRequest.FromString(encode(**request).tobytes()).items)


@given(requests())
@example({**LARGEST, "table": "replay"})
def test_items_are_decoded_as_they_were_encoded(request: dict[str, Any]) -> None:
    items = encoded_items(request)
    num_slices = request["touched"].shape[1]
    found = item_encoding.decode_items(items, request["table"], num_slices, request["num_columns"])
    assert found is not None
    assert found.keys.tolist() == request["keys"].tolist()
    assert found.priorities.tolist() == request["priorities"].tolist()
    assert found.chunk_keys.tolist() == request["chunk_keys"][request["touched"]].tolist()
    assert found.offsets.tolist() == request["offsets"].tolist()
    assert found.lengths.tolist() == request["lengths"].tolist()
    for item in items:
        assert StoredItem.FromString(item).flat_trajectory == item[found.trajectory_at :]


@given(requests(), st.data())
def test_items_that_another_writer_may_have_made_are_not_decoded_together(
    request: dict[str, Any], data: st.DataObject
) -> None:
    items = encoded_items(request)
    damaged = bytearray(items[-1])
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    items[-1] = bytes(damaged)
    num_slices = request["touched"].shape[1]
    found = item_encoding.decode_items(items, request["table"], num_slices, request["num_columns"])
    if found is not None:  # then the bit belongs to a number of the item
        read = PrioritizedItem.FromString(bytes(damaged))
        assert found.keys[-1] == read.key
        assert np.array(read.priority).tobytes() == found.priorities[-1].tobytes()
        slices = [piece[:3] for piece in parsed_slices(read.flat_trajectory.columns[0])]
        columns = (column[-1].tolist() for column in (found.chunk_keys, found.offsets, found.lengths))
        assert slices == list(zip(*columns, strict=True))


@few
@given(requests(), requests())
def test_encoding_twice_gives_the_same_bytes_with_another_encoding_in_between(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    before = encode(**one).tobytes()
    encode(**{**other, "table": one["table"], "num_columns": one["num_columns"]})
    assert encode(**one).tobytes() == before


ONE_SLICE_EACH = st.lists(st.tuples(st.integers(1, 2**31 - 1), st.booleans()), min_size=1, max_size=300)


@few
@given(TABLES, KEYS, st.floats(0, allow_infinity=False), KEYS, ONE_SLICE_EACH)
@example("t", 0, 0.0, 0, [(1, False)])
@example("t" * 20_000, item_encoding.KEY_LIMIT - 1, 5e-324, item_encoding.KEY_LIMIT - 1, [(2**31 - 1, True)] * 300)
def test_item_of_whole_tensors_is_parsed_as_it_was_encoded(
    table: str, key: int, priority: float, chunk_key: int, columns: list[tuple[int, bool]]
) -> None:
    trajectory = item_encoding.encode_whole_chunks(chunk_key, *map(list, zip(*columns, strict=True)))
    message = InsertStreamRequest.FromString(item_encoding.encode_one_item(table, key, priority, trajectory))
    assert not message.chunks
    (item,) = message.items
    assert (item.key, item.table, item.priority) == (key, table, priority)
    parsed = item.flat_trajectory.columns
    assert [column.squeeze for column in parsed] == [is_single for _, is_single in columns]
    assert [
        [(part.chunk_key, part.offset, part.length, part.index) for part in column.chunk_slices] for column in parsed
    ] == [[(chunk_key, 0, length, index)] for index, (length, _) in enumerate(columns)]


DTYPES = st.sampled_from(["?", "u1", "i4", "i8", "f2", ">f4", "f8"])


@st.composite
def columns_of_one_length(draw: st.DrawFn) -> list[Any]:
    length = draw(st.integers(1, 5))
    shapes = st.tuples(st.just(length)) | st.tuples(st.just(length), st.integers(0, 3), st.integers(1, 2))
    return draw(st.lists(DTYPES.flatmap(lambda dtype: hnp.arrays(dtype, shapes)), min_size=1, max_size=4))


@given(KEYS, st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 10), columns_of_one_length())
@example(item_encoding.KEY_LIMIT - 1, 2**64 - 1, 0, [np.zeros((300, 300))] * 3)
@example(0, 0, 0, [np.array([b"", b"\0"], object)] * 200)
def test_chunk_is_parsed_as_it_was_encoded(key: int, episode_id: int, start: int, columns: list[Any]) -> None:
    message = InsertStreamRequest.FromString(item_encoding.encode_chunk(key, episode_id, start, columns))
    assert not message.items
    (chunk,) = message.chunks
    assert (chunk.chunk_key, chunk.delta_encoded, chunk.data_tensors_len) == (key, False, len(columns))
    assert chunk.data_uncompressed_size == sum(column.nbytes for column in columns)
    steps = chunk.sequence_range
    end = start + len(columns[0]) - 1
    assert (steps.episode_id, steps.start, steps.end, steps.sparse) == (episode_id, start, end, False)
    assert len(chunk.data.tensors) == len(columns)
    for tensor, column in zip(chunk.data.tensors, columns, strict=True):
        decoded = tensor_codec.decode(tensor)
        assert (decoded.dtype, decoded.shape) == (column.dtype.newbyteorder("="), column.shape)
        assert decoded.tolist() == column.tolist() or decoded.tobytes() == column.astype(decoded.dtype).tobytes()
