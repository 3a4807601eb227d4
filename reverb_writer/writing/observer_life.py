"""The life of an observer: its windows, its counters of steps, and the sender that begins with the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from reverb_writer.arguments import integer, options_of
from reverb_writer.steps import StepStructure
from reverb_writer.writing.cutter import window_source
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.step_kinds import StepKinds
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_life import Connect, StreamLife
from reverb_writer.writing.stream_options import ObserverStats, StreamKeywords, StreamOptions
from reverb_writer.writing.window_target import WindowTarget


class ObserverLife(StreamLife):
    """An observer without methods that take steps. A context manager."""

    _name: ClassVar[str] = "observer"
    _spans_episodes = False
    _max_steps: int | None = None  # of an episode; None for no bound
    _bypass = False  # whether a longer episode is dropped without an error
    _options: StreamOptions

    def __init__(
        self,
        replay: Any,
        connect: Connect,
        target: WindowTarget,
        *,
        spec: Any,
        num_envs: int | None,
        options: StreamKeywords,
    ) -> None:
        """Find the tables; the observers document the arguments."""
        self._target = target
        self._num_envs = None if num_envs is None else integer("num_envs", num_envs, minimum=1)
        self._all_envs = np.arange(1 if self._num_envs is None else self._num_envs)
        self._structure: StepStructure | None = None
        self._woken_for: tuple[float, float] | None = None
        self._num_before = 0  # steps before the sender's first, for messages
        self._thread: int | None = None  # the thread of the open episode
        self._is_marked = self._spans_episodes or self._max_steps is not None  # whether ends of episodes are known
        self._unmarked_steps = self._unknown_ends = 0
        super().__init__(replay, connect, target.tables, options_of(StreamOptions, options, self))
        if spec is not None:
            self._start(spec, is_spec=True)

    @property
    def num_envs(self) -> int | None:
        """Number of environments that step together; None if steps have no batch dimension."""
        return self._num_envs

    @property
    def num_steps(self) -> int:
        """Steps taken so far, in all environments. After an interrupt, it shows whether the call took its step."""
        sender = self._sender
        return self._last_stats.steps if sender is None else self._num_before + sender.ring.head[0]

    def stats(self) -> ObserverStats:
        """Return the counters so far, from any thread."""
        return replace(
            super().stats(),
            unmarked_steps=self._unmarked_steps,
            unknown_ends=self._unknown_ends,
        )

    def _stats_now(self) -> ObserverStats:
        stats = super()._stats_now()
        return stats if self._sender is None else replace(stats, steps=self.num_steps)

    def _counts_text(self, stats: ObserverStats) -> str:
        return f"{stats.steps} steps, {super()._counts_text(stats)}"

    def _start(self, example: Any, *, is_spec: bool = False) -> Sender:
        """Take the layout from the first step or a spec, and make the sender. Asks no server."""
        connection, options, target = self._check(None), self._options, self._target
        structure = self._structure
        if structure is None:
            structure = StepStructure(example, batch_size=self._num_envs, is_spec=is_spec)
        kinds = StepKinds(structure, options.last_row)
        layout = StepLayout(structure, store_flags=options.store_flags)
        layout.check(target, self._signatures)
        source = window_source(
            layout,
            target,
            options,
            self._new_books(),
            connection.largest_priority,
            num_envs=self._num_envs,
        )
        sender = self._launch(connection, source)
        self._fitting, self._convert, self._kinds = structure.fitting, structure.convert, kinds
        self._is_marked = self._is_marked or kinds.marks_ends
        self._num_before = self._last_stats.steps
        self._structure, self._woken_for, self._sender = structure, None, sender
        return sender
