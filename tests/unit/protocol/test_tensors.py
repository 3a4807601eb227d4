"""Tensors compared with bytes worked out by hand, and messages that contradict themselves.

A snappy block is its uncompressed size as a varint, then elements; a literal of n <= 60 bytes is `(n - 1) << 2`, bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import tensor_codec

from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.messages import DataType, TensorProto


def proto(dtype: int, shape: tuple[int, ...], content: bytes = b"", strings: tuple[bytes, ...] = ()) -> Any:
    message = TensorProto(dtype=dtype, tensor_content=content, string_val=strings)
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return message


def block(content: bytes) -> bytes:
    """Return a snappy block of up to 60 bytes, uncompressed."""
    return bytes([len(content), (len(content) - 1) << 2]) + content if content else b"\x00"


def decoded(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return tensor_codec.decode(TensorProto.FromString(tensor_codec.encode(array)))


# dtype 1; shape { dim { size 2 }, dim { size 2 } }; content of 18 bytes: 16 bytes, one literal of 16 bytes
FLOATS = "08 01 12 08 12 02 08 02 12 02 08 02 22 12 10 3c 00 00 80 3f 00 00 00 40 00 00 40 40 00 00 80 40"


def test_a_leaf_that_does_not_shrink_is_one_literal_for_the_next_15_arrays() -> None:
    encoder, noise = tensors.LeafEncoder(), np.random.default_rng(0).integers(0, 256, 9000, np.uint8)
    zeros = np.zeros(9000, np.uint8)

    def content(array: np.ndarray[Any, Any]) -> bytes:
        return b"".join(encoder.parts(array, tensors.encoder(array.dtype, array.shape)[1]))

    assert len(content(zeros)) < 500
    first = content(noise)
    # 9000 as a varint; a literal with its length minus one, 8999, in four bytes
    literal = bytes.fromhex("a8 46 fc 27 23 00 00")
    assert [content(noise) for _ in range(15)] == [literal + noise.tobytes()] * 15
    assert content(noise) == first  # the 16th is tried again
    assert content(zeros) == literal + zeros.tobytes()
    header = tensors.parse_header(DataType.DT_UINT8, proto(0, (9000,)).tensor_shape.SerializeToString())
    out = np.empty(9000, np.uint8)
    for stored in (first, literal + noise.tobytes()):
        tensors.EncodedTensor(header, stored).check(9000)
        tensors.EncodedTensor(header, stored).decode_into(out)
        assert (out == noise).all()


def test_literals_of_a_leaf_keep_values_of_any_layout_and_type() -> None:
    arrays = [
        *(np.zeros((3, 0), "f4"), np.array([[1, 2], [3, 4]], ">f4"), np.arange(8, dtype="i2")[::2]),
        *(np.array(["a", b"bc"], object), np.array([True, False]), np.arange(6, dtype="c16").reshape(2, 3).T),
    ]
    for array in arrays:
        encoder = tensors.LeafEncoder()
        header, encode = tensors.encoder(array.dtype, array.shape)
        for _ in range(3):
            content = b"".join(encoder.parts(array, encode))
            message = TensorProto.FromString(header + tensors.varint(len(content)) + content)
            found = tensor_codec.decode(message)
            expected = [[b"a", b"bc"]] if array.dtype.kind == "O" else [array.tolist()]
            assert [found.tolist()] == expected


def test_memory_layout_and_byte_order_do_not_change_the_bytes() -> None:
    strided = np.array([[1, 0, 2, 0], [3, 0, 4, 0]], ">f4")[:, ::2]
    assert tensor_codec.encode(strided).hex(" ") == FLOATS


def test_a_scalar_has_an_empty_shape() -> None:
    assert tensor_codec.encode(np.array(True)).hex(" ") == "08 0a 12 00 22 03 01 00 01"
    assert decoded(np.array(True)).shape == ()
    assert decoded(np.array(2.5, ">f8")) == 2.5


def test_an_empty_array_has_an_empty_block() -> None:
    # a dimension of size 0 is a message without fields
    assert tensor_codec.encode(np.zeros((0, 2), "u1")).hex(" ") == "08 04 12 06 12 00 12 02 08 02 22 01 00"
    assert decoded(np.zeros((3, 0), "c16")).shape == (3, 0)


@pytest.mark.parametrize(
    ("strings", "content"),
    [
        (np.array(["c", b"", "ab"], object)[::-1], "02 00 01 61 62 63"),
        (np.array([["\u00e9"], ["x" * 128]]), "02 80 01 c3 a9" + " 78" * 128),
        (np.array([b"\x00", b"a\x00"], object), "01 02 00 61 00"),
        (np.zeros((0,), "S3"), ""),
    ],
    ids=["object reversed", "UTF-8, long", "zero bytes", "none"],
)
def test_strings_are_lengths_then_bytes(strings: np.ndarray[Any, Any], content: str) -> None:
    message = TensorProto.FromString(tensor_codec.encode(strings))
    assert message.dtype == DataType.DT_STRING
    assert [dim.size for dim in message.tensor_shape.dim] == list(strings.shape)
    assert message.tensor_content == bytes.fromhex(content)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1 has no StringDType")
def test_strings_of_variable_width_are_strings() -> None:
    array = np.array(["ab", "", "c"], np.dtypes.StringDType())  # type: ignore[attr-defined,unused-ignore]
    assert tensor_codec.encode(array) == tensor_codec.encode(np.array([b"ab", b"", b"c"]))


def test_strings_in_the_other_field_are_decoded_too() -> None:
    array = tensor_codec.decode(proto(DataType.DT_STRING, (2, 1), strings=(b"a", b"bc")))
    assert array.tolist() == [[b"a"], [b"bc"]]


@pytest.mark.parametrize("element", [1, None, 1.5, [b"a"], np.float32(1), bytearray(b"a")], ids=repr)
def test_objects_other_than_strings_are_refused(element: object) -> None:
    array = np.empty(2, object)
    array[0], array[1] = b"a", element
    with pytest.raises(StructureError, match=rf"type {type(element).__name__}, expected str or bytes"):
        tensor_codec.encode(array)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(StructureError, match=r"surrogates not allowed\. Store it as bytes"):
        tensor_codec.encode(np.array(["\ud800"]))


@pytest.mark.parametrize("dtype", ["M8[s]", "m8[ns]", "V3", "f4,i4", "float8_e5m2", "int4"])
def test_dtypes_that_reverb_cannot_store_are_refused(dtype: str) -> None:
    if dtype in ("float8_e5m2", "int4"):
        dtype = getattr(pytest.importorskip("ml_dtypes"), dtype)
    with pytest.raises(StructureError, match=r"cannot be stored in Reverb\. Cast to one of bool, int8.*bfloat16"):
        tensor_codec.encode(np.zeros(2, dtype))


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="longdouble is double here")
def test_long_doubles_are_refused() -> None:
    for dtype in (np.longdouble, np.clongdouble):
        with pytest.raises(StructureError, match="cannot be stored"):
            tensors.dtype_number(np.dtype(dtype))


def test_numbers_are_those_of_tensorflow() -> None:
    names = ["f4", "f8", "i4", "u1", "i2", "i1", "O", "c8", "i8", "?", "u2", "c16", "f2", "u4", "u8"]
    numbers = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17, 18, 19, 22, 23]
    assert [tensors.dtype_number(np.dtype(name)) for name in names] == numbers
    assert [tensors.dtype_of(number) for number in numbers] == [np.dtype(name) for name in names]


def test_an_array_too_large_for_a_message_is_refused() -> None:
    huge = np.broadcast_to(np.zeros((), "u1"), (2**31,))  # takes one byte
    with pytest.raises(StructureError, match=r"uint8 \(2147483648,\): 2147483648 bytes, expected at most 2147483647"):
        tensor_codec.encode(huge)


def test_bfloat16_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    with pytest.raises(FormatError, match="Install `ml_dtypes`"):
        tensor_codec.decode(proto(DataType.DT_BFLOAT16, (1,) * 9, block(b"\xc0\x3f")))  # a shape of no other test


def test_booleans_are_zero_or_one_whatever_was_stored() -> None:
    array = tensor_codec.decode(proto(DataType.DT_BOOL, (3,), block(b"\x00\x02\xff")))
    assert array.view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "stored", "meant"),
    [
        ("i1", [[100, 1], [100, -2], [100, 3]], [[100, 1], [-56, -1], [44, 2]]),
        ("u4", [1, 1, 1], [1, 1, 1]),
        ("f4", [[1], [1]], [[1], [1]]),
        ("?", [[True], [True]], [[True], [True]]),
        ("c8", [[1j], [1j]], [[1j], [1j]]),
        ("S1", [[b"a"], [b"b"]], [[b"a"], [b"b"]]),
    ],
)
def test_differences_are_summed_for_integers_of_two_dimensions(dtype: str, stored: Any, meant: Any) -> None:
    message = TensorProto.FromString(tensor_codec.encode(np.array(stored, dtype)))
    array = tensor_codec.decode(message, delta_encoded=True)
    assert array.tolist() == meant
    assert array.dtype == tensor_codec.decode(message).dtype


@pytest.mark.parametrize(
    ("number", "name"),
    [
        *((0, "DT_INVALID"), (11, "DT_QINT8"), (21, "DT_VARIANT"), (24, "DT_FLOAT8_E5M2"), (107, "DT_STRING_REF")),
        *((number, "unknown") for number in (-1, 31, 100, 2**31 - 1)),
    ],
)
def test_dtypes_off_the_list_are_never_decoded(number: int, name: str) -> None:
    with pytest.raises(UnsafeDataError, match=rf"dtype {name} \({number}\), which is never decoded"):
        tensor_codec.decode(proto(number, (1,), block(b"\x00")))


def test_a_large_array_is_refused_before_it_is_allocated() -> None:
    message = proto(DataType.DT_DOUBLE, (3,), block(bytes(24)))
    assert tensor_codec.decode(message, max_bytes=24).tolist() == [0, 0, 0]
    with pytest.raises(UnsafeDataError, match=r"float64 \(3,\): 24 bytes, expected at most 23"):
        tensor_codec.decode(message, max_bytes=23)
    with pytest.raises(UnsafeDataError, match="expected at most 2147483647"):
        tensor_codec.decode(proto(DataType.DT_STRING, (2**40,), b"\x00"))


@pytest.mark.parametrize(
    "shape",
    [(-1,), (2, -3), (2**62, 2**62, -1), (-(2**63),), (0, 2**62, 8), (1,) * 33],
    ids=["unknown size", "negative", "overflow", "most negative", "empty but too wide", "33 dimensions"],
)
@pytest.mark.parametrize("dtype", [DataType.DT_FLOAT, DataType.DT_STRING])
def test_shapes_that_no_array_can_have_are_refused(dtype: DataType, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        tensor_codec.decode(proto(dtype, shape, b"\x00"))


def test_a_shape_whose_product_overflows_is_not_taken_for_a_small_one() -> None:
    # 2**32 * 2**32 * 4 bytes is 0 modulo 2**64
    with pytest.raises(UnsafeDataError, match="73786976294838206464 bytes"):
        tensor_codec.decode(proto(DataType.DT_FLOAT, (2**32, 2**32), b"\x00"))


def test_a_shape_with_long_names_is_refused() -> None:
    message = proto(DataType.DT_FLOAT, (2,))
    message.tensor_shape.dim[0].name = "n" * 600
    with pytest.raises(FormatError, match=r"tensor with a shape of 60\d bytes, expected at most 512"):
        tensor_codec.decode(message)


def test_a_shape_of_unknown_rank_is_refused() -> None:
    message = proto(DataType.DT_UINT8, (), block(b"\x01"))
    message.tensor_shape.unknown_rank = True
    with pytest.raises(FormatError, match="unknown shape"):
        tensor_codec.decode(message)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (block(bytes(7)), "snappy block of 7 bytes, expected 8"),
        (b"\xff\xff\xff\xff\x0f\x00", "snappy block of 4294967295 bytes, expected 8"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00", "cannot be decompressed"),
        (block(bytes(8))[:-1], "cannot be decompressed"),
        (b"\x08\x01\xff", "cannot be decompressed"),
        (b"", "snappy block of 0 bytes, expected 8"),
    ],
    ids=["short", "huge", "overlong", "truncated", "bad copy", "none"],
)
def test_a_block_that_contradicts_the_shape_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        tensor_codec.decode(proto(DataType.DT_INT64, (1,), content))


def test_a_few_bytes_cannot_allocate_much_memory() -> None:
    size = 2**30
    announced = bytes.fromhex("80 80 80 80 04")  # 2**30
    with pytest.raises(FormatError, match="cannot hold the 1073741824 that its length prefix announces"):
        tensor_codec.decode(proto(DataType.DT_UINT8, (size,), announced + b"\x00a"))


def test_the_best_compressed_block_is_still_decoded() -> None:
    array = np.zeros(2**20, "u1")
    assert len(tensor_codec.encode(array)) < len(array) // 20
    assert not decoded(array).any()


@pytest.mark.parametrize(
    ("size", "content", "strings"),
    [
        pytest.param(2, b"\x01\x01a", (), id="short"),
        pytest.param(2, b"\x01\x01abc", (), id="long"),
        pytest.param(2, b"\x01", (), id="length missing"),
        pytest.param(1, b"\xff" * 100, (), id="length without end"),
        pytest.param(1, b"\xff\xff\xff\xff\x0fa", (), id="length too large"),
        pytest.param(0, b"a", (), id="bytes without strings"),
        pytest.param(1000, b"\x00", (), id="many from one byte"),
        pytest.param(2, b"", (b"a",), id="one of two"),
        pytest.param(2, b"", (b"a", b"b", b"c"), id="three of two"),
    ],
)
def test_strings_that_contradict_their_lengths_are_refused(
    size: int, content: bytes, strings: tuple[bytes, ...]
) -> None:
    with pytest.raises(FormatError):
        tensor_codec.decode(proto(DataType.DT_STRING, (size,), content, strings))
