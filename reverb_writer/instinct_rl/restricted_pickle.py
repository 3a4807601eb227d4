"""Load pickles of NumPy arrays in dicts, tuples and lists, and no others.

A pickle is a program. Here it may only use the names in NumPy's own pickles. They stand for Python functions of this
module, which make arrays from bytes; the pickle never reaches NumPy's C code for pickles. Opcodes are also limited to a
list, and all are checked before the first one runs.

Source: CPython 3.11, `pickletools`; NumPy 1.26 and 2, `ndarray.__reduce_ex__`.
"""

from __future__ import annotations

import io
import math
import pickle  # restricted, see the module's docstring
import pickletools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, UnsafeDataError

_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "FLOAT", "BINFLOAT", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST"),
    *("APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "UNICODE", "BINUNICODE"),
    *("SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "STRING"),
    *("BINSTRING", "SHORT_BINSTRING", "GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
_MEMO = {"GET", "BINGET", "LONG_BINGET", "PUT", "BINPUT", "LONG_BINPUT"}
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16|\?)")
_STATE_SIZE = 5  # version, shape, dtype, is_fortran, data
_MAX_DIMS = 32


def load_arrays(data: bytes) -> Any:
    """Load a pickle of arrays, numbers, strings and None in dicts, tuples and lists.

    >>> load_arrays(pickle.dumps({"reward": np.arange(2.0)}))
    {'reward': array([0., 1.])}

    Raises:
        UnsafeDataError: the pickle needs another object or opcode; the error names it, and it has not run.
        FormatError: the data are torn, or not a pickle.
    """
    try:
        asked = {_name(*found) for found in pickletools.genops(data)}
        found = None if asked - _OPCODES else _Restricted(io.BytesIO(data), encoding="latin1").load()
    except UnsafeDataError:
        raise
    except Exception as error:  # a torn pickle can raise anything
        raise FormatError(f"no pickle of arrays: {type(error).__name__}: {error}") from error
    if asked - _OPCODES:
        raise UnsafeDataError(f"a pickle with {', '.join(sorted(asked - _OPCODES))}, which no array needs.")
    return _unwrap(found, 0, {})


class _Restricted(pickle.Unpickler):
    """An unpickler with seven names, each a function of this module."""

    def find_class(self, module: str, name: str) -> Any:
        place = f"{module.replace('numpy._core', 'numpy.core')}.{name}"
        if place not in _NAMES:
            raise UnsafeDataError(f"a pickle that asks for {module}.{name}; only NumPy arrays are read.")
        return _NAMES[place]

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafeDataError(f"a pickle that asks for the persistent object {pid!r}.")


class _Dtype:
    """A dtype of numbers; a later state may set its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, name: Any) -> None:
        if not isinstance(name, str) or not _DTYPE.fullmatch(name):
            raise UnsafeDataError(f"a pickle with dtype {name!r}; only numbers are read.")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """An array; a later state fills it."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state[-_STATE_SIZE:]
        self.fill(data, dtype, shape, "F" if is_fortran else "C")

    def fill(self, data: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> _Array:
        is_numbers = isinstance(dtype, _Dtype) and isinstance(data, str | bytes | bytearray)
        if not is_numbers or not isinstance(shape, tuple) or len(shape) > _MAX_DIMS:
            raise UnsafeDataError("a pickle with an array of something other than numbers.")
        raw = data.encode("latin1") if isinstance(data, str) else bytes(data)
        fits = all(type(size) is int and size >= 0 for size in shape)
        if not fits or math.prod(shape) * dtype.dtype.itemsize != len(raw):
            raise FormatError(f"an array {dtype.dtype} {shape} of {len(raw)} bytes.")
        self.array = np.frombuffer(raw, dtype.dtype).reshape(shape, order="F" if order == "F" else "C").copy()
        return self


class _Named:
    """A function behind a name; a pickle can call it but not change it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise UnsafeDataError(f"a pickle that changes what it is read with: {state!r}.")


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1":
        raise UnsafeDataError(f"a pickle that encodes text as {encoding!r}.")
    return str(text).encode("latin1")


_NAMES = {
    "numpy.ndarray": _Named(lambda *_: _Array()),
    "numpy.dtype": _Named(lambda name, *_: _Dtype(name)),
    "numpy.core.multiarray._reconstruct": _Named(lambda *_: _Array()),
    "numpy.core.multiarray.scalar": _Named(lambda dtype, data: _Array().fill(data, dtype, (), "C")),
    "numpy.core.numeric._frombuffer": _Named(lambda *arguments: _Array().fill(*arguments)),
    "_codecs.encode": _Named(_encode),
    "__builtin__.bytes": _Named(lambda: b""),  # empty bytes, before protocol 3
}


def _name(opcode: Any, argument: Any, at: Any) -> str:
    """Return the name of the opcode at a byte; also its argument if this is an entry of the memo that cannot exist."""
    # The unpickler allocates all entries up to the highest one.
    return f"{opcode.name} {argument}" if opcode.name in _MEMO and argument > at else str(opcode.name)


def _unwrap(value: Any, depth: int, unwrapped: dict[int, Any]) -> Any:
    """Return a value with arrays; `unwrapped` has results by id, because a value may occur many times."""
    if depth > _MAX_DIMS:
        raise UnsafeDataError("a pickle nested without end.")
    if id(value) in unwrapped:
        return unwrapped[id(value)]
    found = value
    if isinstance(value, dict):
        found = {key: _unwrap(part, depth + 1, unwrapped) for key, part in value.items()}
    elif isinstance(value, list | tuple):
        found = type(value)(_unwrap(part, depth + 1, unwrapped) for part in value)
    elif isinstance(value, _Array) and value.array is not None:
        found = value.array
    elif value is not None and not isinstance(value, bool | int | float | str | bytes | bytearray):
        raise UnsafeDataError(f"a pickle with a {type(value).__name__}; only NumPy arrays are read.")
    unwrapped[id(value)] = found
    return found
