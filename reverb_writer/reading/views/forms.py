"""Forms of a batch: transitions, the arrays of a framework, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reverb_writer.nests import map_present
from reverb_writer.slices.batch import Batch
from reverb_writer.transitions import NStepTransitions

Form = tuple[Callable[[Any], Any], ...]
"""Functions of a batch, each of the result of the one before it. Forms are equal if they give equal results."""


def in_form(batch: Any, form: Form) -> Any:
    """Return a batch in a form."""
    for function in form:
        batch = function(batch)
    return batch


def converted(found: Any, convert: Callable[[Any], Any], convert_info: Callable[[Any], Any] | None = None) -> Any:
    """Return a batch, transitions or a nest with converted arrays; None stays None.

    `convert_info` converts the arrays of the info of a batch, None keeps them. The batch of transitions keeps its data,
    because the transitions have them.
    """
    if isinstance(found, Batch):
        return found.map_arrays(convert, convert_info)
    result = map_present(convert, found)
    if isinstance(found, NStepTransitions) and found.batch is not None:
        result.batch = found.batch.map_arrays(lambda array: array, convert_info)
    return result
