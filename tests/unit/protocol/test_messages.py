"""Messages and checksums have the bytes of their fields, and responses give the samples that they carry."""

from __future__ import annotations

import weakref
import zlib
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import descriptor_pool

from reverb_writer.errors import FormatError
from reverb_writer.files.tfrecord import write_records
from reverb_writer.protocol import messages, responses
from reverb_writer.protocol.responses import SampleReassembler, Samples


def test_a_message_has_the_bytes_of_its_fields() -> None:
    item = messages.PrioritizedItem(key=300, table="t", priority=1.0)
    # 1: varint 300; 2: one byte "t"; 5: 1.0 as eight bytes, little-endian
    assert item.SerializeToString(deterministic=True).hex(" ") == "08 ac 02 12 01 74 29 00 00 00 00 00 00 f0 3f"


def test_a_nested_message_has_the_bytes_of_its_fields() -> None:
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


def test_part_of_the_samples_keeps_no_others() -> None:
    class Entry:
        """As a message, it is freed when nobody has it any more."""

    entries = np.fromiter([Entry(), Entry(), Entry()], object)
    samples = Samples(entries, *([1, 2, 3] for _ in range(5)))
    freed = weakref.ref(entries[0])
    del entries
    samples = samples[1:]
    assert (samples.keys.tolist(), freed()) == ([2, 3], None)


def test_sample_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MAX_SPLIT_BYTES", 10)
    reassembler = SampleReassembler()
    for _ in range(2):
        assert not reassembler.feed(response((None, [b"12345"], False)))
    with pytest.raises(FormatError, match="no end: 11 bytes in 6 parts so far, expected at most 10 in"):
        reassembler.feed(response((None, [b"1"], False)))


def test_bytes_that_are_not_a_response_are_refused() -> None:
    with pytest.raises(FormatError, match="3 bytes that are not a SampleStreamResponse"):
        SampleReassembler().feed(b"\xff\xff\xff")
