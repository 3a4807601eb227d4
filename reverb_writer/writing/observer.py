"""The base class of observers: a call with a step.

    observer(step) -> is it like the first step? -> may a row be written? -> the ring -> the sender's thread

A call ends with the copy into the ring; the sender does the rest. If an interrupt ends a call, the step is taken if
the ring has advanced, and not taken otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.episodes import Episode
from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import env_flags
from reverb_writer.nests import common_length, named_leaves, rows
from reverb_writer.rows import LAST
from reverb_writer.transport import process_hooks
from reverb_writer.writing.observer_life import ObserverLife
from reverb_writer.writing.ring import Reset, StepRing, steps_of
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.step_kinds import Boundary, Ends, EnvIds, Row, check_bits, env_ends

_LOG = logging.getLogger(__package__)

_LAST = np.uint8(LAST)
_UNMARKED_STEPS, _UNMARKED_WINDOWS = 5_000, 100


class TooFewStepsError(SpecError):
    """A reset cannot write an episode because it is shorter than a window."""


class Observer(ObserverLife):
    """Takes steps, for all observers. Subclasses choose the windows that are written.

    Call it from one thread at a time; the thread may change between episodes, or after `reset`. A context manager.
    """

    # ------------------------------------------------------------------------------------------------------- a step

    def __call__(
        self,
        step: Any,
        end_of_episode: Any = None,
        env_mask: Any = None,
        *,
        terminated: Any = None,
        truncated: Any = None,
        final_observation: Any = None,
    ) -> None:
        """Write a step; with `num_envs`, one step of each environment or of some.

        An end is said in one of three ways. `terminated` and `truncated`, as the environment's `step` returns them: the
        observer then writes one more row for the final observation. Or the steps have leaves that mark the end, such as
        `step_type` or `is_last`. Or `end_of_episode` alone, which does not show whether the environment ended the
        episode: the last action is then in no transition, and `stats().unknown_ends` counts it.

        Args:
            step: a `Trajectory`, or any nest; copied. Leaves are [...], with `num_envs` [N, ...].
            end_of_episode: whether the step is the last of its episode, with `num_envs` [N] booleans; None to read
                the step's own leaves.
            env_mask: [N] booleans, only with `num_envs`: whether each environment has a step here; rows of other
                environments are ignored. None for all.
            terminated: whether the environment ended the episode with the step's action; with `num_envs` [N] booleans.
                Not for steps that mark their ends themselves.
            truncated: whether a limit ended the episode with the step's action; as `terminated`.
            final_observation: the observation after the last action, a nest like the step's `observation`, with
                `num_envs` leaves [N, ...]; read only where `terminated` or `truncated` is true. None if there is
                none: a terminated episode then ends with the step's own observation, and the last action of a truncated
                one is in no transition.

        Raises:
            StructureError: a leaf differs from the first step's, or the end contradicts the step. Nothing changed.
            ReplayTimeoutError: no room in flight, and no progress for the time-out; names the cause. Nothing changed.
            FinishedError: no room in flight, and `until` is true. Nothing changed.
            SpecError: another thread is in the middle of an episode, or `env_mask` without `num_envs`. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
            ReverbWriterError: a server refuses earlier items. Nothing changed.
        """
        ends: Ends | None = None
        if not (end_of_episode is None is terminated is truncated):
            ends = end_of_episode, terminated, truncated, final_observation
            if self._num_envs is not None:  # before the first step is taken as the structure of all
                ends = env_ends(self._num_envs, *ends)
        self._take(step, env_mask, None, ends)

    def write_row(self, step: Any, kinds: Any, env_mask: Any = None) -> None:
        """Write a row of a known kind; with `num_envs`, one row of each environment or of some.

        It is for code that writes boundary rows itself, such as recorders and imports. A LAST row ends its episode.

        Args:
            step: as in a call.
            kinds: bits of `reverb_writer.rows`, an integer or uint8 [N].
            env_mask: as in a call.

        Raises:
            The errors of a call. Nothing changed.
        """
        if self._num_envs is None:
            known = kinds, kinds & LAST != 0
        else:
            kinds = np.array(kinds, np.uint8)
            check_bits(kinds)
            is_last = kinds & _LAST
            known = kinds, is_last != 0 if np.count_nonzero(is_last) else None
        self._take(step, env_mask, known, None)

    def _env_ids(self, env_mask: Any) -> EnvIds:
        self._need_envs("env_mask")
        return np.flatnonzero(env_flags("env_mask", env_mask, len(self._all_envs)))

    def _take(self, step: Any, env_mask: Any, known: tuple[Any, Any] | None, ends: Ends | None) -> None:
        """Find the kind of a row, or of the rows of N environments, wait for room, and write it.

        `step` and `env_mask` are those of a call. `known` is the kind and whether the windows end with the row, if the
        caller knows it. `ends` are the arguments of a call about an end, None if all are None.
        """
        env_ids = self._all_envs if env_mask is None else self._env_ids(env_mask)
        sender = self._sender or self._start(step)
        ring, kinds = sender.ring, self._kinds
        written, num_steps, _, state, num_items = ring.head
        leaves = self._fitting(step)
        if leaves is None:
            leaves = self._convert(step, (self._num_before + written) // (self._num_envs or 1))
        if ends is not None:
            row, self._is_marked = kinds.row(leaves, state, env_ids, ends), True
        elif known is not None:
            row, self._is_marked = kinds.known(*known, leaves), True
        else:
            row = kinds.plain(leaves, state, env_ids)
        if get_ident() != self._thread:
            self._change_thread(ring)
        if written >= ring.granted or num_items >= ring.granted_items:
            self._wait_for_room(sender)
        due = ring.write(leaves, row) if self._num_envs is None else ring.write_envs(leaves, row, env_ids)
        if due is not None and due != self._woken_for:
            self._wake(sender, due)
        if self._max_steps is not None or row.num_unknown:
            self._note_end(steps_of(num_steps), env_ids, row)

    def _note_end(self, steps_before: Any, env_ids: EnvIds, row: Row) -> None:
        """Look at a written row, before which the episode had `steps_before` steps: is its end unknown, or too late?"""
        if row.num_unknown:
            self._note_unknown(row.num_unknown)
        if self._max_steps is not None:
            self._check_length(steps_before, self._max_steps, env_ids, row.boundary)

    def _check_length(self, steps_before: Any, max_steps: int, env_ids: EnvIds, boundary: Boundary | None) -> None:
        """Raise or log if an episode has become too long; `steps_before` are its steps before this call."""
        if self._num_envs is None:
            is_too_long = steps_before <= max_steps < steps_before + 1 + (boundary is not None)
        else:
            counts = steps_before.copy()
            counts[env_ids] += 1
            if boundary is not None:
                counts[boundary.env_ids] += 1
            is_too_long = ((steps_before <= max_steps) & (counts > max_steps)).any()
        if is_too_long:
            self._on_overflow()

    def _note_unknown(self, count: int) -> None:
        """Count ends that do not show whether the environment ended the episode; log the first."""
        paths = self._structure.paths if self._structure else ()
        if not self._unknown_ends and any(path.split("/")[0] == "reward" for path in paths):
            _LOG.warning(
                "`end_of_episode` does not show whether the environment ended the episode, so the last action of each "
                "episode is in no transition. Pass `terminated=`, `truncated=` and `final_observation=` instead. "
                "Further ends are counted in stats().unknown_ends."
            )
        self._unknown_ends += count

    def _wake(self, sender: Sender, due: tuple[float, float]) -> None:
        """Wake the sender, once per value of `wake_after`; warn once if no end of an episode was ever marked."""
        sender.post()
        self._woken_for = due  # after the post, because an interrupt may come between
        if self._is_marked:
            return
        num_steps = int(np.max(sender.ring.num_steps()))
        if num_steps < max(_UNMARKED_STEPS, _UNMARKED_WINDOWS * self._target.length):
            return
        if not self._unmarked_steps:
            _LOG.warning(
                "No end of an episode in %d steps: windows are cut across episodes. Pass `terminated`, `truncated` and "
                "`final_observation`, call `reset()` between episodes, or give steps a leaf `is_last` or `step_type`. "
                "A `SequenceObserver` is for windows that cross episodes.",
                num_steps,
            )
        self._unmarked_steps = num_steps

    def _change_thread(self, ring: StepRing) -> None:
        """Take steps of the calling thread from now on."""
        num_steps = int(np.max(ring.num_steps()))
        if num_steps and self._thread is not None and not self._spans_episodes:
            self._check(self._sender)  # a forked child gets this error instead
            raise SpecError(
                f"the observer is in the middle of an episode of another thread, at step {num_steps}. Make one "
                "observer per thread; the thread may change between episodes, or after `reset`."
            )
        self._thread = get_ident()

    # ------------------------------------------------------------------------------------------------- many steps

    def extend(self, steps: Any, kinds: Any = None) -> None:
        """Write rows of an episode; equivalent to one call per row. Not with `num_envs`.

        Args:
            steps: nest with leaves [T, ...]; copied.
            kinds: uint8 [T], the kinds of the rows (`reverb_writer.rows`): each LAST row ends its episode. None for
                steps of one episode, none of which ends it.

        Raises:
            StructureError, ReplayTimeoutError, ClosedError: as for a call; earlier steps are written. If leaves differ
                in T, nothing is written.
        """
        self._refuse_envs("extend")
        leaves = [np.asarray(leaf) for leaf in named_leaves(steps, "`steps`")[1]]
        num_steps, at = common_length(leaves, "`steps`"), 0
        kinds = None if kinds is None else np.asarray(kinds, np.uint8)
        if kinds is not None and kinds.shape != (num_steps,):
            raise StructureError(f"`kinds` has shape {kinds.shape}, expected ({num_steps},): one kind per row.")
        if kinds is not None:
            check_bits(kinds)
        if self._sender is not None or not num_steps:
            self._check(self._sender)
        if not num_steps:
            return
        self._is_marked = True
        sender = self._sender or self._start(tree.map_structure(lambda leaf: leaf[0], steps))
        if self._fits_at_once(sender, steps, leaves):
            at = self._write_blocks(sender, leaves, kinds)
        for number, step in enumerate(rows(steps, [leaf[at:] for leaf in leaves]), at):
            if kinds is None:
                self(step, end_of_episode=False)
            else:
                self.write_row(step, int(kinds[number]))

    def _write_blocks(self, sender: Sender, leaves: Sequence[Any], kinds: Any) -> int:
        """Write rows in blocks, each as long as the ring has room and at most up to an end; return their number."""
        ring, num_steps, at = sender.ring, len(leaves[0]), 0
        is_last = np.zeros(num_steps, bool) if kinds is None else (kinds & LAST) != 0
        if get_ident() != self._thread:
            self._change_thread(ring)
        while at < num_steps:
            before = ring.head[3]
            if ring.free_steps() <= 0:
                self._wait_for_room(sender)
            ends = is_last[at:].nonzero()[0]
            count = min(num_steps - at, ring.free_steps(), *(ends[:1] + 1).tolist())
            if count <= 0:  # another thread has closed the observer
                continue
            columns = [leaf[at : at + count] for leaf in leaves]
            of_block = self._kinds.block(columns, before) if kinds is None else kinds[at : at + count]
            at += count
            state = self._kinds.state(int(of_block[-1]), [column[-1] for column in columns])
            ring.write_block(columns, of_block, state, is_last[at - 1])
            if (due := ring.due()) is not None and due != self._woken_for:
                self._wake(sender, due)
        return at

    def _fits_at_once(self, sender: Sender, steps: Any, leaves: Sequence[Any]) -> bool:
        """Return whether one check is enough for all steps."""
        structure = self._structure
        if structure is None or np.dtype(object) in structure.dtypes:
            return False
        if self._max_steps is not None and sender.ring.head[1] + len(leaves[0]) > self._max_steps:
            return False
        try:
            tree.assert_same_structure(steps, structure.example)
        except (TypeError, ValueError):
            return False
        expected = list(zip(structure.dtypes, structure.shapes, strict=True))
        return [(leaf.dtype, leaf.shape[1:]) for leaf in leaves] == expected

    def write_episode(self, episode: Episode) -> None:
        """Write an episode, or a chunk of one: the rows of `Episode.steps`. Not with `num_envs`.

        The last row ends the episode's windows, also if the episode was cut there.

        Args:
            episode: at least one step.

        Raises:
            IncompleteError: the episode has no step.
            SpecError: the observer is in the middle of another episode, or the episode is too long. Nothing changed.
            StructureError: a leaf differs from the first step's. Nothing changed.
            ReplayTimeoutError: no room in flight, and no progress for the time-out. Only the windows that were
                complete before are written.
        """
        self._refuse_envs("write_episode")
        steps, kinds = episode.steps(), episode.kinds()
        num_steps = len(kinds)
        if self._max_steps is not None and num_steps > self._max_steps and not self._bypass:
            raise SpecError(
                f"the episode has {num_steps} steps, boundary step included, which is more than "
                f"max_sequence_length={self._max_steps}. Raise `max_sequence_length`, or slice the episode."
            )
        written, open_steps = (0, 0) if self._sender is None else self._sender.ring.head[:2]
        if open_steps and not self._spans_episodes:
            self._check(self._sender)
            raise SpecError(f"the observer is in the middle of an episode, at step {open_steps}. Call `reset` first.")
        try:
            self.extend(tree.map_structure(lambda leaf: leaf[:-1], steps), kinds[:-1])
            last = tree.map_structure(lambda leaf: leaf[-1], steps)
            self._take(last, None, (int(kinds[-1]), True), None)
        except BaseException:
            if self._sender is not None and not process_hooks.is_forked() and self._sender.ring.head[0] != written:
                self._mark(self._sender, Reset([0], discard=True))
            raise

    def _refuse_envs(self, method: str) -> None:
        if self._num_envs is not None:
            raise SpecError(f"`{method}` is for an observer of one environment, and this one has `num_envs`.")

    def _need_envs(self, argument: str) -> None:
        if self._num_envs is None:
            raise SpecError(f"`{argument}` is for several environments. Pass `num_envs` to the observer.")

    # --------------------------------------------------------------------------------------------- ends of episodes

    def reset(self, *, discard: bool = False, env_ids: Sequence[int] | None = None) -> None:
        """End the episode; with `num_envs`, the episodes of all or some environments.

        Args:
            discard: if False, the episode ends as after a last step; without padding, the last L steps also become a
                window unless a window holds the last step. If True, only windows that are complete now are written.
            env_ids: numbers of the environments, 0..N-1; None for all. Only with `num_envs`.

        Raises:
            SpecError: without `discard`, the episode is shorter than the shortest window. Nothing changed. With
                `num_envs` its steps are dropped and counted instead.
        """
        self._check(self._sender)
        if env_ids is not None:
            self._need_envs("env_ids")
        envs = self._all_envs.tolist() if env_ids is None else env_ids
        last = len(self._all_envs) - 1
        envs = [integer("env_ids", env, minimum=0, maximum=last) for env in envs]
        self._is_marked = True
        sender = self._sender
        if sender is None:
            return
        num_steps = sender.ring.num_steps()
        self._thread = get_ident()
        if not np.any(num_steps):
            return
        if self._num_envs is None and not (discard or self._target.can_reset(num_steps)):
            raise TooFewStepsError(
                f"the episode has {num_steps} steps, expected at least `sequence_length`={self._target.length} to "
                'write it. Call `reset(discard=True)`, or choose an `end_of_episode` that pads, such as "pad".'
            )
        self._mark(sender, Reset(envs, discard))

    def _mark(self, sender: Sender, mark: Reset | float) -> None:
        """Write a mark, without a wait."""
        sender.ring.mark(mark)
        sender.post()

    def _on_overflow(self) -> None:
        """Raise or log that an episode is too long."""
        text = (
            f"the episode is longer than max_sequence_length={self._max_steps} steps, boundary step included: it "
            "is not written, and its steps up to the next episode are dropped. Raise `max_sequence_length`."
        )
        if not self._bypass:
            raise SpecError(text)
        _LOG.error("%s", text)
