"""Our table of the protocol against the descriptors that dm-reverb and TensorFlow were built with."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import timestamp_pb2

from reverb_writer.protocol import messages

schema_pb2 = pytest.importorskip("reverb.cc.schema_pb2")
checkpoint_pb2 = pytest.importorskip("reverb.cc.checkpointing.checkpoint_pb2")
reverb_config_pb2 = pytest.importorskip("reverb.server_executable.reverb_config_pb2")
tensor_pb2 = pytest.importorskip("tensorflow.core.framework.tensor_pb2")
tensor_shape_pb2 = pytest.importorskip("tensorflow.core.framework.tensor_shape_pb2")
types_pb2 = pytest.importorskip("tensorflow.core.framework.types_pb2")
struct_pb2 = pytest.importorskip("tensorflow.core.protobuf.struct_pb2")


def flattened(descriptors: Any) -> dict[str, Any]:
    """Return descriptors and those nested in them, by full name."""
    found: dict[str, Any] = {}
    for descriptor in descriptors:
        found[descriptor.full_name] = descriptor
        found.update(flattened(descriptor.nested_types))
    return found


def messages_of(*files: Any) -> dict[str, Any]:
    return flattened(message for file in files for message in file.message_types_by_name.values())


# dm-reverb ships no Python module for the service itself; whatever talks to a server tests those messages.
THEIRS = messages_of(
    *(file.DESCRIPTOR for file in (schema_pb2, checkpoint_pb2, reverb_config_pb2)),
    *(file.DESCRIPTOR for file in (tensor_pb2, tensor_shape_pb2, struct_pb2, timestamp_pb2)),
)
OURS = messages_of(
    *(message.DESCRIPTOR.file for message in (messages.ChunkData, messages.TensorProto, messages.Timestamp))
)
SHARED = sorted(OURS.keys() & THEIRS.keys())

FIELDS = [
    pytest.param(field, THEIRS[name].fields_by_name[field.name], id=f"{name}.{field.name}")
    for name in SHARED
    for field in OURS[name].fields
]


@pytest.mark.parametrize(("ours", "theirs"), FIELDS)
def test_a_field_has_their_bytes(ours: Any, theirs: Any) -> None:
    assert ours.number == theirs.number
    assert ours.label == theirs.label
    assert (ours.containing_oneof and ours.containing_oneof.name) == (
        theirs.containing_oneof and theirs.containing_oneof.name
    )
    if theirs.type == theirs.TYPE_ENUM:  # has the bytes of an int32
        assert ours.type == ours.TYPE_INT32
    else:
        assert ours.type == theirs.type
    if theirs.message_type is None:
        return
    if theirs.message_type.GetOptions().map_entry:  # has the bytes of a repeated message of a key and a value
        pair, entry = ours.message_type.fields_by_name, theirs.message_type.fields_by_name
        assert [(field.number, field.type) for field in pair.values()] == [
            (field.number, field.type) for field in entry.values()
        ]
    else:
        assert ours.message_type.full_name == theirs.message_type.full_name


def test_only_the_service_is_not_compared() -> None:
    rest = {name.removeprefix("deepmind.reverb.") for name in OURS.keys() - THEIRS.keys()}
    assert all(name.partition(".")[0].endswith(("Request", "Response")) for name in rest)


def test_data_types_have_their_numbers() -> None:
    assert (
        dict(types_pb2.DataType.items()).items() >= {member.name: int(member) for member in messages.DataType}.items()
    )
