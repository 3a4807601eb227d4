"""Priorities that are functions of the window.

A chunk is compressed once it is full, so a function of the window needs the last L steps kept
for it. All functions are asked before the step that completes their windows is taken, so that one that fails, or gives
no number, changes nothing.
"""

from __future__ import annotations

import collections
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority
from reverb_writer.errors import SpecError
from reverb_writer.windows import WindowSpec

Priority = float | Callable[..., float] | Literal["max"]
"""A number, finite and >= 0; a function that makes one of a window, a nest of arrays [L, ...]; or "max".

A function with a parameter `mask` gets it by name: [L] bool, True for real steps and False for padding. "max" is the
largest priority that this process has set in the table; see `reverb_writer.client.largest_priorities`.
"""


@dataclass(frozen=True)
class EpisodeEnd:
    """How an episode ends, for each kind of window."""

    num_steps: int  # steps of the episode, without padding
    num_padding: list[int]  # padding steps that follow the last step
    closing: list[tuple[int, int] | None]  # the window (start, stop) that is added off the rule, or None
    dropped: dict[str, int]  # steps that no window of a kind holds, by reason, summed over the kinds


@dataclass
class PricedStep:
    """A copy of a step that is not appended yet, and the priorities of the windows that it completes."""

    number: int  # of the step in its episode, from 1 on
    step: list[npt.NDArray[Any]] | None  # its leaves; None if the episode ends after a step that was appended before
    # by the kind of window and the step count at which it is complete
    priorities: dict[tuple[int, int], float] = field(default_factory=dict)


class WindowPriorities:
    """Ask functions for the priorities of windows, and keep the answers until the windows are written.

    Steps are kept with their numbers. If a call was interrupted before its writer appended the step, the next call
    forgets that step.

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
        self._take_mask = [callable(asked) and _takes_mask(asked) for asked in functions]
        self._specs = list(specs)
        self._padding_step = list(padding_step)
        self._pack = pack
        lengths = [spec.sequence_length for spec, asked in zip(specs, functions, strict=True) if callable(asked)]
        # One more than a window has, for a step that is not appended after all.
        bound = None if None in lengths else 1 + max(length for length in lengths if length is not None)
        self.history: collections.deque[tuple[int, list[npt.NDArray[Any]]]] = collections.deque(maxlen=bound)
        self._known: dict[tuple[int, int], float] = {}

    def evaluate(self, leaves: Sequence[Any] | None, n: int, end: EpisodeEnd | None) -> PricedStep:
        """Ask for the priorities of the windows that step `n` with these `leaves`, and the episode's end, complete."""
        priced = PricedStep(n, None if leaves is None else [_copy(leaf) for leaf in leaves])
        self._keep(n - (leaves is not None))
        if end is None and not any(map(callable, self._complete_at(n))):
            return priced
        steps = [*(step for _, step in self.history), *([] if priced.step is None else [priced.step])]
        for i, spec in enumerate(self._specs):
            if not callable(self.functions[i]):
                continue
            if priced.step is not None and spec.ends(n - 1, n):
                priced.priorities[i, n] = self._ask(i, steps, spec.sequence_length, n)
            if end is not None:
                padded = [*steps, *itertools.repeat(self._padding_step, end.num_padding[i])]
                for count in spec.ends(n, n + end.num_padding[i]):
                    window_steps = padded[: len(steps) + count - n]
                    priced.priorities[i, count] = self._ask(i, window_steps, spec.sequence_length, count, count - n)
                if (window := end.closing[i]) is not None:
                    priced.priorities[i, n] = self._ask(i, steps, window[1] - window[0], n)
        return priced

    def _complete_at(self, n: int) -> list[Priority]:
        """Return the priorities of the kinds that have a window which ends at step count `n`."""
        return [asked for spec, asked in zip(self._specs, self.functions, strict=True) if spec.ends(n - 1, n)]

    def commit(self, priced: PricedStep) -> None:
        """Keep the step and its priorities: it is appended."""
        if priced.step is not None:
            self._keep(priced.number - 1)
            self.history.append((priced.number, priced.step))
        self._known.update(priced.priorities)

    def take_over(self, before: WindowPriorities | None, num_steps: int) -> None:
        """Go on in the middle of an episode of `num_steps` steps, with those that `before` has kept."""
        kept = [] if before is None else [(n, step) for n, step in before.history if n <= num_steps]
        needed = num_steps if self.history.maxlen is None else min(num_steps, self.history.maxlen - 1)
        if len(kept) < needed:
            raise SpecError(
                "`priority` can become a function between episodes only: it would need the last "
                f"{needed} steps of this one, and {len(kept)} were kept. Call `reset` first."
            )
        self.history.extend(kept)

    def known(self, index: int, ends: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the priorities of the windows of one kind that end at these step counts."""
        return np.array([self._known[index, end] for end in ends], np.float64)

    def forget(self, upto: int) -> None:
        """Forget the priorities of windows that end at or before a step count; they are written."""
        self._known = {(index, end): found for (index, end), found in self._known.items() if end > upto}

    def clear(self) -> None:
        """Forget the episode."""
        self.history.clear()
        self._known.clear()

    def _keep(self, num_steps: int) -> None:
        """Forget steps after so many of the episode."""
        while self.history and self.history[-1][0] > num_steps:
            self.history.pop()

    def _ask(
        self, index: int, steps: Sequence[Sequence[Any]], length: int | None, end: int, num_padding: int = 0
    ) -> float:
        """Ask for the priority of the last steps, so many of them padding."""
        function = self.functions[index]
        assert callable(function)  # noqa: S101  # only asked for those
        window_steps = steps if length is None else steps[-length:]
        window = self._pack([np.stack(column) for column in zip(*window_steps, strict=True)])
        if self._take_mask[index]:
            num_real = len(window_steps) - num_padding
            priority = function(window, mask=np.arange(len(window_steps)) < num_real)
        else:
            priority = function(window)
        try:
            return check_priority(priority)
        except SpecError as error:
            raise SpecError(f"{error} The function gave it for the window that ends at step {end}.") from None


def _takes_mask(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `mask`; what is written in C may not tell its parameters."""
    try:
        return "mask" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _copy(leaf: Any) -> npt.NDArray[Any]:
    return np.array(leaf, object if isinstance(leaf, bytes) else None)
