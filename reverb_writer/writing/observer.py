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
from reverb_writer.errors import SpecError
from reverb_writer.leaves import env_flags
from reverb_writer.nests import common_length, rows
from reverb_writer.transport import process_hooks
from reverb_writer.transport.delivery import Wait
from reverb_writer.writing.observer_life import ObserverLife
from reverb_writer.writing.ring import Reset
from reverb_writer.writing.sender import Sender
from reverb_writer.writing.window_kinds import can_align

_LOG = logging.getLogger(__package__)

_UNMARKED_STEPS = 10_000


class TooFewStepsError(SpecError):
    """A reset cannot write an episode because it is shorter than a window."""


class Observer(ObserverLife):
    """Takes steps, for all observers. Subclasses choose the windows that are written.

    Call it from one thread at a time; the thread may change between episodes, or after `reset`. A context manager.
    """

    # ------------------------------------------------------------------------------------------------------- a step

    def __call__(self, step: Any, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Write a step; with `num_envs`, one step of each environment or of some.

        Args:
            step: a `Trajectory`, or any nest; copied. Leaves are [...], with `num_envs` [N, ...].
            end_of_episode: whether the step is the last of its episode, with `num_envs` [N] booleans; None to read
                `step_type` or `is_last`.
            env_mask: [N] booleans, only with `num_envs`: whether each environment has a step here; rows of other
                environments are ignored. None for all.

        Raises:
            StructureError: a leaf differs from the first step's; names the path. Nothing changed.
            ReplayTimeoutError: no room in flight, and no progress for the time-out; names the cause. Nothing changed.
            FinishedError: no room in flight, and `until` is true. Nothing changed.
            SpecError: another thread is in the middle of an episode, or `env_mask` without `num_envs`. Nothing changed.
            ClosedError: after `close()`, or in a forked child.
            ReverbWriterError: a server refuses earlier items. Nothing changed.
        """
        if self._num_envs is not None or env_mask is not None:
            self._need_envs("env_mask")
            self._write_envs(step, end_of_episode, env_mask)
            return
        sender = self._sender or self._start(step)
        ring = sender.ring
        written, num_steps, _ = ring.head
        leaves = self._flatten(step, self._num_before + written)
        if end_of_episode is None:
            end_of_episode = self._ends_episode(leaves)
        else:
            self._is_marked = True
        if get_ident() != self._thread:
            self._change_thread(num_steps)
        if self._sizes is not None:
            self._sizes[0].check(leaves, num_steps + 1)
        if written >= ring.granted:
            self._wait_for_room(sender, written)
        ring.write(leaves, last=bool(end_of_episode))
        if written >= (wake_at := ring.wake_at) != self._woken_for:
            self._wake(sender, wake_at)
        if num_steps == self._max_steps:
            self._on_overflow()

    def _write_envs(self, step: Any, end_of_episode: Any, env_mask: Any) -> None:
        """Write a step of each environment or of some; see `__call__`."""
        last = None if end_of_episode is None else env_flags("end_of_episode", end_of_episode, self._num_envs)
        env_ids = (
            self._all_envs if env_mask is None else np.flatnonzero(env_flags("env_mask", env_mask, self._num_envs))
        )
        sender = self._sender or self._start(step)
        ring = sender.ring
        written, num_steps, _ = ring.head
        leaves = self._flatten(step, (self._num_before + written) // len(self._all_envs))
        if last is None:
            last = self._ends_episode(leaves)
        else:
            self._is_marked = True
        if get_ident() != self._thread:
            self._change_thread(num_steps.max())
        if self._sizes is not None:
            for env in env_ids.tolist():
                self._sizes[env].check([leaf[env] for leaf in leaves], int(num_steps[env]) + 1)
        if written >= ring.granted:
            self._wait_for_room(sender, written)
        ring.write_envs(leaves, last, env_ids)
        if written + len(env_ids) > (wake_at := ring.wake_at) != self._woken_for:
            self._wake(sender, wake_at)
        if self._max_steps is not None and self._max_steps in num_steps[env_ids]:
            self._on_overflow()

    def _wake(self, sender: Sender, wake_at: int) -> None:
        """Wake the sender, once per value of `wake_at`; warn once if no end of an episode was ever marked."""
        sender.post()
        self._woken_for = wake_at  # after the post, because an interrupt may come between
        if self._is_marked or (num_steps := int(np.max(sender.ring.head[1]))) < _UNMARKED_STEPS:
            return
        if not self._unmarked_steps:
            _LOG.warning(
                "No end of an episode in %d steps: windows are cut across episodes. Pass `end_of_episode`, call "
                "`reset()` between episodes, or give steps a leaf `is_last` or `step_type`. A `SequenceObserver` is "
                "for windows that cross episodes.",
                num_steps,
            )
        self._unmarked_steps = num_steps

    def _change_thread(self, num_steps: int) -> None:
        """Take steps of the calling thread from now on."""
        if num_steps and self._thread is not None and not self._spans_episodes:
            self._check(self._sender)  # a forked child gets this error instead
            raise SpecError(
                f"the observer is in the middle of an episode of another thread, at step {num_steps}. Make one "
                "observer per thread; the thread may change between episodes, or after `reset`."
            )
        self._thread = get_ident()

    def _wait_for_room(self, sender: Sender, written: int) -> None:
        """Wait until the next row is granted."""
        self._check(sender)
        is_patient = self._options.on_block != "raise"
        self._wait(sender, Wait("room", self._timeout_s if is_patient else 0.0, extends=is_patient, row=written))

    # ------------------------------------------------------------------------------------------------- many steps

    def extend(self, steps: Any) -> None:
        """Write steps of an episode, none of which ends it; equivalent to one call per step. Not with `num_envs`.

        Args:
            steps: nest with leaves [T, ...]; copied.

        Raises:
            StructureError, ReplayTimeoutError, ClosedError: as for a call; earlier steps are written. If leaves differ
                in T, nothing is written.
        """
        self._refuse_envs("extend")
        leaves = [np.asarray(leaf) for leaf in tree.flatten(steps)]
        num_steps, at = common_length(leaves, "`steps`"), 0
        if self._sender is not None or not num_steps:
            self._check(self._sender)
        if not num_steps:
            return
        self._is_marked = True
        sender = self._sender or self._start(tree.map_structure(lambda leaf: leaf[0], steps))
        if self._fits_at_once(sender, steps, leaves):
            ring = sender.ring
            if get_ident() != self._thread:
                self._change_thread(ring.head[1])
            while at < num_steps:
                written = ring.head[0]
                if written >= ring.granted:
                    self._wait_for_room(sender, written)
                count = min(num_steps - at, ring.granted - written)
                if count <= 0:  # another thread has closed the observer
                    continue
                ring.write_block([leaf[at:] for leaf in leaves], count)
                at += count
                if written + count > (wake_at := ring.wake_at) != self._woken_for:
                    self._wake(sender, wake_at)
        for step in rows(steps, [leaf[at:] for leaf in leaves]):
            self(step, end_of_episode=False)

    def _fits_at_once(self, sender: Sender, steps: Any, leaves: Sequence[Any]) -> bool:
        """Return whether one check is enough for all steps."""
        structure = self._structure
        if structure is None or self._sizes is not None or np.dtype(object) in structure.dtypes:
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
        """Write an episode, or a chunk of one, by one call per step of `Episode.steps`. Not with `num_envs`.

        The last step ends the episode.

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
        steps, num_steps = episode.steps(), len(episode) + 1
        if self._max_steps is not None and num_steps > self._max_steps and not self._bypass:
            raise SpecError(
                f"the episode has {num_steps} steps, boundary step included, which is more than "
                f"max_sequence_length={self._max_steps}. Raise `max_sequence_length`, or slice the episode."
            )
        written, open_steps, _ = (0, 0, 0) if self._sender is None else self._sender.ring.head
        if open_steps and not self._spans_episodes:
            self._check(self._sender)
            raise SpecError(f"the observer is in the middle of an episode, at step {open_steps}. Call `reset` first.")
        try:
            self.extend(tree.map_structure(lambda leaf: leaf[:-1], steps))
            self(tree.map_structure(lambda leaf: leaf[-1], steps), end_of_episode=True)
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
        _, num_steps, _ = sender.ring.head
        self._thread = get_ident()
        if not np.any(num_steps):
            return
        if self._num_envs is None and not (discard or can_align(self._targets, num_steps)):
            raise TooFewStepsError(
                f"the episode has {num_steps} steps, expected at least `sequence_length`={self._shortest} to write it. "
                'Call `reset(discard=True)`, or choose an `end_of_episode` that pads, such as "pad".'
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
