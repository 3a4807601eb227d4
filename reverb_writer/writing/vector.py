"""One observer for many environments that step together, each with episodes of its own, over one stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import StructureError
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.actor_shard import ShardChangedError
from reverb_writer.writing.observer_base import Observer
from reverb_writer.writing.priorities import Priority
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import StreamKeywords, StreamOptions
from reverb_writer.writing.vector_writer import VectorWriter
from reverb_writer.writing.window_targets import WindowTarget, window_targets

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REQUEST_ITEMS = 128
"""Windows of one environment that are encoded together: fewer than another observer's, for environments are many."""


class VectorObserver(Observer[VectorWriter]):
    """Write the windows of N environments that step together.

    A call takes leaves [N, ...] and costs little more than one for a single environment: a leaf is copied to the chunks
    of all environments at once. Called from one thread at a time; a context manager.

    Example:
        observer = rw.VectorObserver(client, "replay", sequence_length=20, num_envs=64)
        observer({"obs": obs, "reward": reward}, end_of_episode=terminated | truncated)
    """

    _spans_episodes = False

    def __init__(
        self,
        client: Any,
        table: str | Sequence[str] | None = None,
        sequence_length: int | None = None,
        stride_length: int = 1,
        priority: Priority = 1.0,
        *,
        num_envs: int,
        end_of_episode: EndOfEpisode | str = EndOfEpisode.DROP,
        windows: Mapping[str, WindowSpec | WindowTarget] | None = None,
        spec: Any = None,
        mask: bool = False,
        **options: Unpack[StreamKeywords],
    ) -> None:
        """Find the tables and open the stream; arguments and errors as for `TrajectoryObserver`, but for two.

        `num_envs` is N, the environments that step together, >= 1. `spec` is of one of them, without N.
        """
        self._num_envs: int = integer("num_envs", num_envs, minimum=1)
        self._all = np.arange(self._num_envs)
        self._cut: set[int] = set()  # environments whose episode began at a lost shard
        targets = window_targets(table, sequence_length, stride_length, end_of_episode, priority, windows)
        super().__init__(client, targets, mask=mask, options=StreamOptions(**options))
        if spec is not None:
            self._start(spec, is_spec=True)

    @property
    def num_envs(self) -> int:
        """N, the environments that step together."""
        return self._num_envs

    def __call__(self, step: Any, *, end_of_episode: Any = None, env_mask: Any = None) -> None:
        """Write a step of every environment, or of some; errors as for `TrajectoryObserver`.

        Args:
            step: a `Trajectory`, or any nest, with leaves [N, ...]; copied.
            end_of_episode: [N] booleans, which of them are the last of their episode; None to read `step_type` or
                `is_last`.
            env_mask: [N] booleans, which environments have a step here; the rows of the others are not read. None for
                all.
        """
        session = self._session
        self._wait_for_room()
        last = None if end_of_episode is None else self._one_each("end_of_episode", end_of_episode)
        env_ids = self._all if env_mask is None else np.flatnonzero(self._one_each("env_mask", env_mask))
        layout, writer = self._layout, session.writer
        if layout is None or writer is None:
            layout, writer = self._start(step)
        leaves = layout.flatten(step, self._num_before + writer.num_calls)
        if last is None:
            last = layout.structure.ends_episode(leaves)
        cut = np.intersect1d(env_ids, list(self._cut)) if self._cut else env_ids[:0]
        env_ids = np.setdiff1d(env_ids, cut) if len(cut) else env_ids
        dropped = writer.append(leaves, last, env_ids)
        if dropped:
            session.log_dropped(dropped)
        if len(cut):
            session.count_skipped(len(cut))
            self._cut.difference_update(cut[last[cut]].tolist())  # their next step begins an episode
        if last[env_ids].any():
            session.change_shard()

    def _wait_for_room(self, *, ends_episode: bool = False) -> None:
        try:  # `contextlib.suppress` takes longer, and this is done for every step
            self._session.wait_for_room(ends_episode=ends_episode)
        except ShardChangedError:
            return  # the next step makes a writer for the other shard

    def reset(self, *, discard: bool = False, env_ids: Sequence[int] | None = None) -> None:
        """End the episodes of some environments here.

        Args:
            discard: as for `TrajectoryObserver.reset`, but fewer steps than a window are dropped and counted.
            env_ids: numbers of the environments, 0..N-1; None for all.
        """
        self._session.stream.check()
        last = self._num_envs - 1
        env_ids = range(last + 1) if env_ids is None else env_ids
        env_ids = [integer("env_ids", n, minimum=0, maximum=last) for n in env_ids]
        if self._writer is not None:
            self._wait_for_room(ends_episode=True)
        if self._writer is not None:
            self._session.log_dropped(self._writer.end_episodes(env_ids, align=not discard, discard=discard))
        self._cut.difference_update(env_ids)
        self._session.change_shard()

    def _start(self, example: Any, *, is_spec: bool = False) -> tuple[StepLayout, VectorWriter]:
        layout = self._register(example, is_spec=is_spec)
        options = {"request_items": _REQUEST_ITEMS, "spans_episodes": self._spans_episodes}
        writer = VectorWriter([self._new_writer(layout, **options) for _ in range(self._num_envs)], self._cut)
        self._num_before = self._session.num_steps // self._num_envs
        self._layout = layout
        self._session.set_writer(writer)
        return layout, writer

    def _one_each(self, name: str, flags: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(flags, bool)
        if array.shape != (self._num_envs,):
            raise StructureError(f"`{name}` has shape {array.shape}, expected ({self._num_envs},): one an environment.")
        return array

    def _end_all(self) -> None:
        if self._writer is not None:
            self._session.log_dropped(self._writer.end_episodes(range(self._num_envs), discard=True))
        self._session.writer = None


class VectorSequenceObserver(VectorObserver):
    """Write windows of N environments, each over its whole stream of steps, across the ends of its episodes.

    What `SequenceObserver` is for one environment: a boundary step only sends complete windows, and `end_of_episode`
    applies at `reset()`, where the streams end.
    """

    _spans_episodes = True
