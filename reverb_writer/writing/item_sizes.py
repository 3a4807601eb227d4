"""How large the windows of an observer are, uncompressed, and whether their tables take such items.

Windows of a fixed length without strings have a size that is known before the first step. Of whole episodes, and of
strings, the bytes are counted step by step.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reverb_writer.client.item_limits import column_bytes, too_large
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.window_targets import WindowTarget


class _Kind(NamedTuple):
    """Windows that have a limit."""

    length: int | None  # steps of each; None for the whole episode
    table: str  # the one with the smallest limit
    limit: int  # in bytes


class ItemSizes:
    """The sizes of the windows of some kinds.

    Immutable; safe to share between threads.
    """

    def __init__(self, layout: StepLayout, targets: Sequence[WindowTarget], limits: Mapping[str, int]) -> None:
        """Check what is known before the first step, against the tables' limits of `max_item_bytes`.

        Raises:
            StructureError: a window is larger than a table allows; names its largest leaf.
        """
        self.paths = layout.paths  # of the columns
        self.watched: list[_Kind] = []  # the kinds whose steps must be counted
        has_strings = np.dtype(object) in layout.dtypes
        self._step_bytes = [
            0 if dtype == np.dtype(object) else dtype.itemsize * math.prod(shape)
            for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
        ]
        for target in targets:
            found = [(limits[table], table) for table in target.tables if table in limits]
            if not found:
                continue
            limit, table = min(found)
            length = target.spec.sequence_length
            _check(table, limit, length or 1, self.paths, [(length or 1) * size for size in self._step_bytes])
            if length is None or has_strings:
                self.watched.append(_Kind(length, table, limit))

    def watch(self) -> EpisodeSizes | None:
        """Return what counts the steps of one writer; None if nothing need be counted."""
        return EpisodeSizes(self.paths, self._step_bytes, self.watched) if self.watched else None


class EpisodeSizes:
    """Counts the bytes of the steps of one writer's episode. Not thread-safe: the writer holds a lock."""

    def __init__(self, paths: Sequence[str], step_bytes: Sequence[int], watched: Sequence[_Kind]) -> None:
        """Begin with an empty episode; `step_bytes` are those of each leaf, 0 where they must be counted."""
        self._paths, self._step_bytes, self._watched = paths, step_bytes, watched
        longest = max((kind.length or 0) for kind in watched)
        # The bytes of each column up to a step, of the steps that a window of fixed length may begin at.
        self._totals: collections.deque[tuple[int, list[int]]] = collections.deque(maxlen=longest + 2)

    def check(self, leaves: Sequence[Any], num_steps: int) -> None:
        """Count a step, which becomes step number `num_steps` of the episode unless this raises.

        A step that is counted again replaces what was counted under its number before.

        Raises:
            StructureError: a window with it would be larger than a table allows.
        """
        totals = self._totals
        if num_steps == 1:
            totals.clear()
            totals.append((0, [0] * len(self._paths)))
        while totals[-1][0] >= num_steps:
            totals.pop()
        total = [
            before + (size or column_bytes(leaf))
            for before, size, leaf in zip(totals[-1][1], self._step_bytes, leaves, strict=True)
        ]
        for kind in self._watched:
            begin = 0 if kind.length is None else max(0, num_steps - kind.length)
            before = next((of_step for number, of_step in totals if number == begin), None)
            sizes = total if before is None or not begin else [a - b for a, b in zip(total, before, strict=True)]
            _check(kind.table, kind.limit, num_steps - begin, self._paths, sizes)
        totals.append((num_steps, total))


def _check(table: str, limit: int, num_steps: int, paths: Sequence[str], sizes: Sequence[int]) -> None:
    if sum(sizes) > limit:
        raise too_large(table, limit, f"an item of {num_steps} steps", paths, sizes)
