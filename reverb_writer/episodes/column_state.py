"""The state of one column of an episode as JSON, and back: rows, look-back, space."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.episodes.growing_columns import Columns, as_objects, batched
from reverb_writer.episodes.json_encoding import decoded, encoded
from reverb_writer.errors import FormatError, ReverbWriterError, StructureError
from reverb_writer.lazy import needs

if TYPE_CHECKING:
    from reverb_writer.episodes.lookback_buffer import InfiniteLookbackBuffer

Restored = TypeVar("Restored", bound="InfiniteLookbackBuffer")

_SPACES = {
    "Box": {"low": "low", "high": "high", "shape": "shape", "dtype": "dtype"},
    "Discrete": {"n": "n", "start": "start", "dtype": "dtype"},
    "MultiBinary": {"n": "n"},
    "MultiDiscrete": {"nvec": "nvec", "start": "start", "dtype": "dtype"},
    "Text": {"max_length": "max_length", "min_length": "min_length", "charset": "characters"},
}
"""The arguments that make a space, and under which name it has them; old releases lack some."""


@contextlib.contextmanager
def broken_state(of: str) -> Iterator[None]:
    """Raise FormatError for whatever goes wrong because a state is none."""
    try:
        yield
    except FormatError:
        raise
    except (ReverbWriterError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(f"this is not a state of {of}: {type(error).__name__}: {error}") from error


def column_state(buffer: InfiniteLookbackBuffer, name: str) -> dict[str, Any]:
    """Return the state of a buffer; the name is for messages."""
    rows = buffer.rows.arrays
    data = None if rows is None else list(rows[0]) if buffer.is_untyped else buffer.rows.pack(rows)
    return {
        "data": None if data is None else encoded(data, name),
        "lookback": buffer.lookback,
        "finalized": buffer.finalized,
        "space": _space_state(buffer.space),
        "untyped": buffer.is_untyped,
    }


def restore_column(buffer: Restored, state: Mapping[str, Any]) -> Restored:
    """Give an empty buffer a state, and return it."""
    data, untyped = decoded(state["data"]), buffer.is_untyped
    if state.get("untyped", untyped) != untyped:
        raise FormatError(f"a state of {'typed' if untyped else 'untyped'} rows, expected the other kind.")
    buffer.space = _space(state["space"])
    if data is not None:
        buffer.rows = Columns(as_objects(data) if untyped else batched(data, "state"), untyped=untyped)
    buffer.lookback = min(integer("lookback", state["lookback"], minimum=0), buffer.rows.size)
    buffer.finalized = bool(state["finalized"])
    return buffer


def _space_state(space: Any) -> Any:
    if space is None:
        return None
    kind = type(space).__name__
    if kind == "Dict":
        return {kind: [[encoded(key), _space_state(part)] for key, part in space.spaces.items()]}
    if kind == "Tuple":
        return {kind: [_space_state(part) for part in space.spaces]}
    if kind not in _SPACES:
        raise StructureError(f"spaces in a state must be {', '.join(_SPACES)}, Dict or Tuple, got {kind}.")
    values = {argument: getattr(space, name) for argument, name in _SPACES[kind].items() if hasattr(space, name)}
    if "dtype" in values:
        values["dtype"] = np.dtype(values["dtype"]).str
        if kind == "Discrete" and values["dtype"] == np.dtype(np.int64).str:
            del values["dtype"]  # the only one of old releases, where it is no argument
    return {
        kind: encoded(
            {argument: value.item() if isinstance(value, np.generic) else value for argument, value in values.items()}
        )
    }


def _space(state: Any) -> Any:
    if state is None:
        return None
    with needs("An episode with spaces", "reverb-writer[gymnasium]"):
        spaces = importlib.import_module("gymnasium.spaces")
    ((kind, content),) = state.items()
    if kind == "Dict":
        return spaces.Dict([(decoded(key), _space(part)) for key, part in content])
    if kind == "Tuple":
        return spaces.Tuple([_space(part) for part in content])
    values = decoded(content)
    if kind not in _SPACES or not values.keys() <= _SPACES[kind].keys():
        raise FormatError(f"{kind!r} with {sorted(values)} is not a space that a state can have.")
    return getattr(spaces, kind)(**values)
