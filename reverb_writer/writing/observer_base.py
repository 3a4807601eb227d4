"""What observers are made of: their life, and the way of one step."""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import check_timeout
from reverb_writer.episodes import Episode
from reverb_writer.errors import ReverbWriterError, SpecError
from reverb_writer.nests import common_length, rows
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.steps import StepStructure
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.session import Columns, ObserverStats, StreamOptions, WriteSession
from reverb_writer.writing.window_targets import WindowTarget, can_align

__all__ = ["Observer", "SingleObserver", "columns_of", "packer", "spec_of"]

_LOG = logging.getLogger("reverb_writer")

_LEAVE_S = 2.0
"""How long items are still delivered for when an error is under way, seconds."""


class Observer:
    """The life of an observer: open, flush, close, counters. What it does with a step is its own."""

    def __init__(self, client: Any, targets: Sequence[WindowTarget], *, mask: bool, options: StreamOptions) -> None:
        """Open the session; see the observers for the arguments."""
        self._session = WriteSession(client, targets, options)
        self._mask = mask
        self._structure: StepStructure | None = None
        self._num_before = 0  # steps before the writer's first, for messages

    @property
    def client(self) -> Any:
        """The client, as it was given."""
        return self._session.given_client

    def flush(self, timeout_s: float | None = None) -> None:
        """Return when all windows that are complete are confirmed by the server.

        Args:
            timeout_s: seconds to wait at most; None to wait as a step does, for the observer's time-out from the last
                progress.

        Raises:
            ReplayTimeoutError: not in time; names the cause with its numbers. Nothing is lost by it.
            ServerUnavailableError: likewise, and the server is gone.
        """
        self._session.flush(timeout_s)

    def open(self) -> None:
        """Open the observer again after `close()`; does nothing if it is open.

        Raises:
            StructureError: a table is not there any more.
            ServerUnavailableError: no server answers.
        """
        self._session.open()

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver the windows that are complete, and end. Steps that are in none are counted as dropped. Idempotent.

        Args:
            timeout_s: seconds to wait at most; None for the observer's.

        Raises:
            ReplayTimeoutError: items were left; says how many and why. The observer is closed all the same.
            ServerUnavailableError: likewise, and the server is gone.
        """
        timeout_s = self._session.timeout_s if timeout_s is None else check_timeout(timeout_s)
        try:
            if not self._session.is_forked:
                self._end_all()
                self._session.send()
        except BaseException:
            self._leave(timeout_s)
            raise
        self._session.close(timeout_s)

    def stats(self) -> ObserverStats:
        """Return the counters so far; callable from any thread."""
        return self._session.stats()

    def __enter__(self) -> Any:
        """Return the observer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close; while an error is under way within two seconds, and what is left then is only logged."""
        self.close() if error is None else self._leave(self._session.timeout_s)

    def _leave(self, timeout_s: float) -> None:
        """Close soon, for an error is under way."""
        try:
            if not self._session.is_forked:
                self._end_all()
        finally:
            try:
                self._session.close(min(timeout_s, _LEAVE_S))
            except ReverbWriterError as left:
                _LOG.error("While another error was under way, the observer could not deliver all items: %s", left)

    def _end_all(self) -> None:
        """End all episodes, with nothing written but the windows that are complete, and let go of the writers."""
        raise NotImplementedError


class SingleObserver(Observer):
    """An observer of one stream of steps."""

    _spans_episodes = False

    def __init__(
        self, client: Any, targets: Sequence[WindowTarget], *, spec: Any, mask: bool, options: StreamOptions
    ) -> None:
        """Open the session, and make the writer if it is known what steps look like."""
        super().__init__(client, targets, mask=mask, options=options)
        self._writer: SequenceWriter | None = None
        if spec is not None:
            self._start(spec)

    def extend(self, steps: Any) -> None:
        """Write steps of an episode that goes on after them, as so many calls with `end_of_episode=False` would.

        Args:
            steps: nest with leaves [T, ...]; copied.

        Raises:
            StructureError, ReplayTimeoutError, ClosedError: as for a call; the steps before are written. None is if the
                leaves differ in T.
        """
        session = self._session
        leaves = [np.asarray(leaf) for leaf in tree.flatten(steps)]
        num_steps, at = common_length(leaves, "`steps`"), 0
        if self._writer is None and num_steps:
            session.wait_for_room()
            self._start(tree.map_structure(lambda leaf: leaf[0], steps))
        if self._takes_at_once(steps, leaves):
            columns = [*leaves, *([np.ones(num_steps, bool)] if self._mask else [])]
            while at < num_steps:
                session.wait_for_room()
                assert self._writer is not None  # noqa: S101  # it was started
                count = self._writer.extend([column[at:] for column in columns])
                if count is None:
                    break
                at += count
        for step in rows(steps, [leaf[at:] for leaf in leaves]):
            self(step, end_of_episode=False)

    def _takes_at_once(self, steps: Any, leaves: Sequence[Any]) -> bool:
        """Return whether these steps are such as need not be looked at one by one."""
        structure = self._structure
        if structure is None:
            return False
        try:
            tree.assert_same_structure(steps, structure.example)
        except (TypeError, ValueError):
            return False
        num_steps = len(leaves[0])
        expected = [
            (dtype, (num_steps, *shape)) for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)
        ]
        return np.dtype(object) not in structure.dtypes and [(leaf.dtype, leaf.shape) for leaf in leaves] == expected

    def __call__(self, step: Any, *, end_of_episode: bool | None = None) -> None:
        """Write a step.

        Args:
            step: a `Trajectory`, or any nest; copied. No batch dimension.
            end_of_episode: whether it is the last of its episode; None to read `step_type` or `is_last`.

        Raises:
            StructureError: a leaf differs from the first step's; named by path. Nothing changed.
            ReplayTimeoutError: no room in flight, and nothing moved for the time-out; names the cause. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
        """
        session, structure, writer = self._session, self._structure, self._writer
        if structure is None or writer is None or writer.stream.blocked:
            session.wait_for_room()
        if structure is None or writer is None:
            structure, writer = self._start(step)
        leaves = structure.flatten(step, self._num_before + writer.total_steps)
        last = structure.ends_episode(leaves) if end_of_episode is None else bool(end_of_episode)
        if self._mask:
            leaves = [*leaves, np.True_]
        dropped = writer.append(leaves, last=last)
        if dropped:
            session.tell(dropped)

    def write_episode(self, episode: Episode) -> None:
        """Write a whole episode, or a chunk that was cut, as if its steps had come one by one.

        Its steps are those of `Episode.steps`, the last of which ends the episode here.

        Args:
            episode: one of a step at least.

        Raises:
            IncompleteError: it has no step.
            SpecError: the observer is in the middle of another episode, or the episode is too long for it. Nothing
                changed.
            StructureError: its steps are not as those before. Nothing changed.
            ReplayTimeoutError: no room in flight, and nothing moved for the time-out. Windows that were complete by
                then stay written, the rest of the episode is not.
        """
        steps = episode.steps()
        if self._writer is not None:
            self._writer.finish_pending()
        if not self._spans_episodes and self._writer is not None and self._writer.num_steps:
            raise SpecError(
                f"the observer is in the middle of an episode, at step {self._writer.num_steps}. Call `reset` first."
            )
        try:
            self.extend(tree.map_structure(lambda leaf: leaf[:-1], steps))
            self(tree.map_structure(lambda leaf: leaf[-1], steps), end_of_episode=True)
        except BaseException:
            self._end_episode(discard=True)
            raise

    def _end_all(self) -> None:
        self._end_episode(discard=True)
        self._writer = None

    def _start(self, example: Any) -> tuple[StepStructure, SequenceWriter]:
        """Make the writer, at the first step or of a spec."""
        structure = self._structure or StepStructure(example)
        columns = columns_of(structure, self._mask)
        self._session.check_columns(columns)
        self._session.store_spec(spec_of(structure, self._mask))
        options = self._session.options
        writer = SequenceWriter(
            self._session.stream,
            columns.dtypes,
            columns.shapes,
            self._session.targets,
            padding_step=[*structure.padding_step(), *([np.False_] if self._mask else [])],
            pack=packer(structure, self._mask),
            chunk_length=options.chunk_length,
            spans_episodes=self._spans_episodes,
        )
        self._num_before = self._session.num_steps
        self._session.add_writer(writer)
        self._structure, self._writer = structure, writer
        return structure, writer

    def _end_episode(self, *, align: bool = False, discard: bool = False) -> None:
        if self._writer is not None:
            self._session.tell(self._writer.end_episode(align=align, discard=discard))

    def _reset(self, write_cached_steps: bool) -> None:
        self._session.stream.check()
        writer, targets = self._writer, self._session.targets
        if writer is None:
            return
        writer.finish_pending()
        if not writer.num_steps:
            return
        if write_cached_steps and not writer.num_skipped and not can_align(targets, writer.num_steps):
            length = min(target.spec.sequence_length or 1 for target in targets)
            raise SpecError(
                "write_cached_steps is True, but not enough steps remain in the cache to write an item with "
                f"sequence_length={length}, consider enabling pad_end_of_episodes."
            )
        self._session.wait_for_room()
        self._end_episode(align=write_cached_steps, discard=not write_cached_steps)


def columns_of(structure: StepStructure, mask: bool) -> Columns:
    """Return what is written of a step: its leaves, and the mask after them."""
    if not mask:
        return Columns(structure.paths, structure.dtypes, structure.shapes)
    return Columns((*structure.paths, "mask"), (*structure.dtypes, np.dtype(bool)), (*structure.shapes, ()))


def spec_of(structure: StepStructure, mask: bool) -> Any:
    """Return the nest of what is written of a step: the step, or a pair of the step and the mask."""
    spec = structure.pack(list(map(ArraySpec, structure.shapes, structure.dtypes)))
    return (spec, ArraySpec((), np.dtype(bool))) if mask else spec


def packer(structure: StepStructure, mask: bool) -> Any:
    """Return what makes the nest of a window, the mask left out."""
    return (lambda leaves: structure.pack(leaves[:-1])) if mask else structure.pack
