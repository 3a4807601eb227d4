"""Write and read `.npz` files, faster than NumPy and without pickle.

The files are those of `numpy.savez`, zip files of `.npy` members, so `numpy.load` reads them. They are stricter in
three ways, on which `read` relies after the caller has checked the file's checksum:

    - a member is stored or deflated, with its sizes in front of it, so members are found by walking from one to the
    next;
    - a stored array begins at a multiple of 64 bytes, so it is used in place, without a copy;
    - an `.npy` header is written in one way only, so it is compared instead of parsed.

Source: PKWARE's APPNOTE 6.3.10, 4.3.7 (local file header), and NumPy's NEP 1 (`.npy`, version 1.0).
"""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import cramjam
import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError

Array = npt.NDArray[Any]

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_SIGNATURE = b"PK\x03\x04"
_ALIGNMENT = 64
_PADDING_ID = 0x5252  # an extra field without meaning, which zip programs skip
_DEFLATE_LEVEL = 1  # images: twice as fast as 6 to write, a sixtieth of the size instead of a hundredth
_MAX_DEFLATE_RATIO = 1032
_STORED, _DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


class Member(NamedTuple):
    """An array in a file."""

    name: str  # without `.npy`; may have slashes
    array: Array  # not an object array
    deflate: bool = False  # whether it is compressed


def write(members: Iterable[Member]) -> bytes:
    """Return the bytes of an `.npz` file.

    >>> np.load(io.BytesIO(write([Member("reward", np.arange(3.0))])))["reward"]
    array([0., 1., 2.])
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, array, deflate in members:
            info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980: equal data makes equal files
            if not deflate:
                start = out.tell() + _LOCAL_HEADER.size + len(info.filename.encode()) + 4
                padding = -start % _ALIGNMENT
                info.extra = struct.pack("<2H", _PADDING_ID, padding) + bytes(padding)
            data = _header(array.dtype.str, array.shape) + array.tobytes()
            archive.writestr(info, data, _DEFLATED if deflate else _STORED, _DEFLATE_LEVEL)
    return out.getvalue()


def read(data: Array, layout: Iterable[tuple[str, np.dtype[Any], tuple[int, ...]]]) -> list[Array]:
    """Return the arrays of an `.npz` file that `write` made; stored ones are views of `data`.

    The layout has name, dtype and shape of each member. The checksum of `data`, uint8, was checked.
    """
    try:
        members = dict(_walk(data.data))
        return [_array(members[f"{name}.npy"], dtype, shape) for name, dtype, shape in layout]
    except (KeyError, struct.error, UnicodeDecodeError) as error:
        raise FormatError(f"the .npz file differs from its manifest: {error!r}") from error


def _walk(data: memoryview) -> Iterator[tuple[str, tuple[memoryview, int, int]]]:
    at = 0
    while bytes(data[at : at + 4]) == _SIGNATURE:
        header = _LOCAL_HEADER.unpack_from(data, at)
        method, (stored_size, size, name_size, extra_size) = header[3], header[7:]
        name = at + _LOCAL_HEADER.size
        start = name + name_size + extra_size
        yield str(data[name : name + name_size], "utf-8"), (data[start : start + stored_size], method, size)
        at = start + stored_size


def _array(member: tuple[memoryview, int, int], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    data, method, size = member
    header = _header(dtype.str, shape)
    count = int(np.prod(shape, dtype=np.int64))
    if size != len(header) + count * dtype.itemsize:
        raise FormatError(f"an array of {size} bytes, expected {dtype} {shape} and a header.")
    if method == _DEFLATED:
        data = _inflate(data, size)
    if len(data) != size or data[: len(header)] != header:
        raise FormatError(f"an array that is not {dtype} {shape}, as its manifest says.")
    return np.frombuffer(data, dtype, count, len(header)).reshape(shape)


def _inflate(data: memoryview, size: int) -> memoryview:
    if size > _MAX_DEFLATE_RATIO * len(data):
        raise FormatError(f"{len(data)} deflated bytes cannot hold {size}.")
    out = np.empty(size, np.uint8)
    try:
        written = cramjam.deflate.decompress_into(data, out.data)
    except cramjam.DecompressionError as error:
        raise FormatError(f"an array that cannot be inflated: {error}") from error
    return out.data[:written]


@functools.lru_cache(maxsize=1024)
def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an `.npy` file, as long as a multiple of 64 bytes."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    size = -(-(10 + len(text) + 1) // _ALIGNMENT) * _ALIGNMENT - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + text.ljust(size - 1).encode("latin1") + b"\n"
