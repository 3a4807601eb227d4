"""An observer whose steps are also written to disk."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tree

from reverb_writer.episodes import Episode
from reverb_writer.errors import SpecError
from reverb_writer.files.manifest import End
from reverb_writer.files.rollout_writer import PlannedStep, RolloutWriter
from reverb_writer.nests import common_length, rows
from reverb_writer.writing.observers import EpisodeTooLongError


class RolloutTee:
    """Pass steps to an observer and to a writer, so that they can be imported again later.

    If either refuses a step, neither takes it. The writer gets a step after the observer, so every step that the server
    may hold is on disk, or its episode is marked as cut or lost. An episode that is too long for an `EpisodeObserver`
    is dropped there, and whole on disk. If the disk fails, the call raises OSError although the observer has taken the
    step; that episode is not on disk, later ones are.

    The tee also has the observer's other methods, such as `flush()` and `stats()`. Call it from one thread at a time.
    It is a context manager that closes both.

    Example:
        observer = rw.TrajectoryObserver(client, "replay", sequence_length=20)
        with RolloutTee(observer, RolloutWriter("rollouts")) as observer:
            for step in episode:
                observer(step)

    Attributes:
        observer: any observer of this package, those of `reverb_writer.tf_agents` included.
        writer: the writer.

    Raises:
        SpecError: the two have different numbers of environments.
    """

    def __init__(self, observer: Any, writer: RolloutWriter) -> None:
        """Join an observer and a writer with the same number of environments; the tee closes both."""
        num_envs = getattr(observer, "num_envs", None)
        if num_envs != writer.num_envs:
            raise SpecError(
                f"the observer has `num_envs` {num_envs}, but the writer has {writer.num_envs}. Give both the same."
            )
        self.observer = observer
        self.writer = writer

    def __repr__(self) -> str:
        return f"<RolloutTee of {self.observer!r} and {self.writer!r}>"

    def __call__(
        self,
        step: Any,
        *,
        end_of_episode: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        env_mask: Any = None,
    ) -> None:
        """Write a step to both.

        Args:
            step: as for the observer.
            end_of_episode: as for the observer.
            terminated: for the trajectory's end flags, as for the writer; ends the observer's episode, too.
            truncated: as `terminated`.
            env_mask: as for a `TrajectoryObserver`.

        Raises:
            OSError: the disk failed; the observer has taken the step.
            ReverbWriterError: as for the observer and the writer; neither has taken it.
        """
        if end_of_episode is None and not (terminated is None and truncated is None):
            flags = [np.asarray(flag, bool) for flag in (terminated, truncated) if flag is not None]
            end_of_episode = flags[0] | flags[-1]
        given = {"end_of_episode": end_of_episode, "env_mask": env_mask}
        planned = self.writer.plan(step, terminated=terminated, truncated=truncated, **given)
        try:
            self.observer(step, **{name: flags for name, flags in given.items() if flags is not None})
        except EpisodeTooLongError:
            self.writer.write(planned)
            raise
        self.writer.write(planned)

    def extend(self, steps: Any) -> None:
        """Write `steps`, leaves [T, ...], of an episode that goes on after them, as so many calls would.

        Raises:
            SpecError: the tee is of several environments. Nothing changed.
            OSError, ReverbWriterError: as for a call; the steps before are written. None is if the leaves differ in T.
        """
        self._check_single("extend")
        leaves = [np.asarray(leaf) for leaf in tree.flatten(steps)]
        common_length(leaves, "`steps`")
        for step in rows(steps, leaves):
            self(step, end_of_episode=False)

    def write_episode(self, episode: Episode) -> None:
        """Write `episode`, whole or a chunk that was cut, as one trajectory; see `TrajectoryObserver.write_episode`.

        If the observer stops in the middle, the steps that it has taken are on disk, marked as cut.

        Raises:
            SpecError: the tee is of several environments. Nothing changed.
            OSError: the disk failed; the observer has written the episode, and it is not on disk.
            ReverbWriterError: as for the observer and the writer.
        """
        self._check_single("write_episode")
        planned = self._plan_episode(episode)
        self.observer.check_episode(episode)
        before = self.observer.stats().steps
        try:
            try:
                self.observer.write_episode(episode)
            except BaseException:
                planned = planned[: self.observer.stats().steps - before]
                raise
            finally:
                for step in planned:
                    self.writer.write(step)
        except BaseException:
            self.writer.end_episode()
            raise

    def _plan_episode(self, episode: Episode) -> list[PlannedStep]:
        steps = episode.steps()
        *others, last = rows(steps, tree.flatten(steps))
        is_terminated = episode.is_terminated
        is_truncated = episode.is_truncated or not is_terminated  # what was cut has a next state
        boundary = self.writer.plan(last, end_of_episode=True, terminated=is_terminated, truncated=is_truncated)
        planned = [self.writer.plan(step, end_of_episode=False) for step in others]
        return [*planned, boundary._replace(is_boundary=True)]

    def _check_single(self, name: str) -> None:
        if self.writer.num_envs is not None:
            raise SpecError(
                f"`{name}` is for one environment, and this tee has `num_envs` {self.writer.num_envs}. Call it with "
                "each step, leaves [N, ...]."
            )

    def reset(self, *, discard: bool = False, env_ids: Sequence[int] | None = None) -> None:
        """End the episode here, for both; `discard` and `env_ids` as for the observer's `reset`."""
        self.observer.reset(discard=discard, **({} if env_ids is None else {"env_ids": env_ids}))
        self.writer.end_episode(end=End.CUT if discard else End.RESET, env_ids=env_ids)

    def open(self) -> None:
        """Open both again."""
        self.observer.open()
        self.writer.open()

    def close(self, *timeout_s: float | None) -> None:
        """Close both, the writer even if the observer raises. Idempotent."""
        try:
            self.observer.close(*timeout_s)
        finally:
            self.writer.close()

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the observer."""
        if name == "observer":  # not set yet while a copy is made
            raise AttributeError(name)
        return getattr(self.observer, name)

    def __enter__(self) -> RolloutTee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the writer, and leave the observer as its own `with` block would."""
        try:
            self.observer.__exit__(kind, error, trace)
        finally:
            self.writer.close()
