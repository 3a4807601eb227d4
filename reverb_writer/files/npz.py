"""Write and read `.npz` files without pickle; `numpy.load` reads them, too.

They are those of `numpy.savez`, zip files of `.npy` members, but an `.npy` header is written in one way only: so it is
compared instead of parsed. zip's CRC-32 of each member covers what is read.

Source: NumPy's NEP 1 (`.npy`, version 1.0).
"""

from __future__ import annotations

import functools
import io
import math
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError

Array = npt.NDArray[Any]

_HEADER_ALIGNMENT = 64
_DEFLATE_LEVEL = 1  # images: twice as fast as 6 to write, a sixtieth of the size instead of a hundredth
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Member(NamedTuple):
    """An array in a file."""

    name: str  # without `.npy`; may have slashes
    array: Array  # not an object array
    deflate: bool = False  # whether it is compressed


def write(members: Iterable[Member], texts: dict[str, str]) -> memoryview:
    """Return the bytes of an `.npz` file with these arrays, and these texts beside them.

    >>> np.load(io.BytesIO(write([Member("reward", np.arange(3.0))], {})))["reward"]
    array([0., 1., 2.])
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text)  # dated 1980: equal data makes equal files
        for name, array, deflate in members:
            data = _header(array.dtype.str, array.shape) + array.tobytes()
            method = zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), data, method, _DEFLATE_LEVEL)
    return out.getbuffer()


class Reader:
    """An open `.npz` file that `write` made; a context manager.

    Its methods raise FormatError if a member is missing or damaged. Other errors, such as `zipfile.BadZipFile`, say the
    same of the file as a whole.
    """

    def __init__(self, path: Path) -> None:
        """Open a file."""
        self._archive = zipfile.ZipFile(path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def text(self, name: str) -> bytes:
        """Return a member that is no array."""
        return self._read(name)

    def array(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return an array, read-only."""
        header = _header(dtype.str, shape)
        count = math.prod(shape)
        data = self._read(f"{name}.npy", len(header) + count * dtype.itemsize)
        if data[: len(header)] != header:
            raise FormatError(f"array `{name}` is not {dtype} {shape}, as the manifest says.")
        return np.frombuffer(data, dtype, count, len(header)).reshape(shape)

    def _read(self, name: str, size: int | None = None) -> bytes:
        member = self._archive.getinfo(name)
        if size is not None and member.file_size != size:  # checked first: a few deflated bytes may become very many
            raise FormatError(f"`{name}` has {member.file_size} bytes, expected {size}.")
        if member.compress_type not in _METHODS:
            raise FormatError(f"`{name}` is compressed by method {member.compress_type}, expected one of {_METHODS}.")
        return self._archive.read(member)


@functools.lru_cache(maxsize=1024)
def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an `.npy` file, as long as a multiple of 64 bytes."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    size = -(-(10 + len(text) + 1) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + text.ljust(size - 1).encode("latin1") + b"\n"
