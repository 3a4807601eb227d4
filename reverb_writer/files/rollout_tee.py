"""RolloutTee: an observer whose steps are also written to disk."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError
from reverb_writer.files.manifest import End
from reverb_writer.files.rollout_writer import RolloutWriter

__all__ = ["RolloutTee"]


class RolloutTee:
    """Pass steps to an observer and to a writer, so that what was sent can be sent again.

    A step that either of them refuses is taken by neither. The writer gets a step after the observer has it: what the
    server may hold is on disk, or its episode is marked as cut or lost. A step on which the disk fails raises OSError
    and is taken by the observer; its episode is not on disk then, and later ones are.

    What else the observer has, such as `flush()` and `stats()`, the tee has, too. Called from one thread at a time; a
    context manager that closes both.

    Example:
        observer = rw.TrajectoryObserver(client, "replay", sequence_length=20)
        with RolloutTee(observer, RolloutWriter("rollouts")) as observer:
            for step in episode:
                observer(step)

    Attributes:
        observer: any observer of this package, or of TF-Agents: what takes steps, `reset()` and `close()`.
        writer: the writer.
    """

    def __init__(self, observer: Any, writer: RolloutWriter) -> None:
        """Join an observer and a writer of as many environments; both are the tee's to close."""
        num_envs = getattr(observer, "num_envs", writer.num_envs)
        if num_envs != writer.num_envs:
            raise SpecError(
                f"the observer has `num_envs` {num_envs}, the writer {writer.num_envs}. Give both the same."
            )
        self.observer = observer
        self.writer = writer

    def __call__(self, step: Any, *, end_of_episode: Any = None, terminated: Any = None, truncated: Any = None) -> None:
        """Write a step to both.

        Args:
            step: as for the observer.
            end_of_episode: likewise.
            terminated: for the trajectory's end flags, as for the writer; ends the observer's episode, too.
            truncated: likewise.

        Raises:
            OSError: the disk failed; the observer has the step.
            ReverbWriterError: as for the observer and the writer; neither has taken it.
        """
        if end_of_episode is None and not (terminated is None and truncated is None):
            flags = [np.asarray(flag, bool) for flag in (terminated, truncated) if flag is not None]
            end_of_episode = flags[0] | flags[-1]
        planned = self.writer.plan(step, end_of_episode=end_of_episode, terminated=terminated, truncated=truncated)
        if end_of_episode is None:
            self.observer(step)
        else:
            self.observer(step, end_of_episode=end_of_episode)
        self.writer.write(planned)

    def reset(self, write_cached_steps: bool = True, **env_ids: Any) -> None:
        """End the episode here, for both; see the observer's `reset`."""
        self.observer.reset(write_cached_steps, **env_ids)
        self.writer.end_episode(end=End.RESET if write_cached_steps else End.CUT, **env_ids)

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
        """Return what the observer has besides."""
        if name == "observer":  # not set yet: a copy that is being made
            raise AttributeError(name)
        return getattr(self.observer, name)

    def __enter__(self) -> RolloutTee:
        """Return the tee itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close the writer, and have the observer end as its own `with` would."""
        try:
            self.observer.__exit__(kind, error, trace)
        finally:
            self.writer.close()
