"""Priorities of windows: numbers, functions of the window, and "max".

The sender asks a function when it encodes the window, in its own thread, under no lock, and never two at a time. A
function that raises or gives no number loses its window: the window is counted, and the first one is logged.
"""

from __future__ import annotations

import collections
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import check_priority

if TYPE_CHECKING:
    from reverb_writer.writing.chunk_encoder import Chunk
    from reverb_writer.writing.open_episode import Ready
    from reverb_writer.writing.window_targets import WindowTarget

_LOG = logging.getLogger(__package__)

Priority = float | Callable[..., float] | Literal["max"]
"""A number, finite and >= 0; a function that makes one of a window, a nest of arrays [L, ...]; or "max".

A function with a parameter `mask` gets it by name: [L] bool, True for real steps and False for padding. "max" is the
largest priority that this process has set so far in the tables, 1.0 before it has set any.
"""


class WindowPriorities:
    """Gives windows their priorities. Not thread-safe: only the sender uses it."""

    def __init__(
        self,
        pack: Callable[[Sequence[Any]], Any],
        largest: Callable[[Sequence[str]], float],
        counts: collections.Counter[str],
    ) -> None:
        """Prepare.

        Args:
            pack: makes the nest of a window's columns.
            largest: returns the largest priority set in some tables.
            counts: is raised by the items that are lost because their function failed.
        """
        self._pack, self._largest, self._counts = pack, largest, counts

    def of(
        self,
        target: WindowTarget,
        of: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        episodes: Sequence[Ready],
    ) -> npt.NDArray[np.float64]:
        """Return the priorities of windows of one kind; NaN for those whose function failed.

        Args:
            target: the kind.
            of: number of each window's episode.
            starts: first step of each window.
            ends: step after the last one of each window.
            episodes: with chunks that hold all steps of the windows, and their columns if the priority is a function.
        """
        if not callable(target.priority):
            number = self._largest(target.tables) if target.priority == "max" else target.priority
            return np.full(len(ends), number, np.float64)
        takes_mask = _takes_mask(target.priority)
        found = np.full(len(ends), np.nan)
        for i, (number, start, end) in enumerate(zip(of.tolist(), starts.tolist(), ends.tolist(), strict=True)):
            window = self._pack(_columns(episodes[number].episode.chunks, start, end))
            mask = {"mask": np.arange(start, end) < episodes[number].num_steps} if takes_mask else {}
            try:
                found[i] = check_priority(target.priority(window, **mask))
            except Exception:  # noqa: BLE001  # a user's function may raise anything, and the sender goes on
                self._counts["failed_priorities"] += len(target.tables)
                if self._counts["failed_priorities"] == len(target.tables):
                    _LOG.exception(
                        "A window is lost because its `priority` function failed, or gave no finite number >= 0. "
                        "Further ones are counted in stats().failed_priorities."
                    )
        return found


def _columns(chunks: Sequence[Chunk], start: int, end: int) -> list[npt.NDArray[Any]]:
    """Return the columns [end - start, ...] of some steps, owned by the caller."""
    parts = [
        [column[max(start - chunk.start, 0) : end - chunk.start] for column in chunk.columns or ()]
        for chunk in chunks
        if chunk.start < end and chunk.stop > start
    ]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _takes_mask(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter `mask`; what is written in C may not tell its parameters."""
    try:
        return "mask" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
