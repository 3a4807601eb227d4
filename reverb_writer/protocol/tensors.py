"""Arrays to tensor messages and back.

    encode: array -> bytes of a TensorProto
    decode: TensorProto -> array, if everything it says of itself is true

What is stored of an array is its elements in C order, little-endian, as one raw snappy block. Of strings it is the
lengths as varints, then all bytes, uncompressed. Whoever may write to a Reverb server chooses the bytes that a learner
decodes, so `decode` believes nothing: dtypes are taken from an allow-list, and shape, dtype, the size that the snappy
block announces and the bytes that are there must agree before memory is taken.

Not on the list are VARIANT and RESOURCE, with which a writer can run code in a learner (CVE-2024-8375), and the
quantised, float8 and 4-bit types, for which Reverb has no NumPy dtype.

Source: Reverb 0.14 (`tensor_compression.cc`), TensorFlow 2.15 (`Tensor::AsProtoTensorContent`, `Tensor::FromProto`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np
from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.protocol import strings
from reverb_writer.protocol.messages import DataType, TensorProto, TensorShapeProto
from reverb_writer.protocol.strings import damaged

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "MAX_TENSOR_BYTES",
    "Head",
    "Tensor",
    "decode",
    "decompress_into",
    "dtype_number",
    "dtype_of",
    "encode",
    "head_of",
    "layout",
    "varint",
]

MAX_TENSOR_BYTES: Final = 2**31 - 1
"""Size of the largest array, in bytes, that is encoded, and decoded unless told otherwise: what a message can hold."""

_MAX_DIMS: Final = 32  # NumPy 1; NumPy 2 can do 64
_MAX_SNAPPY_RATIO: Final = 22  # its densest element makes 64 bytes of 3
_MAX_EXTENT: Final = sys.maxsize // 16  # elements of the widest dtype; NumPy counts them as if no dimension were 0
_WORTH_A_VIEW: Final = 8192  # bytes from which a copy costs more than the view that spares it
_MORE: Final = 0x80  # marks a byte of a varint that is not its last
_LONGEST_SHAPE: Final = 512  # bytes; 32 dimensions take fewer, but dimensions may have names
_CONTENT_TAG: Final = b"\x22"  # field 4, length-delimited: the last field we write

_DTYPES: Final[dict[int, np.dtype[Any]]] = {
    DataType.DT_BOOL: np.dtype(np.bool_),
    DataType.DT_INT8: np.dtype(np.int8),
    DataType.DT_INT16: np.dtype(np.int16),
    DataType.DT_INT32: np.dtype(np.int32),
    DataType.DT_INT64: np.dtype(np.int64),
    DataType.DT_UINT8: np.dtype(np.uint8),
    DataType.DT_UINT16: np.dtype(np.uint16),
    DataType.DT_UINT32: np.dtype(np.uint32),
    DataType.DT_UINT64: np.dtype(np.uint64),
    DataType.DT_HALF: np.dtype(np.float16),
    DataType.DT_FLOAT: np.dtype(np.float32),
    DataType.DT_DOUBLE: np.dtype(np.float64),
    DataType.DT_COMPLEX64: np.dtype(np.complex64),
    DataType.DT_COMPLEX128: np.dtype(np.complex128),
    DataType.DT_STRING: np.dtype(np.object_),
}
_NUMBERS: Final = {dtype: number for number, dtype in _DTYPES.items()}
_REFERENCE: Final = 100  # what TensorFlow 1 adds to the number of a dtype for a reference to it
_STRING_KINDS: Final = "SUOT"
_ALLOWED: Final = ", ".join([dtype.name for dtype in _NUMBERS if dtype.kind != "O"] + ["bfloat16", "str", "bytes"])


def dtype_number(dtype: np.dtype[Any]) -> int:
    """Return the number that Reverb gives to a dtype.

    >>> int(dtype_number(np.dtype(">f4")))
    1

    Args:
        dtype: of any byte order. `S`, `U`, `StringDType` and object all mean strings.

    Raises:
        StructureError: Reverb cannot store the dtype.
    """
    if dtype.kind in _STRING_KINDS:
        return DataType.DT_STRING
    number = _NUMBERS.get(dtype.newbyteorder("="))
    if number is not None:
        return number
    if dtype.name == "bfloat16":
        return DataType.DT_BFLOAT16
    raise StructureError(f"dtype {dtype} cannot be stored in Reverb. Cast to one of {_ALLOWED}.")


def dtype_of(number: int) -> np.dtype[Any]:
    """Return the dtype, of native byte order, that a number of Reverb's stands for.

    >>> dtype_of(19)
    dtype('float16')

    Returns:
        The dtype. Strings are object, to be filled with `bytes`.

    Raises:
        UnsafeDataError: the number is not on the allow-list.
        FormatError: it is bfloat16, and ml_dtypes is not installed.
    """
    dtype = _DTYPES.get(number)
    if dtype is not None:
        return dtype
    if number == DataType.DT_BFLOAT16:
        return _bfloat16()
    raise UnsafeDataError(
        f"tensor of dtype {_name_of(number)} ({number}), which is never decoded, expected one of {_ALLOWED}. "
        "Find out who wrote it."
    )


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes  # noqa: PLC0415  (not a dependency: few need it)
    except ImportError:
        raise FormatError("tensor of dtype bfloat16, which NumPy does not know. Install `ml_dtypes`.") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def _name_of(number: int) -> str:
    base, suffix = (number - _REFERENCE, "_REF") if number > _REFERENCE else (number, "")
    return DataType(base).name + suffix if base in DataType.__members__.values() else "unknown"


# Encoding


def encode(array: Array) -> bytes:
    """Encode an array as the bytes of a TensorProto.

    Args:
        array: of any shape, byte order and memory layout; it is only read. NumPy drops trailing zero bytes of `S`
            and `U` elements: use an object array to keep them.

    Returns:
        Bytes that Reverb's own client decodes to an array of equal dtype, shape and values. `str` is stored as UTF-8.

    Raises:
        StructureError: Reverb cannot store the dtype, an element of an object array is neither `str` nor `bytes`, or
            the array is larger than `MAX_TENSOR_BYTES`.

    Thread safety: any thread; the compression releases the GIL.
    """
    header, content_of = layout(array.dtype, array.shape)
    content = content_of(array)
    encoded: bytes = header + varint(len(content)) + content
    return encoded


@functools.lru_cache(maxsize=4096)
def layout(dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[bytes, Callable[[Array], Any]]:
    """Return what arrays of one dtype and shape share: the bytes before their content, and what makes the content.

    The bytes of a TensorProto are the former, the content's length as a varint, and the content.

    Raises:
        StructureError: as for `encode`.
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
        content_of = _string_content
    elif dtype == dtype.newbyteorder("<"):
        content_of = _snappy_content
    else:
        content_of = _swapped_content
    return header.SerializeToString() + _CONTENT_TAG, content_of


def _snappy_content(array: Array) -> Any:
    if array.nbytes >= _WORTH_A_VIEW and array.flags.c_contiguous:
        return cramjam.snappy.compress_raw(array.reshape(-1).view(np.uint8).data)
    # `tobytes` costs a copy, but is right for every layout, for 0-d arrays and for bfloat16, which cramjam refuses.
    return cramjam.snappy.compress_raw(array.tobytes())


def _swapped_content(array: Array) -> Any:
    return _snappy_content(array.astype(array.dtype.newbyteorder("<")))


def _string_content(array: Array) -> bytes:
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
    """Return a number >= 0 in protobuf's encoding: seven bits a byte, lowest first, all but the last byte marked.

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


def decode(proto: Any, *, delta_encoded: bool = False, max_bytes: int = MAX_TENSOR_BYTES) -> Array:
    """Decode a TensorProto that may come from anyone.

    Args:
        proto: a `messages.TensorProto`.
        delta_encoded: as the chunk says: integers of at least two dimensions hold differences along axis 0.
        max_bytes: no array larger than this is made.

    Returns:
        A new, writable array in C order and native byte order, which nothing else refers to. Strings come as an object
        array of `bytes`. Booleans are 0 or 1, whatever byte was stored.

    Raises:
        UnsafeDataError: the dtype is not on the allow-list, or the array is larger than `max_bytes`.
        FormatError: the parts of the message contradict each other or are damaged; or ml_dtypes is needed.

    Thread safety: any thread; the decompression releases the GIL.
    """
    head = head_of(proto.dtype, proto.tensor_shape.SerializeToString())
    tensor = Tensor(head, proto.tensor_content, proto.string_val)
    tensor.check(max_bytes)
    array = np.empty(tensor.head.shape, tensor.head.dtype)
    tensor.decode_into(array, delta_encoded=delta_encoded)
    return array


@dataclass(frozen=True, eq=False)
class Head:
    """What a tensor says of the array that it will be. Tensors of one dtype and shape share theirs: the same object.

    Attributes:
        num_bytes: of the array.
        announced: what a snappy block of so many bytes begins with.
        min_content: bytes that such a block has at least.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int
    announced: bytes
    min_content: int


class Tensor(NamedTuple):
    """A tensor whose content is not decoded.

    Attributes:
        head: dtype, shape and size of the array that it will be.
        content: a snappy block, or the strings' lengths and bytes.
        strings: if it has no content.
    """

    head: Head
    content: bytes
    strings: Sequence[bytes] = ()

    def check(self, max_bytes: int) -> None:
        """Make sure that head and content agree; nothing is decoded, and no memory taken for it.

        Raises:
            UnsafeDataError: the array would be larger than `max_bytes`.
            FormatError: they contradict each other.
        """
        head, content = self.head, self.content
        if head.num_bytes > max_bytes:
            raise UnsafeDataError(
                f"tensor {head.dtype} {head.shape}: {head.num_bytes} bytes, expected at most {max_bytes}. "
                "Raise `max_bytes` if you trust the writer."
            )
        if head.dtype.kind == "O":
            count = math.prod(head.shape)
            if count > max(len(content), len(self.strings)):
                raise damaged(f"{len(self.strings)} strings or {len(content)} bytes, too few for shape {head.shape}")
            return
        if not content.startswith(head.announced):
            try:
                announced = cramjam.snappy.decompress_raw_len(content)
            except cramjam.DecompressionError as error:
                raise damaged(f"snappy block that cannot be decompressed: {error}") from None
            if announced != head.num_bytes:
                raise damaged(f"snappy block of {announced} bytes, expected {head.num_bytes} from dtype and shape")
        if len(content) < head.min_content:
            raise damaged(
                f"snappy block of {len(content)} bytes, which cannot hold the {head.num_bytes} that it announces"
            )

    def decode_into(self, array: Array, *, delta_encoded: bool = False) -> None:
        """Decode into an array of its dtype and shape, in C order; see `decode`.

        Raises:
            FormatError: the content is damaged; then so is the array.
        """
        kind = self.head.dtype.kind
        if kind == "O":
            count = math.prod(self.head.shape)
            array[...] = strings.decode(self.content, self.strings, count).reshape(self.head.shape)
            return
        stored = array.reshape(-1).view(np.uint8)
        decompress_into(self.content, stored)
        if kind == "b":
            np.not_equal(stored, 0, out=stored.view(np.bool_))
        if sys.byteorder == "big":
            array.byteswap(inplace=True)
        if delta_encoded and kind in "iu" and array.ndim > 1:
            # As unsigned numbers, because the differences wrap around.
            steps = array.view(f"u{array.itemsize}")
            np.cumsum(steps, axis=0, dtype=steps.dtype, out=steps)


def decompress_into(content: bytes | memoryview, array: Array) -> None:
    """Decompress a snappy block that is checked into an array of uint8 of its size, in C order.

    Raises:
        FormatError: the block is damaged; then so is the array.
    """
    decompress: Callable[[Any, Any], int] = cramjam.snappy.decompress_raw_into  # NumPy 1 types no array as a buffer
    try:
        decompress(content, array)
    except cramjam.DecompressionError as error:
        raise damaged(f"snappy block that cannot be decompressed: {error}") from None


def head_of(dtype_number: int, encoded_shape: bytes) -> Head:
    """Return what a tensor from anyone says of its array, given the number and the TensorShapeProto in it.

    Raises:
        UnsafeDataError: the dtype is not on the allow-list.
        FormatError: no array can have that shape.
    """
    return (_head_of if len(encoded_shape) <= _LONGEST_SHAPE else _head_of.__wrapped__)(dtype_number, encoded_shape)


@functools.lru_cache(maxsize=1024)
def _head_of(dtype_number: int, encoded_shape: bytes) -> Head:
    dtype = dtype_of(dtype_number)
    try:
        proto = TensorShapeProto.FromString(encoded_shape)
    except DecodeError as error:
        raise damaged(f"tensor of a shape that cannot be read ({error})") from None
    shape = tuple([dim.size for dim in proto.dim])
    if proto.unknown_rank:
        raise damaged("tensor of unknown shape")
    if len(shape) > _MAX_DIMS:
        raise damaged(f"tensor with {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if min(shape, default=0) < 0 or (0 in shape and math.prod(size or 1 for size in shape) > _MAX_EXTENT):
        raise damaged(f"tensor of shape {shape}, which no array can have")
    num_bytes = math.prod(shape) * dtype.itemsize
    return Head(dtype, shape, num_bytes, varint(num_bytes), -(-num_bytes // _MAX_SNAPPY_RATIO))
