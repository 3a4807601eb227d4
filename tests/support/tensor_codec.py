"""Whole arrays to encoded tensors and back, in one call each."""

from __future__ import annotations

from typing import Any

import numpy as np

from reverb_writer.protocol import tensors

Array = np.ndarray[Any, np.dtype[Any]]


def encode(array: Array) -> bytes:
    """Encode an array as a TensorProto."""
    prefix, encode_content = tensors.encoder(array.dtype, array.shape)
    content = encode_content(array)
    encoded: bytes = prefix + tensors.varint(len(content)) + content
    return encoded


def decode(proto: Any, *, delta_encoded: bool = False, max_bytes: int = tensors.MAX_TENSOR_BYTES) -> Array:
    """Decode a TensorProto into a new array."""
    header = tensors.parse_header(proto.dtype, proto.tensor_shape.SerializeToString())
    tensor = tensors.EncodedTensor(header, proto.tensor_content, proto.string_val)
    tensor.check(max_bytes)
    array = np.empty(header.shape, header.dtype)
    tensor.decode_into(array, delta_encoded=delta_encoded)
    return array
