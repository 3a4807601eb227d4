"""Priorities that are functions of the window.

A chunk is compressed once it is full, so whoever asks a function for a window's priority must keep the last L steps
for it. All functions are asked before the step that completes their windows is taken, so that one that fails, or gives
no number, changes nothing.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import SpecError
from reverb_writer.windowing import WindowSpec

__all__ = ["Ending", "Priority", "StepPlan", "WindowPriorities", "check_priority"]

Priority = float | Callable[[Any], float]
"""A number, finite and >= 0, or a function that makes one of a window: a nest of arrays [L, ...]."""


def check_priority(priority: Any) -> float:
    """Return a priority as a float.

    Raises:
        SpecError: it is no number, NaN, infinite or negative.

    >>> check_priority(-1)
    Traceback (most recent call last):
    reverb_writer.errors.SpecError: `priority` must be a finite number >= 0, got -1.
    """
    try:
        number = math.nan if isinstance(priority, str | bytes) else float(priority)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise SpecError(f"`priority` must be a finite number >= 0, got {priority!r}.")
    return number


@dataclass(frozen=True)
class Ending:
    """How an episode ends, for each kind of window.

    Attributes:
        num_padding: padding steps that follow the last step.
        closing: the window (start, stop) that is added off the rule, or None.
        dropped: steps that no window of a kind holds, by reason, summed over the kinds.
    """

    num_padding: list[int]
    closing: list[tuple[int, int] | None]
    dropped: dict[str, int]


@dataclass
class StepPlan:
    """A step, copied, and the priorities of the windows that it completes, by kind and end; not taken yet."""

    step: list[npt.NDArray[Any]] | None
    found: dict[tuple[int, int], float] = field(default_factory=dict)


class WindowPriorities:
    """Ask functions for the priorities of windows, and keep the answers until the windows are written.

    Not thread-safe: its writer holds a lock.
    """

    def __init__(
        self,
        specs: Sequence[WindowSpec],
        functions: Sequence[Priority],
        padding_step: Sequence[Any],
        pack: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Start with an empty episode; constants among the `functions` are never asked."""
        self.functions = list(functions)
        self._specs = list(specs)
        self._pads = list(padding_step)
        self._pack = pack
        lengths = [spec.sequence_length for spec, asked in zip(specs, functions, strict=True) if callable(asked)]
        bound = None if None in lengths else max(length for length in lengths if length is not None)
        self._history: collections.deque[list[npt.NDArray[Any]]] = collections.deque(maxlen=bound)
        self._known: dict[tuple[int, int], float] = {}

    def plan(self, leaves: Sequence[Any] | None, n: int, ending: Ending | None) -> StepPlan:
        """Ask for the windows that end at step count `n`, with `leaves` as its last step, and at the episode's end.

        Raises:
            SpecError: a function gave no finite number >= 0. Whatever else it raises goes through.
        """
        plan = StepPlan(None if leaves is None else [_copy(leaf) for leaf in leaves])
        if ending is None and not any(map(callable, self._due(n))):
            return plan
        steps = [*self._history, *([] if plan.step is None else [plan.step])]
        for i, spec in enumerate(self._specs):
            if not callable(self.functions[i]):
                continue
            if plan.step is not None and spec.ends(n - 1, n):
                plan.found[i, n] = self._ask(i, steps, spec.sequence_length, n)
            if ending is not None:
                padded = [*steps, *itertools.repeat(self._pads, ending.num_padding[i])]
                for end in spec.ends(n, n + ending.num_padding[i]):
                    plan.found[i, end] = self._ask(i, padded[: len(steps) + end - n], spec.sequence_length, end)
                if (window := ending.closing[i]) is not None:
                    plan.found[i, n] = self._ask(i, steps, window[1] - window[0], n)
        return plan

    def _due(self, n: int) -> list[Priority]:
        """Return the priorities of the kinds that have a window which ends at step count `n`."""
        return [asked for spec, asked in zip(self._specs, self.functions, strict=True) if spec.ends(n - 1, n)]

    def commit(self, plan: StepPlan) -> None:
        """Take the step and the answers of a plan."""
        if plan.step is not None:
            self._history.append(plan.step)
        self._known.update(plan.found)

    def take(self, index: int, ends: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return, and forget, the priorities of the windows of one kind that end at these step counts."""
        return np.array([self._known.pop((index, end)) for end in ends], np.float64)

    def clear(self) -> None:
        """Forget the episode."""
        self._history.clear()
        self._known.clear()

    def _ask(self, index: int, steps: Sequence[Sequence[Any]], length: int | None, end: int) -> float:
        function = self.functions[index]
        assert callable(function)  # noqa: S101  # only asked for those
        columns = zip(*(steps if length is None else steps[-length:]), strict=True)
        priority = function(self._pack([np.stack(column) for column in columns]))
        try:
            return check_priority(priority)
        except SpecError as error:
            raise SpecError(f"{error} The function gave it for the window that ends at step {end}.") from None


def _copy(leaf: Any) -> npt.NDArray[Any]:
    return np.array(leaf, object if isinstance(leaf, bytes) else None)
