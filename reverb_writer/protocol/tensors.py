"""Arrays to encoded tensors and back.

    encoder        encodes arrays of one dtype and shape
    parse_header   returns dtype and shape of an encoded tensor, if they are allowed
    EncodedTensor  checks an encoded tensor, then decodes it into an array

The content of a tensor is one raw snappy block of its elements in C order, little-endian. The content of a tensor of
strings is uncompressed: the lengths as varints, then all bytes. Any writer of a Reverb server chooses bytes that
learners decode. So only dtypes of an allow-list are decoded, and no memory is allocated before shape, dtype, the snappy
block's length prefix and the number of bytes agree.

Arrays that Reverb cannot store raise StructureError. Stored tensors raise UnsafeDataError if they are too large or the
dtype is not on the allow-list, and FormatError if they are damaged.

The allow-list excludes VARIANT and RESOURCE, with which a writer can run code in a learner (CVE-2024-8375), and the
quantised, float8 and 4-bit types, for which Reverb has no NumPy dtype.

Source: Reverb 0.14 (`tensor_compression.cc`), TensorFlow 2.15 (`Tensor::AsProtoTensorContent`, `Tensor::FromProto`,
`EncodeStringList`).
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.protocol.messages import DataType, TensorProto, TensorShapeProto

Array = np.ndarray[Any, np.dtype[Any]]

MAX_TENSOR_BYTES: Final = 2**31 - 1
"""Largest size of an encoded array, in bytes: larger arrays do not fit in a protobuf message."""

_MAX_DIMS: Final = 32  # limit of NumPy 1; NumPy 2 allows 64
_MAX_SNAPPY_RATIO: Final = 22  # snappy's densest element makes 64 bytes from 3
_MAX_EXTENT: Final = sys.maxsize // 16  # elements of the widest dtype; NumPy counts a dimension of 0 as 1
_MIN_VIEW_BYTES: Final = 8192  # smaller arrays are copied, which costs less than a view
_UNTRIED: Final = 15  # arrays of a leaf that are stored uncompressed after one that did not shrink
_MIN_SHRUNK: Final = 1 / 32  # of an array's bytes; less is not worth a compression
_LITERAL: Final = b"\xfc"  # tag of a snappy element: a literal whose length minus one follows in four bytes
_MORE: Final = 0x80  # marks each byte of a varint except the last
_MAX_SHAPE_BYTES: Final = 512  # 32 dimensions without names need less
_CONTENT_TAG: Final = b"\x22"  # field 4, length-delimited: the last written field

_INTEGERS: Final = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    **{DataType[f"DT_{name.upper()}"]: np.dtype(name) for name in ("bool", *_INTEGERS)},
    DataType.DT_HALF: np.dtype(np.float16),
    DataType.DT_FLOAT: np.dtype(np.float32),
    DataType.DT_DOUBLE: np.dtype(np.float64),
    DataType.DT_COMPLEX64: np.dtype(np.complex64),
    DataType.DT_COMPLEX128: np.dtype(np.complex128),
    DataType.DT_STRING: np.dtype(np.object_),
}
_NUMBERS: Final = {dtype: number for number, dtype in _DTYPES.items()}
_REFERENCE: Final = 100  # TensorFlow 1 adds this to the number of a dtype for its reference type
_STRING_KINDS: Final = "SUOT"
_ALLOWED: Final = ", ".join([dtype.name for dtype in _NUMBERS if dtype.kind != "O"] + ["bfloat16", "str", "bytes"])


def dtype_number(dtype: np.dtype[Any]) -> int:
    """Return the number of a dtype of any byte order; `S`, `U`, `StringDType` and object are strings."""
    if dtype.kind in _STRING_KINDS:
        return DataType.DT_STRING
    number = _NUMBERS.get(dtype.newbyteorder("="))
    if number is not None:
        return number
    if dtype.name == "bfloat16":
        return DataType.DT_BFLOAT16
    raise StructureError(f"dtype {dtype} cannot be stored in Reverb. Cast to one of {_ALLOWED}.")


def dtype_of(number: int) -> np.dtype[Any]:
    """Return the dtype with this number, in native byte order; strings are object arrays of `bytes`.

    Raises UnsafeDataError if the dtype is not on the allow-list, FormatError for bfloat16 without ml_dtypes.
    """
    dtype = _DTYPES.get(number)
    if dtype is not None:
        return dtype
    if number == DataType.DT_BFLOAT16:
        try:
            import ml_dtypes  # noqa: PLC0415  # an optional dependency: few users need it
        except ImportError:
            raise FormatError("tensor of dtype bfloat16, which NumPy does not know. Install `ml_dtypes`.") from None
        return np.dtype(ml_dtypes.bfloat16)
    base, suffix = (number - _REFERENCE, "_REF") if number > _REFERENCE else (number, "")
    name = DataType(base).name + suffix if base in DataType.__members__.values() else "unknown"
    raise UnsafeDataError(
        f"tensor of dtype {name} ({number}), which is never decoded, expected one of {_ALLOWED}. "
        "Find the writer that stores it."
    )


# Encoding


@functools.lru_cache(maxsize=4096)
def encoder(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, Callable[[Array], Any]]:
    """Return the first bytes of a TensorProto of this dtype and shape, and a function that encodes an array's content.

    A TensorProto is the first bytes, the length of the content as a varint, and the content. The function takes arrays
    of any memory layout. It encodes `str` as UTF-8, and raises StructureError if an element of an object array is
    neither `str` nor `bytes`. Any thread may call it; compression releases the GIL.
    """
    number = dtype_number(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > MAX_TENSOR_BYTES:
        raise StructureError(
            f"{dtype} {shape}: {num_bytes} bytes, expected at most {MAX_TENSOR_BYTES} in one tensor. Write it in parts."
        )
    header = TensorProto(dtype=number)
    header.tensor_shape.SetInParent()
    for size in shape:
        header.tensor_shape.dim.add(size=size)
    if number == DataType.DT_STRING:
        encode_content = _encode_strings
    elif dtype == dtype.newbyteorder("<"):
        encode_content = _compress if num_bytes >= _MIN_VIEW_BYTES else _compress_copy
    else:
        encode_content = _swap_and_compress
    return header.SerializeToString() + _CONTENT_TAG, encode_content


class LeafEncoder:
    """Encodes the contents of one leaf's arrays, and remembers whether they shrink. Not thread-safe.

    After an array that does not shrink, the next ones become snappy blocks without compression: one literal, whose
    bytes are those of the array. So an array is copied once, and the interpreter is not released for another thread.
    """

    def __init__(self) -> None:
        """Begin with a compression."""
        self._num_untried = 0

    def parts(self, array: Array, encode: Callable[[Array], Any]) -> tuple[Any, ...]:
        """Return the content of an array in parts, given the function of `encoder`.

        The last part may share the array's memory.
        """
        num_bytes = array.nbytes
        if self._num_untried and num_bytes and encode in (_compress, _compress_copy):
            self._num_untried -= 1
            return varint(num_bytes), _LITERAL, (num_bytes - 1).to_bytes(4, "little"), _bytes_of(array)
        content = encode(array)
        if len(content) > num_bytes * (1 - _MIN_SHRUNK):
            self._num_untried = _UNTRIED
        return (content,)


def _bytes_of(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _compress(array: Array) -> Any:
    if not array.flags.c_contiguous:
        return _compress_copy(array)
    return cramjam.snappy.compress_raw(_bytes_of(array))


def _compress_copy(array: Array) -> Any:
    """Compress a copy: for arrays that are small, not contiguous, 0-d, or bfloat16, which cramjam refuses."""
    return cramjam.snappy.compress_raw(array.tobytes())


def _swap_and_compress(array: Array) -> Any:
    return _compress_copy(array.astype(array.dtype.newbyteorder("<")))


def _encode_strings(array: Array) -> bytes:
    try:
        elements = [_as_bytes(element) for element in array.flat]
    except UnicodeEncodeError as error:
        raise StructureError(f"string {error.object!r} is not Unicode: {error.reason}. Store it as bytes.") from None
    return b"".join([*(varint(len(element)) for element in elements), *elements])


def _as_bytes(element: object) -> bytes:
    if isinstance(element, str):
        return element.encode()
    if isinstance(element, bytes):
        return element
    raise StructureError(
        f"object array with an element of type {type(element).__name__}, expected str or bytes. "
        f"Cast the array to one of {_ALLOWED}."
    )


@functools.lru_cache(maxsize=4096)
def varint(number: int) -> bytes:
    """Return a number >= 0 in protobuf's encoding: seven bits per byte, lowest first; all bytes except the last marked.

    >>> varint(300).hex()
    'ac02'
    """
    groups = bytearray()
    while number >= _MORE:
        groups.append(number & 0x7F | _MORE)
        number >>= 7
    groups.append(number)
    return bytes(groups)


# Decoding


def damaged(what: str) -> FormatError:
    """Return the error for damaged data; `what` names the data."""
    return FormatError(f"{what}. The data is damaged, or was not written by a Reverb client.")


@dataclass(frozen=True, eq=False)
class TensorHeader:
    """Dtype and shape of an encoded tensor. While cached, headers of equal dtype and shape are one object."""

    dtype: np.dtype[Any]  # of native byte order
    shape: tuple[int, ...]  # all dimensions
    num_bytes: int  # size of the array, without the characters of strings
    length_prefix: bytes  # first bytes of a snappy block of `num_bytes`, as most writers write it
    min_block_bytes: int  # size of the smallest snappy block of `num_bytes`


class EncodedTensor(NamedTuple):
    """A tensor that is not decoded."""

    header: TensorHeader  # dtype and shape
    content: bytes  # a snappy block; for strings, lengths and bytes
    strings: Sequence[bytes] = ()  # the strings, if `content` is empty

    def check(self, max_bytes: int) -> None:
        """Check that header and content agree, without decoding or allocation."""
        header, content = self.header, self.content
        if header.num_bytes > max_bytes:
            raise UnsafeDataError(
                f"tensor {header.dtype} {header.shape}: {header.num_bytes} bytes, expected at most {max_bytes}. "
                "Raise `max_sample_bytes` if you trust the writer."
            )
        if header.dtype.kind == "O":
            count = math.prod(header.shape)
            if count > max(len(content), len(self.strings)):
                raise damaged(f"{len(self.strings)} strings or {len(content)} bytes, too few for shape {header.shape}")
            return
        if not content.startswith(header.length_prefix):
            try:
                announced_bytes = cramjam.snappy.decompress_raw_len(content)
            except cramjam.DecompressionError as error:
                raise damaged(f"snappy block that cannot be decompressed: {error}") from None
            if announced_bytes != header.num_bytes:
                raise damaged(
                    f"snappy block of {announced_bytes} bytes, expected {header.num_bytes} from dtype and shape"
                )
        if len(content) < header.min_block_bytes:
            raise damaged(
                f"snappy block of {len(content)} bytes, which cannot hold the {header.num_bytes} that its length "
                "prefix announces"
            )

    def decode_into(self, array: Array, *, delta_encoded: bool = False) -> None:
        """Decode into an array of this dtype and shape, in C order; decompression releases the GIL.

        Strings become `bytes` in an object array. Booleans become 0 or 1 for any stored byte. If `delta_encoded`,
        integers of two or more dimensions are stored as differences along axis 0. Damaged content raises FormatError
        and leaves undefined values in the array.
        """
        kind = self.header.dtype.kind
        if kind == "O":
            count = math.prod(self.header.shape)
            array[...] = decode_strings(self.content, self.strings, count).reshape(self.header.shape)
            return
        stored = array.reshape(-1).view(np.uint8)
        decompress_into(self.content, stored)
        if kind == "b":
            np.not_equal(stored, 0, out=stored.view(np.bool_))
        if sys.byteorder == "big":
            array.byteswap(inplace=True)
        if delta_encoded and kind in "iu" and array.ndim > 1:
            # Unsigned, because the differences wrap around.
            steps = array.view(f"u{array.itemsize}")
            np.cumsum(steps, axis=0, dtype=steps.dtype, out=steps)


def decompress_into(content: bytes | memoryview, array: Array) -> None:
    """Decompress a snappy block of checked size into a uint8 array of this size, in C order."""
    decompress: Callable[[Any, Any], int] = cramjam.snappy.decompress_raw_into  # NumPy 1 types no array as a buffer
    try:
        decompress(content, array)
    except cramjam.DecompressionError as error:
        raise damaged(f"snappy block that cannot be decompressed: {error}") from None


def decode_strings(content: bytes, strings: Sequence[bytes], count: int) -> Array:
    """Return strings, [count] `bytes`, from lengths and bytes in `content`, or `strings` if `content` is empty."""
    found = _split_strings(content, count) if content else list(strings)
    if len(found) != count:
        raise damaged(f"{len(found)} strings, expected {count} from their shape")
    array = np.empty(count, np.object_)
    array[:] = found
    return array


def _split_strings(content: bytes, count: int) -> list[bytes]:
    """Split content into strings; it has all lengths, as varints of up to 32 bits, then all strings."""
    lengths: list[int] = []
    position = 0
    while len(lengths) < count:
        length = 0
        for shift in range(0, 32, 7):
            if position == len(content):
                raise damaged(f"{count} strings in {len(content)} bytes, which cannot hold even the lengths")
            byte = content[position]
            position += 1
            length |= byte % _MORE << shift
            if byte < _MORE:
                break
        else:
            raise damaged("string with a length of more than 32 bits")
        lengths.append(length)
    ends = list(itertools.accumulate(lengths, initial=position))
    if ends[-1] != len(content):
        raise damaged(f"{count} strings that end at byte {ends[-1]}, expected {len(content)}")
    return [content[start:end] for start, end in itertools.pairwise(ends)]


@functools.lru_cache(maxsize=1024)
def parse_header(dtype_number: int, encoded_shape: bytes) -> TensorHeader:
    """Return the header of an untrusted writer's tensor, from a `messages.DataType` and an encoded TensorShapeProto."""
    dtype = dtype_of(dtype_number)
    if len(encoded_shape) > _MAX_SHAPE_BYTES:
        raise damaged(f"tensor with a shape of {len(encoded_shape)} bytes, expected at most {_MAX_SHAPE_BYTES}")
    try:
        proto = TensorShapeProto.FromString(encoded_shape)
    except DecodeError as error:
        raise damaged(f"tensor whose shape cannot be parsed ({error})") from None
    shape = tuple([dim.size for dim in proto.dim])
    if proto.unknown_rank:
        raise damaged("tensor of unknown shape")
    if len(shape) > _MAX_DIMS:
        raise damaged(f"tensor with {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if min(shape, default=0) < 0 or (0 in shape and math.prod(size or 1 for size in shape) > _MAX_EXTENT):
        raise damaged(f"tensor of shape {shape}, which no array can have")
    num_bytes = math.prod(shape) * dtype.itemsize
    return TensorHeader(dtype, shape, num_bytes, varint(num_bytes), -(-num_bytes // _MAX_SNAPPY_RATIO))
