"""Messages compared with bytes worked out by hand from protobuf's encoding guide."""

from __future__ import annotations

import re

import pytest
from google.protobuf import descriptor_pool

from reverb_writer.protocol import messages


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


def test_each_message_is_exported_under_its_name() -> None:
    for file in {messages.Timestamp, messages.TensorProto, messages.ChunkData}:
        for name, descriptor in file.DESCRIPTOR.file.message_types_by_name.items():
            assert getattr(messages, name).DESCRIPTOR is descriptor


def test_the_default_descriptor_pool_is_not_changed() -> None:
    assert messages.ChunkData.DESCRIPTOR.file.pool is not descriptor_pool.Default()
    with pytest.raises(KeyError):
        descriptor_pool.Default().FindFileByName("deepmind.reverb")


def test_methods_are_those_of_the_service() -> None:
    names = ("Checkpoint", "InsertStream", "MutatePriorities", "Reset", "SampleStream", "ServerInfo")
    for name in names:
        constant = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).upper()
        assert getattr(messages, constant) == f"/deepmind.reverb.ReverbService/{name}"
