"""Messages and checksums have the bytes of their fields, responses give their samples, and signatures come back."""

from __future__ import annotations

import collections
import logging
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tree
from google.protobuf import descriptor_pool

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.files.tfrecord import write_records
from reverb_writer.protocol import messages, responses, signatures
from reverb_writer.protocol.messages import DataType, StructuredValue
from reverb_writer.protocol.responses import SampleReassembler, Samples
from reverb_writer.protocol.signatures import ArraySpec


def test_a_nested_message_has_the_bytes_of_its_fields() -> None:
    item = messages.PrioritizedItem(key=300, table="t", priority=1.0)
    # 1: varint 300; 2: one byte "t"; 5: 1.0 as eight bytes, little-endian
    assert item.SerializeToString(deterministic=True).hex(" ") == "08 ac 02 12 01 74 29 00 00 00 00 00 00 f0 3f"
    request = messages.InsertStreamRequest(keep_chunk_keys=[1, 2])
    request.chunks.add().data.tensors.add(dtype=messages.DataType.DT_BOOL)
    # 1: chunk { 5: data { 1: tensor { 1: 10 } } }; 3: two varints, packed
    assert request.SerializeToString(deterministic=True).hex(" ") == "0a 06 2a 04 0a 02 08 0a 1a 02 01 02"


def test_unknown_fields_are_skipped() -> None:
    # field 14 (a resource handle) and field 1000 are not in the table
    tensor = messages.TensorProto.FromString(bytes.fromhex("08 01 72 01 00 c2 3e 01 ff"))
    assert tensor.dtype == messages.DataType.DT_FLOAT


def test_a_dict_has_the_bytes_of_a_map() -> None:
    # what protobuf writes of map<string, StructuredValue> {"a": none_value}: an entry of key (1) and value (2)
    value = messages.StructuredValue.FromString(bytes.fromhex("aa 03 09 0a 07 0a 01 61 12 02 0a 00"))
    (pair,) = value.dict_value.fields
    assert pair.key == "a"
    assert pair.value.WhichOneof("kind") == "none_value"


def test_the_default_descriptor_pool_is_not_changed() -> None:
    assert messages.ChunkData.DESCRIPTOR.file.pool is not descriptor_pool.Default()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("deepmind.reverb")


def by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> bytes:
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def test_a_record_has_its_length_and_both_have_a_masked_checksum(tmp_path: Path) -> None:
    write_records(tmp_path / "file", [b"123456789", b""])
    nine = bytes([9, 0, 0, 0, 0, 0, 0, 0])
    expected = [nine, masked(by_definition(nine)), b"123456789", masked(0xE3069283)]
    expected += [bytes(8), masked(by_definition(bytes(8))), masked(0)]
    assert by_definition(b"123456789") == 0xE3069283
    assert zlib.decompress((tmp_path / "file").read_bytes()) == b"".join(expected)


def response(*entries: tuple[int | None, list[bytes], bool]) -> bytes:
    """Encode entries, each with the key of its item, its chunks and whether it is the last of its sample."""
    made = messages.SampledResponse()
    for key, chunks, is_last in entries:
        entry = made.entries.add(data=chunks, end_of_sequence=is_last)
        if key is not None:
            entry.info.item.key = key
    encoded: bytes = made.SerializeToString()
    return encoded


def keys_and_chunks(samples: Samples) -> list[tuple[int, list[bytes]]]:
    return [(sample.info.item.key, list(sample.data)) for sample in samples]


def test_whole_samples_keep_their_order() -> None:
    message = response((1, [b"a"], True), (2, [b"b", b"c"], True))
    assert keys_and_chunks(SampleReassembler().feed(message)) == [(1, [b"a"]), (2, [b"b", b"c"])]


def test_sample_split_over_entries_and_messages_is_reassembled() -> None:
    reassembler = SampleReassembler()
    first = response((1, [b"a"], True), (2, [b"b"], False), (None, [b"c"], False))
    assert keys_and_chunks(reassembler.feed(first)) == [(1, [b"a"])]
    assert not reassembler.feed(response((None, [b"d"], False)))
    last = response((None, [b"e"], True), (3, [b"f"], True))
    assert keys_and_chunks(reassembler.feed(last)) == [(2, [b"b", b"c", b"d", b"e"]), (3, [b"f"])]


def test_sample_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_BYTES", 20)
    reassembler = SampleReassembler()
    for _ in range(2):  # a tag and a length each of the entry and of the chunk: 4 + 5 bytes
        assert not reassembler.feed(response((None, [b"12345"], False)))
    with pytest.raises(FormatError, match="no end: 23 bytes in 6 parts so far, expected at most 20 in"):
        reassembler.feed(response((None, [b"1"], False)))


@pytest.mark.parametrize("sizes", [(3, 70_000), (70_000, 3), (70_000, 70_000, 3)])
def test_a_sample_is_reassembled_from_small_and_large_messages(sizes: Sequence[int]) -> None:
    chunks = [bytes([number]) * size for number, size in enumerate(sizes)]
    reassembler = SampleReassembler()
    assert not reassembler.feed(response((1, [chunks[0]], False)))
    for chunk in chunks[1:-1]:
        assert not reassembler.feed(response((None, [chunk], False)))
    samples = reassembler.feed(response((None, [chunks[-1]], True), (2, [b"a" * 70_000], True)))
    assert [(key, [*map(bytes, data)]) for key, data in keys_and_chunks(samples)] == [
        (1, chunks),
        (2, [b"a" * 70_000]),
    ]


def test_a_sample_without_end_is_refused_although_its_large_messages_have_no_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_BYTES", 300_000)
    reassembler = SampleReassembler()
    made = messages.SampledResponse()
    made.entries.add(data=[b""]).info.item.flat_trajectory = bytes(100_000)
    for _ in range(2):
        assert not reassembler.feed(made.SerializeToString())
    with pytest.raises(FormatError, match=r"no end: 3000\d\d bytes"):
        reassembler.feed(made.SerializeToString())


def test_bytes_that_are_not_a_response_are_refused() -> None:
    with pytest.raises(FormatError, match="3 bytes that are not a SampleStreamResponse"):
        SampleReassembler().feed(b"\xff\xff\xff")


# Signatures: nests as bytes and back, names that Python cannot have, and those that cannot be read.


class Row(NamedTuple):
    reward: Any
    action: Any


FLOAT = ArraySpec((None, 3), np.dtype(np.float32), "x")
SCALAR = ArraySpec((), np.dtype(np.int64))


def reparsed(nest: Any) -> Any:
    """Encode a nest and decode its bytes, as a client does with a server's reply."""
    return signatures.decode(StructuredValue.FromString(signatures.encode(nest).SerializeToString()))


def nested(depth: int) -> Any:
    nest: Any = FLOAT
    for _ in range(depth):
        nest = {"a": nest}  # takes the most levels of protobuf's
    return nest


def cyclic() -> Any:
    nest: list[Any] = []
    nest.append(nest)
    return nest


@pytest.mark.parametrize(
    "nest",
    [
        ArraySpec(None, np.dtype(np.bool_), "of any rank"),
        ArraySpec((0, None), np.dtype(object)),
        {"b": FLOAT, "a": {"": SCALAR}},
        {"a": None, "b": (None,)},
        nested(signatures.MAX_DEPTH),
    ],
    ids=repr,
)
def test_a_nest_is_decoded_as_it_was_encoded(nest: Any) -> None:
    result = reparsed(nest)
    assert result == nest
    tree.assert_same_structure(result, nest)


def test_the_deepest_signature_can_be_read_within_the_messages_of_a_server() -> None:
    info, table = messages.ServerInfoResponse(), messages.PriorityTableCheckpoint()
    for signature in (info.table_info.add().signature, table.signature):
        signature.CopyFrom(signatures.encode(nested(signatures.MAX_DEPTH)))
    assert messages.ServerInfoResponse.FromString(info.SerializeToString()) == info
    assert messages.PriorityTableCheckpoint.FromString(table.SerializeToString()) == table


def test_dicts_are_decoded_in_the_order_of_the_columns() -> None:
    nest = collections.OrderedDict(b=FLOAT, a=SCALAR)
    result = reparsed(nest)
    assert list(result) == ["a", "b"]
    assert type(result) is dict
    assert tree.flatten(result) == tree.flatten(nest) == [SCALAR, FLOAT]


def test_a_named_tuple_is_decoded_with_its_field_names() -> None:
    assert signatures.decode(StructuredValue()) is None
    result = reparsed(Row(reward=FLOAT, action=[SCALAR]))
    assert type(result).__name__ == "Row"
    assert result._asdict() == {"reward": FLOAT, "action": [SCALAR]}
    assert result.reward == FLOAT
    assert type(reparsed(Row(FLOAT, SCALAR))) is type(reparsed(Row(SCALAR, FLOAT)))


def test_names_that_python_cannot_have_are_replaced_in_place() -> None:
    value = StructuredValue()
    value.named_tuple_value.name = "my class"
    for key in ("z", "class", "_y", "z", "b c", "a"):
        value.named_tuple_value.values.add(key=key, value=signatures.encode(ArraySpec((), np.dtype("i4"), key)))
    result = signatures.decode(value)
    assert result._fields == ("z", "_1", "_2", "_3", "_4", "a")
    assert [spec.name for spec in tree.flatten(result)] == ["z", "class", "_y", "z", "b c", "a"]


def test_bounds_are_not_read() -> None:
    value = StructuredValue()
    value.bounded_tensor_spec_value.dtype = DataType.DT_UINT8
    value.bounded_tensor_spec_value.shape.dim.add(size=-1)
    assert signatures.decode(value) == ArraySpec((None,), np.dtype(np.uint8))


@pytest.mark.parametrize(
    ("hexadecimal", "reason"),
    [
        ("92 02 02 08 01", "signature: expected a tensor spec, list"),  # 34 { 1: 1 }, a SparseTensorSpec
        ("9a 03 04 0a 02 60 06", "signature, leaf `0`: expected a tensor spec, list"),  # 51 [ 12: 3, an int ]
        ("a2 03 06 0a 02 0a 00 0a 00", "signature, leaf `1`: expected a tensor"),  # 52 [ None, nothing ]
        ("8a 02 02 18 15", "dtype DT_VARIANT (21), which is never decoded"),  # 33 { 3: 21 }
        # 33 { 2: { 2: { 1: -2 } }, 3: 1 }
        ("8a 02 11 12 0d 12 0b 08 fe ff ff ff ff ff ff ff ff 01 18 01", "shape [-2], expected sizes >= 0, or -1"),
        ("8a 02 15 12 11 12 02 08 02 12 0b 08 fe ff ff ff ff ff ff ff ff 01 18 01", "shape [2, -2], expected sizes"),
    ],
    ids=["type spec", "value", "unset element", "VARIANT", "shape", "a size of a shape"],
)
def test_a_signature_that_cannot_be_read_is_none_and_logged_once(
    hexadecimal: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = StructuredValue.FromString(bytes.fromhex(hexadecimal))
    signatures._warn_once.cache_clear()  # a property test may have met the same reason in this process
    with caplog.at_level(logging.WARNING):
        assert signatures.decode(value) is None
        assert signatures.decode(value) is None
    (record,) = caplog.records  # each reason once in a process
    assert reason in record.getMessage()
    assert record.getMessage().endswith("Items of the table are read as flat tuples of columns.")


def test_a_dtype_that_needs_ml_dtypes_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    value = StructuredValue()
    value.dict_value.fields.add(key="a").value.tensor_spec_value.dtype = DataType.DT_BFLOAT16
    assert signatures.decode(value) is None
    assert "leaf `a`" in caplog.text
    assert "Install `ml_dtypes`" in caplog.text


@pytest.mark.parametrize(
    ("nest", "reason"),
    [
        (np.zeros(3), "signature: ndarray, expected ArraySpec, list"),
        ({"a": [SCALAR, 3]}, "leaf `a/1`: int, expected ArraySpec"),
        ({"a": {1: SCALAR}}, "leaf `a`: key 1 of type int, expected str"),
        ({"a": ArraySpec((), np.dtype("M8[s]"))}, r"leaf `a`: dtype datetime64\[s\] cannot be stored"),
        (Row(SCALAR, ArraySpec((), np.dtype("V3"))), "leaf `action`: dtype"),
        (nested(signatures.MAX_DEPTH + 1), "nested more than 31 deep"),
        (cyclic(), "nested more than 31 deep"),
    ],
    ids=["array", "number", "key", "dtype", "field", "deep", "cyclic"],
)
def test_what_reverb_cannot_store_is_refused(nest: Any, reason: str) -> None:
    with pytest.raises(StructureError, match=reason):
        signatures.encode(nest)


def test_a_spec_takes_what_numpy_takes() -> None:
    spec = ArraySpec([np.int64(3), None], np.float32)  # type: ignore[arg-type]
    assert spec == ArraySpec((3, None), np.dtype("f4"))
    assert type(spec.shape[0]) is int  # type: ignore[index]
