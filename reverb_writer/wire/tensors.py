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
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import cramjam
import numpy as np

from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.wire.messages import DataType, TensorProto, TensorShapeProto

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "MAX_TENSOR_BYTES",
    "Head",
    "Tensor",
    "decode",
    "dtype_number",
    "dtype_of",
    "encode",
    "layout",
    "parse",
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
        strings = [_as_bytes(element) for element in array.flat]
    except UnicodeEncodeError as error:
        raise StructureError(f"string {error.object!r} is not Unicode: {error.reason}. Store it as bytes.") from None
    return b"".join([*(varint(len(string)) for string in strings), *strings])


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
        groups.append(number % _MORE | _MORE)
        number //= _MORE
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
    tensor = parse(proto, max_bytes)
    array = np.empty(tensor.head.shape, tensor.head.dtype)
    tensor.decode_into(array, delta_encoded=delta_encoded)
    return array


class Head(NamedTuple):
    """What a tensor says of the array that it will be. Tensors of one dtype and shape share theirs."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    num_bytes: int


class Tensor(NamedTuple):
    """A tensor whose dtype, shape and size are known to agree, and whose content is not decoded.

    Attributes:
        head: dtype, shape and size of the array that it will be.
        content: a snappy block, or the strings' lengths and bytes.
        strings: if it has no content.
    """

    head: Head
    content: bytes
    strings: Sequence[bytes] = ()

    def decode_into(self, array: Array, *, delta_encoded: bool = False) -> None:
        """Decode into an array of its dtype and shape, in C order; see `decode`.

        Raises:
            FormatError: the content is damaged; then so is the array.
        """
        kind = self.head.dtype.kind
        if kind == "O":
            array[...] = _strings_of(self)
            return
        stored = array.reshape(-1).view(np.uint8)
        try:
            cramjam.snappy.decompress_raw_into(self.content, stored.data)
        except cramjam.DecompressionError as error:
            raise _damaged(f"snappy block that cannot be decompressed: {error}") from None
        if kind == "b":
            np.not_equal(stored, 0, out=stored.view(np.bool_))
        if sys.byteorder == "big":
            array.byteswap(inplace=True)
        if delta_encoded and kind in "iu" and array.ndim > 1:
            # As unsigned numbers, because the differences wrap around.
            steps = array.view(f"u{array.itemsize}")
            np.cumsum(steps, axis=0, dtype=steps.dtype, out=steps)


def parse(proto: Any, max_bytes: int) -> Tensor:
    """Return the tensor that a TensorProto from anyone is; nothing is decoded, and no memory taken for it.

    Raises:
        UnsafeDataError: the dtype is not on the allow-list, or the array would be larger than `max_bytes`.
        FormatError: its parts contradict each other.
    """
    shape = proto.tensor_shape.SerializeToString()
    head = (_head_of if len(shape) <= _LONGEST_SHAPE else _head_of.__wrapped__)(proto.dtype, shape)
    content = proto.tensor_content
    num_bytes = head.num_bytes
    if num_bytes > max_bytes:
        raise UnsafeDataError(
            f"tensor {head.dtype} {head.shape}: {num_bytes} bytes, expected at most {max_bytes}. "
            "Raise `max_bytes` if you trust the writer."
        )
    if head.dtype.kind == "O":
        strings = list(proto.string_val)
        count = math.prod(head.shape)
        if count > max(len(content), len(strings)):
            raise _damaged(f"{len(strings)} strings or {len(content)} bytes, too few for shape {head.shape}")
        return Tensor(head, content, strings)
    try:
        announced = cramjam.snappy.decompress_raw_len(content)
    except cramjam.DecompressionError as error:
        raise _damaged(f"snappy block that cannot be decompressed: {error}") from None
    if announced != num_bytes:
        raise _damaged(f"snappy block of {announced} bytes, expected {num_bytes} from dtype and shape")
    if num_bytes > _MAX_SNAPPY_RATIO * len(content):
        raise _damaged(f"snappy block of {len(content)} bytes, which cannot hold the {num_bytes} that it announces")
    return Tensor(head, content)


@functools.lru_cache(maxsize=1024)
def _head_of(dtype_number: int, encoded_shape: bytes) -> Head:
    dtype = dtype_of(dtype_number)
    proto = TensorShapeProto.FromString(encoded_shape)
    shape = tuple([dim.size for dim in proto.dim])
    if proto.unknown_rank:
        raise _damaged("tensor of unknown shape")
    if len(shape) > _MAX_DIMS:
        raise _damaged(f"tensor with {len(shape)} dimensions, expected at most {_MAX_DIMS}")
    if min(shape, default=0) < 0 or (0 in shape and math.prod(size or 1 for size in shape) > _MAX_EXTENT):
        raise _damaged(f"tensor of shape {shape}, which no array can have")
    return Head(dtype, shape, math.prod(shape) * dtype.itemsize)


def _strings_of(tensor: Tensor) -> Array:
    count = math.prod(tensor.head.shape)
    strings = _split(tensor.content, count) if tensor.content else list(tensor.strings)
    if len(strings) != count:
        raise _damaged(f"{len(strings)} strings, expected {count} from shape {tensor.head.shape}")
    array = np.empty(count, np.object_)
    array[:] = strings
    return array.reshape(tensor.head.shape)


def _split(content: bytes, count: int) -> list[bytes]:
    """Take strings out of their lengths, as varints of up to 32 bits, followed by their bytes."""
    lengths: list[int] = []
    position = 0
    while len(lengths) < count:
        length = 0
        for shift in range(0, 32, 7):
            if position == len(content):
                raise _damaged(f"{count} strings, {len(content)} bytes of which do not even hold the lengths")
            byte = content[position]
            position += 1
            length |= byte % _MORE << shift
            if byte < _MORE:
                break
        else:
            raise _damaged("string with a length of more than 32 bits")
        lengths.append(length)
    ends = list(itertools.accumulate(lengths, initial=position))
    if ends[-1] != len(content):
        raise _damaged(f"{count} strings that end at byte {ends[-1]}, expected {len(content)}")
    return [content[start:end] for start, end in itertools.pairwise(ends)]


def _damaged(what: str) -> FormatError:
    return FormatError(f"{what}. The data is damaged, or was not written by a Reverb client.")
