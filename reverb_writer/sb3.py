"""The replay buffer of Stable-Baselines3 and CleanRL on a replay server: one line of a training program changes.

    rb = ReplayBuffer(10_000, envs.single_observation_space, envs.single_action_space, device)                 # before
    rb = sb3.ReplayBuffer("localhost:8000", envs.single_observation_space, envs.single_action_space, device)   # after

    add(obs, next_obs, action, reward, done, infos) ─> one item per environment ─> table ─> sample(batch_size)

    DQN(..., replay_buffer_class=sb3.ReplayBuffer, replay_buffer_kwargs={"replay": "localhost:8000"})          # or this

A transition is an item of one step with both observations, because a program may pass any `next_obs`.

Source: Stable-Baselines3 2.x, `common/buffers.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError
from reverb_writer.lazy import needs
from reverb_writer.replay.client import as_client
from reverb_writer.replay.observers import TrajectoryObserver
from reverb_writer.replay.replay_dataset import ReplayDataset
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL

__all__ = ["ReplayBuffer", "ReplayBufferSamples"]

_LOG = logging.getLogger(__name__)


class ReplayBufferSamples(NamedTuple):
    """A batch of transitions: tensors [B, ...] on the buffer's device; dicts of tensors for a `Dict` space.

    Attributes:
        observations: [B, ...].
        actions: [B, action]; [B, 1] for a discrete space.
        next_observations: [B, ...].
        dones: [B, 1] float32; 1 where the episode ended, except by a time limit.
        rewards: [B, 1] float32.
        discounts: None: the algorithms of Stable-Baselines3 2.7 and newer then take their own gamma.
    """

    observations: Any
    actions: Any
    next_observations: Any
    dones: Any
    rewards: Any
    discounts: Any = None


class ReplayBuffer:
    """`add` and `sample` of Stable-Baselines3's buffer, on a table. For one thread; a context manager.

    The server sets the table's size, sampler and rate limiter. A program that adds and samples in turn needs a rate
    limiter that never blocks inserts, such as `MinSize`. Other processes may also write to and read from the table.

    A pickle, such as `CheckpointCallback(save_replay_buffer=True)` writes, has no transitions: only a dict with the
    table's name and the servers' addresses. The first pickle logs where the transitions are.

    Attributes:
        full: False. Algorithms of Stable-Baselines3 change the newest stored transition if `full` or `pos` is true;
            here transitions are complete, and need no change.
        pos: 0.
    """

    full = False
    pos = 0

    def __init__(
        self,
        buffer_size: Any,
        /,
        observation_space: Any,
        action_space: Any,
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        replay: Any = None,
        table: str = "replay",
        timeout_s: float = 30.0,
    ) -> None:
        """Connect to the replay.

        Args:
            buffer_size: the replay: an address or several, a `Client`, or an object with an address, such as a
                `LocalServer`. With `replay`, any value, because the table has a size of its own: algorithms of
                Stable-Baselines3 pass their buffer size here.
            observation_space: Gymnasium space of one environment's observations, possibly a `Dict`.
            action_space: Gymnasium space of one environment's actions.
            device: device of the tensors; "auto" for CUDA if PyTorch finds it, otherwise the CPU.
            n_envs: number of environments, >= 1.
            optimize_memory_usage: ignored, because the server stores both observations of each transition.
            handle_timeout_termination: whether `dones` is 0 where `infos` has a true `TimeLimit.truncated`.
            replay: the replay, as a keyword for `replay_buffer_kwargs`. With an address, `model.save` works.
            table: the table's name.
            timeout_s: time-out of a call, seconds.

        Raises:
            SpecError: an argument is invalid.
            MissingExtraError: PyTorch is not installed.
        """
        with needs("`sb3.ReplayBuffer`", "reverb-writer[torch]"):
            import torch  # noqa: PLC0415  # in the extra

            from reverb_writer.reading.views.torch import TensorConverter  # noqa: PLC0415  # needs the extra
        del optimize_memory_usage
        if replay is None and isinstance(buffer_size, int | np.integer):
            raise SpecError(
                f"`sb3.ReplayBuffer` needs a replay, got the buffer size {buffer_size}. Pass "
                '`replay_buffer_kwargs={"replay": address}` to the algorithm.'
            )
        self._spaces = observation_space, action_space
        self._n_envs = integer("n_envs", n_envs, minimum=1)
        self._handles_time_limits = handle_timeout_termination
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else None
        self._to_tensors = TensorConverter(device)
        self._client, self._owns_client = as_client(buffer_size if replay is None else replay, timeout_s)
        self._table, self._timeout_s = table, timeout_s
        self._observer = TrajectoryObserver(self._client, table, 1, num_envs=self._n_envs, timeout_s=timeout_s)
        self._begins = np.ones(self._n_envs, bool)
        self._has_named_place = False
        self._dataset: ReplayDataset | None = None

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Add one transition per environment; the arrays are copied.

        Args:
            obs: observations, [n_envs, ...], or a dict of these for a `Dict` space.
            next_obs: next observations, in the same form, including final observations of episodes.
            action: actions, [n_envs, ...].
            reward: rewards, [n_envs].
            done: whether each transition ended its episode, [n_envs].
            infos: one mapping per environment; only `TimeLimit.truncated` is read.

        Raises:
            ValueError: an array's size does not match its space and `n_envs`.
            ReplayTimeoutError: the table's rate limiter, or the network, blocked the call until the time-out.
        """
        observations, actions = self._spaces
        ends = np.asarray(done, bool).reshape(self._n_envs)
        is_cut = np.zeros(self._n_envs, bool)
        if self._handles_time_limits:
            is_cut[: len(infos)] = [bool(info.get("TimeLimit.truncated", False)) for info in infos]
        narrow = np.float32 if actions.dtype == np.float64 else actions.dtype  # as Stable-Baselines3 stores actions
        step = {
            "observation": self._stored(obs, observations),
            "action": np.asarray(action, narrow).reshape(self._n_envs, -1),
            "next_observation": self._stored(next_obs, observations),
            "reward": np.asarray(reward, np.float32).reshape(self._n_envs, 1),
            "done": (ends & ~is_cut).astype(np.float32)[:, None],
        }
        # A row has both observations, so the last row of an episode has an action.
        kinds = np.uint8(ACTION) | self._begins * np.uint8(FIRST) | ends * np.uint8(LAST)
        self._observer.write_row(step, kinds | (ends & ~is_cut) * np.uint8(TERMINAL))
        self._begins = ends.copy()  # `done` may be the caller's array

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        """Return a batch of transitions; wait until the table has enough.

        Batches are fetched ahead, so a batch may have been drawn before the last few calls of `add`.

        Args:
            batch_size: number of transitions, >= 1. A change drops the batches that were fetched ahead.
            env: a `VecNormalize`, which normalizes observations and rewards; None for no normalization.

        Raises:
            SpecError: `batch_size` is invalid.
            ReplayTimeoutError: no batch arrived before the time-out; the message has the reason.
        """
        if self._dataset is not None and self._dataset.batch_size != batch_size:
            self._dataset.close()
            self._dataset = None
        if self._dataset is None:
            self._observer.flush(self._timeout_s)  # a new program can then sample its first transitions
            self._dataset = ReplayDataset(self._client, self._table, batch_size, timeout_s=self._timeout_s)
        step = tree.map_structure(lambda column: column[:, 0], next(self._dataset).data)  # windows of one step
        if env is not None:
            for name in ("observation", "next_observation"):
                step[name] = env.normalize_obs(step[name])
            step["reward"] = env.normalize_reward(step["reward"]).astype(np.float32)
        step = self._to_tensors(step)
        return ReplayBufferSamples(
            step["observation"], step["action"], step["next_observation"], step["done"], step["reward"]
        )

    def size(self) -> int:
        """Return the number of transitions in the table."""
        return self._client.server_info()[self._table].current_size

    def __repr__(self) -> str:
        return f"<ReplayBuffer on table {self._table} at {self._client.address}>"

    def close(self) -> None:
        """Deliver added transitions, and close the connection. Idempotent."""
        try:
            self._observer.close()
        finally:
            if self._dataset is not None:
                self._dataset.close()
            if self._owns_client:
                self._client.close()

    def __reduce__(self) -> Any:
        addresses = [shard.address for shard in self._client.shards]
        if not self._has_named_place:
            self._has_named_place = True
            text = (
                "The transitions are in table `%s` at %s, and not in the pickled file: it has only these names. A "
                "checkpoint of the server saves the transitions. To continue, make a ReplayBuffer with this table."
            )
            _LOG.warning(text, self._table, ", ".join(addresses))
        return dict, ({"table": self._table, "addresses": addresses},)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, observation: Any, space: Any) -> Any:
        """Return observations in the dtype and shape of their space; [1] for a discrete space."""
        if isinstance(observation, Mapping):
            return {str(name): self._stored(observation[name], space[name]) for name in observation}
        shape = space.shape if space.shape or not hasattr(space, "n") else (1,)
        return np.asarray(observation, space.dtype).reshape(self._n_envs, *shape)
