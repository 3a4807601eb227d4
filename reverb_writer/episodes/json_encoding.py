"""Nests of arrays and plain data as JSON, and back, without loss.

None, booleans, integers, strings, finite floats, lists, and dicts with strings for keys are unchanged. Everything else
becomes a dict of one entry, whose key is the type:

    {"$array": [dtype, shape, base64]}   an array of numbers, little-endian, in C order
    {"$strings": [shape, [...]]}         an array of strings
    {"$scalar": [dtype, base64]}         a NumPy number
    {"$bytes": base64}                   bytes
    {"$float": "nan"}                    a float that is not finite
    {"$tuple": [...]}                    a tuple
    {"$named": [name, fields, [...]]}    a named tuple; it comes back in a class of this name and with these fields
    {"$dict": [[key, value], ...]}       any other dict
    {"$ordered": [[key, value], ...]}    an OrderedDict

Decoding never runs code.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.steps import named_tuple


def encoded(value: Any, path: str = "") -> Any:
    """Return a value as JSON.

    Raises:
        StructureError: a part has another type; names its path.

    >>> encoded({"a": (1, np.float32(0.5))})
    {'a': {'$tuple': [1, {'$scalar': ['<f4', 'AAAAPw==']}]}}
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if type(value) in (float, bytes):
        return {"$float": str(value)} if type(value) is float else {"$bytes": _base64(value)}
    if type(value) in (list, tuple):
        items = [encoded(item, f"{path}/{index}") for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict):
        return _encoded_dict(value, path)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"$named": [type(value).__name__, list(value._fields), encoded(list(value), path)]}
    if isinstance(value, np.ndarray | np.generic):
        return _encoded_array(value, path)
    raise StructureError(f"`{path.strip('/')}`: a {type(value).__name__} cannot be stored in a state. Remove it.")


def _encoded_dict(value: dict[Any, Any], path: str) -> dict[str, Any]:
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encoded(item, f"{path}/{key}") for key, item in value.items()}
    kind = "$dict" if type(value) is dict else "$ordered"
    return {kind: [[encoded(key, path), encoded(item, f"{path}/{key}")] for key, item in value.items()]}


def _encoded_array(value: Any, path: str) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.kind == "O":
        return {"$strings": [list(array.shape), encoded(list(array.flat), path)]}
    if array.dtype.kind not in "biufc":
        raise StructureError(f"`{path.strip('/')}`: {array.dtype} cannot be stored in a state. Remove it.")
    dtype = array.dtype.newbyteorder("<")
    data = _base64(array.astype(dtype).tobytes())
    if isinstance(value, np.generic):
        return {"$scalar": [dtype.str, data]}
    return {"$array": [dtype.str, list(array.shape), data]}


def decoded(value: Any) -> Any:
    """Return the value that was encoded; arrays are new and writable.

    Raises:
        FormatError: this is not a result of `encoded`.

    >>> decoded({"a": {"$tuple": [1, {"$scalar": ["<f4", "AAAAPw=="]}]}})["a"][1].dtype
    dtype('float32')
    """
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, Mapping):
        if value is not None and not isinstance(value, bool | int | float | str):
            raise FormatError(f"a state has only JSON types, got a {type(value).__name__}.")
        return value
    (kind, content), *others = value.items() or [("", None)]
    if others or not str(kind).startswith("$"):
        return {key: decoded(item) for key, item in value.items()}
    if kind not in _DECODERS:
        raise FormatError(f"the key {kind!r} in a state is unknown; a newer release may have written it.")
    try:
        return _DECODERS[kind](content)
    except (TypeError, ValueError, binascii.Error) as error:
        raise FormatError(f"{kind!r} in a state is broken: {error}") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _array(dtype: str, shape: list[int], data: str) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in "biufc":
        raise ValueError(f"{dtype} is not a dtype of numbers")
    return np.frombuffer(base64.b64decode(data, validate=True), kind).reshape(shape).astype(kind.newbyteorder("="))


def _strings(shape: list[int], items: list[Any]) -> Any:
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = decoded(item)
    return array.reshape(shape)


def _named(name: str, fields: list[str], items: list[Any]) -> Any:
    return named_tuple(name, tuple(fields))(*decoded(items))


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$array": lambda content: _array(*content),
    "$strings": lambda content: _strings(*content),
    "$scalar": lambda content: _array(content[0], [], content[1])[()],
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$float": float,
    "$tuple": lambda content: tuple(decoded(content)),
    "$named": lambda content: _named(*content),
    "$ordered": lambda content: OrderedDict((decoded(key), decoded(item)) for key, item in content),
    "$dict": lambda content: {decoded(key): decoded(item) for key, item in content},
}
