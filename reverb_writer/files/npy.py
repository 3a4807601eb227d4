"""Arrays as `.npy` files with a header that is written in one way only: so it is compared instead of parsed.

`numpy.load` reads them, too. Its own parser of headers takes longer than all else that reads a short trajectory.

Source: NumPy's NEP 1 (version 1.0).
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError

Array = npt.NDArray[Any]

_HEADER_ALIGNMENT = 64


def encode(array: Array) -> bytes:
    """Return an array, not one of objects, as an `.npy` file.

    >>> import io
    >>> np.load(io.BytesIO(encode(np.arange(3.0))))
    array([0., 1., 2.])
    """
    return _header(array.dtype.str, array.shape) + array.tobytes()


def size_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Return how many bytes `encode` makes of such an array."""
    return len(_header(dtype.str, shape)) + math.prod(shape) * dtype.itemsize


def decode(data: bytes, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the array of a file that `encode` has made, read-only.

    Raises:
        FormatError: it has another dtype or shape; calls it `name`.
    """
    header, count = _header(dtype.str, shape), math.prod(shape)
    if not data.startswith(header) or len(data) != len(header) + count * dtype.itemsize:
        raise FormatError(f"array `{name}` is not {dtype} {shape}, as the manifest says.")
    return np.frombuffer(data, dtype, count, len(header)).reshape(shape)


@functools.lru_cache(maxsize=1024)
def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header of an `.npy` file, as long as a multiple of 64 bytes."""
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    size = -(-(10 + len(text) + 1) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + text.ljust(size - 1).encode("latin1") + b"\n"
