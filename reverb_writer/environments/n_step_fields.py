"""What n-step transforms read of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.steps import BOUNDARY_MARKS

_NEEDED = ("observation", "action", "reward", "discount")
_MARKERS = frozenset({"step_type", "next_step_type", "is_first", "is_last", "is_terminal", "terminated", "truncated"})


def as_step(step: Any) -> dict[str, Any]:
    """Return the fields of a step."""
    fields = step._asdict() if hasattr(step, "_asdict") else step
    missing = [name for name in _NEEDED if not isinstance(fields, Mapping) or name not in fields]
    if missing:
        raise StructureError(f"a step for n-step transitions has no {missing}; it needs {[*_NEEDED]}.")
    return dict(fields)


def is_boundary(fields: Mapping[str, Any]) -> Any:
    """Return whether a step is the last of its episode, as it says: a flag, or [N] flags."""
    for name, last in BOUNDARY_MARKS:
        if name in fields:
            return np.asarray(fields[name]) == last
    raise StructureError("a step for n-step transitions needs `is_last` or `step_type`, or pass `end_of_episode`.")


def without_markers(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that go with a transition."""
    return {name: value for name, value in fields.items() if name not in _MARKERS}
