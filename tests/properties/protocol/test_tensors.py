"""Arrays of all dtypes, byte orders and layouts are decoded as encoded; other bytes are decoded or refused."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensor_codec
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import tensors
from reverb_writer.protocol.messages import TensorProto

Array = np.ndarray[Any, np.dtype[Any]]

NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
INTEGERS = [name for name in NUMBERS if name[0] in "iu"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


# Surrogates are not Unicode, and NumPy drops NULs at the end.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


@st.composite
def laid_out(draw: st.DrawFn, arrays: st.SearchStrategy[Array]) -> Array:
    """Draw an array in any order of dimensions, any direction and any stride, possibly read-only."""
    array = draw(arrays)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = draw(st.tuples(*[st.sampled_from([1, 2, -1, -2])] * array.ndim))
    index: Any = (Ellipsis, *(slice(None, None, step) for step in steps))
    view: Array = array[index]
    view.flags.writeable = draw(st.booleans())
    return view


def numbers() -> st.SearchStrategy[Array]:
    dtypes = st.tuples(st.sampled_from("<>"), st.sampled_from(NUMBERS)).map("".join)
    return laid_out(dtypes.flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)))


def decoded(array: Array, *, delta_encoded: bool = False) -> Array:
    message = TensorProto.FromString(tensor_codec.encode(array))
    return tensor_codec.decode(message, delta_encoded=delta_encoded)


@given(numbers())
def test_numbers_survive_bit_for_bit(array: Array) -> None:
    result = decoded(array)
    native = array.astype(array.dtype.newbyteorder("="))
    assert (result.dtype, result.shape) == (native.dtype, native.shape)
    assert result.tobytes() == native.tobytes()  # also of NaN


@given(laid_out(hnp.arrays("u2", SHAPES)))
def test_every_bfloat16_survives_bit_for_bit(bits: Array) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    result = decoded(np.ascontiguousarray(bits).view(bfloat16).reshape(bits.shape))
    assert result.dtype == bfloat16
    assert result.view("u2").tolist() == bits.tolist()
    assert tensors.dtype_number(result.dtype) == 14


def bytes_of(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@given(
    laid_out(hnp.arrays(object, SHAPES, elements=st.binary() | st.text().map(str.encode)))
    | laid_out(hnp.arrays(st.sampled_from(["<U5", ">U5"]), SHAPES, elements=TEXT))
    | laid_out(hnp.arrays("S5", SHAPES))
)
def test_strings_survive_as_bytes(array: Array) -> None:
    assert decoded(array).tolist() == np.vectorize(bytes_of, otypes=[object])(array).tolist()


@given(st.sampled_from(INTEGERS).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES.filter(len))))
def test_summing_differences_gives_the_integers_back(array: Array) -> None:
    unsigned = array.view(f"u{array.itemsize}")
    differences = unsigned.copy()
    if array.ndim > 1:
        differences[1:] -= unsigned[:-1]
    result = decoded(differences.view(array.dtype), delta_encoded=True)
    assert result.dtype == array.dtype
    assert result.tolist() == array.tolist()


@settings(max_examples=500)
@given(st.sampled_from([1, 3, 7, 10]), SHAPES, st.binary(max_size=60))
@example(1, (1,), b"\x04\x0c\x00\x00\x80\x3f")
@example(7, (2,), b"\x01\x01ab")
def test_any_content_is_decoded_in_full_or_refused(number: int, shape: tuple[int, ...], content: bytes) -> None:
    message = TensorProto(dtype=number, tensor_content=content)
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    try:
        array = tensor_codec.decode(message)
    except FormatError:
        return
    assert (array.dtype, array.shape) == (tensors.dtype_of(number), shape)
    assert decoded(array).tobytes() == array.tobytes() or number == 7


@settings(max_examples=500)
@given(numbers(), st.data())
def test_a_damaged_message_is_decoded_or_refused(array: Array, data: st.DataObject) -> None:
    damaged = bytearray(tensor_codec.encode(array))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DecodeError, FormatError, UnsafeDataError):
        tensor_codec.decode(TensorProto.FromString(bytes(damaged)), max_bytes=2**20)
