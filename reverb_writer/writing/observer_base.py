"""Base classes of observers: lifecycle, and the path of one step."""

from __future__ import annotations

import logging
import types
import weakref
from collections.abc import Sequence
from typing import Any, Generic

import numpy as np
import tree

from reverb_writer.arguments import check_timeout
from reverb_writer.episodes import Episode
from reverb_writer.errors import ReverbWriterError, SpecError
from reverb_writer.nests import common_length, rows
from reverb_writer.steps import StepStructure
from reverb_writer.writing.actor_shard import ShardChangedError
from reverb_writer.writing.observer_stats import AnyWriter, ObserverStats
from reverb_writer.writing.sequence_writer import SequenceWriter
from reverb_writer.writing.session import WriteSession
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import StreamOptions
from reverb_writer.writing.window_targets import WindowTarget, can_align

_LOG = logging.getLogger(__package__)

_LEAVE_S = 2.0
"""How long items are still delivered for when an error is under way, seconds."""


class TooFewStepsError(SpecError):
    """A reset should write the steps of an episode that is shorter than a window.

    Attributes:
        sequence_length: steps of the shortest kind of window.
    """

    def __init__(self, num_steps: int, sequence_length: int) -> None:
        """Say how many steps there are."""
        super().__init__(
            f"the episode has {num_steps} steps, expected at least `sequence_length`={sequence_length} to write it. "
            'Call `reset(discard=True)`, or choose an `end_of_episode` that pads, such as "pad".'
        )
        self.sequence_length = sequence_length


class Observer(Generic[AnyWriter]):
    """Lifecycle of an observer: open, flush, close, counters. Subclasses define what a step does."""

    _num_envs: int | None = None

    def __init__(self, client: Any, targets: Sequence[WindowTarget], *, mask: bool, options: StreamOptions) -> None:
        """Open the session; see the observers for the arguments."""
        self._session: WriteSession[AnyWriter] = WriteSession(client, targets, options)
        self._mask = mask
        self._layout: StepLayout | None = None
        self._num_before = 0  # steps before the writer's first, for messages

    def _register(self, example: Any, *, is_spec: bool = False) -> StepLayout:
        """Take the layout from the first step or a spec, and check it against the tables."""
        layout = self._layout
        if layout is None:
            structure = StepStructure(example, batch_size=self._num_envs, is_spec=is_spec)
            layout = StepLayout(structure, mask=self._mask)
        self._session.register(layout)
        return layout

    def _new_writer(self, layout: StepLayout, **options: Any) -> SequenceWriter:
        return SequenceWriter(
            self._session.stream,
            layout.dtypes,
            layout.shapes,
            self._session.targets,
            padding_step=layout.padding_step,
            pack=layout.pack,
            chunk_length=self._session.options.chunk_length,
            sizes=self._session.watch_sizes(),
            spec=layout.encoded_spec,
            **options,
        )

    @property
    def _writer(self) -> AnyWriter | None:
        return self._session.writer

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
            ServerUnavailableError: not in time, because the server is gone.
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
            ServerUnavailableError: items were left, because the server is gone.
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

    def __repr__(self) -> str:
        stats, tables = (
            self.stats(),
            ", ".join(dict.fromkeys(table for target in self._session.targets for table in target.tables)),
        )
        counts = f"{stats.steps} steps, {stats.items} items, {stats.pending_items} pending"
        return f"<{type(self).__name__} of {tables} at {self._session.address}: {counts}>"

    def __enter__(self) -> Any:
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
        """End all episodes and drop the writers; only windows that are complete are written."""
        raise NotImplementedError


class SingleObserver(Observer[SequenceWriter]):
    """An observer of one stream of steps."""

    _spans_episodes = False

    def __init__(
        self, client: Any, targets: Sequence[WindowTarget], *, spec: Any, mask: bool, options: StreamOptions
    ) -> None:
        """Open the session, and make the writer if it is known what steps look like."""
        super().__init__(client, targets, mask=mask, options=options)
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
        session.stream.check()
        if not num_steps:
            return
        if self._writer is None:
            session.wait_for_room()
            self._start(tree.map_structure(lambda leaf: leaf[0], steps))
        if self._fits_at_once(steps, leaves):
            assert self._writer is not None  # noqa: S101  # it was started
            assert self._layout is not None  # noqa: S101  # likewise
            columns = self._layout.with_mask(leaves, num_steps)
            while at < num_steps:
                try:
                    session.wait_for_room()
                except ShardChangedError:
                    self._start(tree.map_structure(lambda leaf: leaf[0], steps))
                count = self._writer.extend([column[at:] for column in columns])
                if count is None:
                    break
                at += count
        for step in rows(steps, [leaf[at:] for leaf in leaves]):
            self(step, end_of_episode=False)

    def _fits_at_once(self, steps: Any, leaves: Sequence[Any]) -> bool:
        """Return whether these steps need not be checked one by one."""
        layout = self._layout
        if layout is None:
            return False
        try:
            tree.assert_same_structure(steps, layout.structure.example)
        except (TypeError, ValueError):
            return False
        return layout.matches(leaves, len(leaves[0]))

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
        layout, writer = self._layout, self._session.writer
        if layout is None or writer is None:
            self._session.wait_for_room()
            layout, writer = self._start(step)
        leaves = layout.flatten(step, self._num_before + writer.total_steps)
        last = layout.structure.ends_episode(leaves) if end_of_episode is None else end_of_episode
        try:
            dropped = writer.append(leaves, last=bool(last))
        except ShardChangedError:
            dropped = self._start(step)[1].append(leaves, last=bool(last))
        if dropped:
            self._session.log_dropped(dropped)
        if last:
            self._session.change_shard()

    def write_episode(self, episode: Episode) -> None:
        """Write a whole episode, or a chunk that was cut, as if its steps had come one by one.

        Its steps are those of `Episode.steps`, the last of which ends the episode here.

        Args:
            episode: one of a step at least.

        Raises:
            IncompleteError: it has no step.
            SpecError: as `check_episode` raises. Nothing changed.
            StructureError: its steps are not as those before. Nothing changed.
            ReplayTimeoutError: no room in flight, and nothing moved for the time-out. Windows that were complete by
                then stay written, the rest of the episode is not.
        """
        steps = episode.steps()
        self.check_episode(episode)
        try:
            self.extend(tree.map_structure(lambda leaf: leaf[:-1], steps))
            self(tree.map_structure(lambda leaf: leaf[-1], steps), end_of_episode=True)
        except BaseException:
            self._end_episode(discard=True)
            raise

    def check_episode(self, episode: Episode) -> None:  # noqa: ARG002  # of the subclasses
        """Check whether `write_episode` could write `episode` now. Nothing is changed.

        Raises:
            SpecError: the observer is in the middle of another episode, or the episode is too long for it.
        """
        writer = self._writer
        if writer is not None:
            writer.finish_pending()
        if writer is not None and writer.num_steps and not self._spans_episodes:
            raise SpecError(
                f"the observer is in the middle of an episode, at step {writer.num_steps}. Call `reset` first."
            )

    def _end_all(self) -> None:
        self._end_episode(discard=True)
        self._session.writer = None

    def _start(self, example: Any) -> tuple[StepLayout, SequenceWriter]:
        """Make the writer, at the first step or from a spec."""
        layout = self._register(example)
        session = weakref.proxy(self._session)  # what closes a forgotten session holds its writers
        writer = self._new_writer(
            layout,
            spans_episodes=self._spans_episodes,
            wait_for_room=lambda: session.wait_for_room(),  # noqa: PLW0108  # its bound method would hold the session
        )
        self._num_before = self._session.num_steps
        self._layout = layout
        self._session.set_writer(writer)
        return layout, writer

    def _end_episode(self, *, align: bool = False, discard: bool = False) -> None:
        if self._writer is not None:
            self._session.log_dropped(self._writer.end_episode(align=align, discard=discard))

    def reset(self, *, discard: bool = False) -> None:
        """End the episode here.

        Args:
            discard: if False, do as at the end of an episode; without padding, also write the last L steps if no window
                holds the last one yet. If True, only windows that were complete already are written.

        Raises:
            SpecError: not to be discarded, but there are fewer steps than the shortest window has. Nothing changed.
        """
        self._session.stream.check()
        writer, targets = self._writer, self._session.targets
        if writer is None:
            return
        writer.finish_pending()
        if not writer.num_steps:
            return
        if not (discard or writer.num_skipped or can_align(targets, writer.num_steps)):
            length = min(target.spec.sequence_length or 1 for target in targets)
            raise TooFewStepsError(writer.num_steps, length)
        try:
            self._session.wait_for_room(ends_episode=True)
        except ShardChangedError:  # which has ended the stream of steps
            return
        self._end_episode(align=not discard, discard=discard)
        self._session.change_shard()
