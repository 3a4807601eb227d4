"""The base class of data sets of rollout files, whatever the file format."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from reverb_writer.arguments import integer


class RolloutFileBase:
    """Trajectories from files as if `num_envs` environments stepped through them.

    A subclass implements `reset_all`, `refresh_handlers`, `get_buffer` and `fill_transition`. Not thread-safe.

    Attributes:
        data_dir: folder of the files.
        num_envs: N, environments that step together.
        device: None for NumPy arrays, or the device of PyTorch tensors.
        all_env_ids: [N], 0..N-1.
    """

    def __init__(self, data_dir: Any, num_envs: int, device: Any = None) -> None:
        """Set the location of the files; they are read when they are first needed.

        Args:
            data_dir: folder of the files, in the form that the subclass documents.
            num_envs: N, >= 1.
            device: None for NumPy arrays, or the device of PyTorch tensors, such as "cpu".
        """
        self.data_dir = data_dir
        self.num_envs = integer("num_envs", num_envs, minimum=1)
        self.device = device
        self.all_env_ids = np.arange(self.num_envs)
        self._is_initialized = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.data_dir}: {self.num_envs} environments>"

    def reset(self, env_ids: Any = None) -> None:
        """Start again from the first trajectories, or give some environments their next trajectory.

        Args:
            env_ids: numbers of environments, each of which gets its next trajectory once; None to start again.

        Raises:
            SpecError: there is no such environment.
        """
        if env_ids is None or not self._is_initialized:
            self._is_initialized = True
            self.reset_all()
        else:
            last = self.num_envs - 1
            chosen = [integer("env_ids", operator.index(env), minimum=0, maximum=last) for env in env_ids]
            self.refresh_handlers([*dict.fromkeys(chosen)])

    def get_batch(self, num_transitions_per_env: int | None = None) -> Any:
        """Return the next transitions of each environment.

        Args:
            num_transitions_per_env: T, >= 1; None for one, without the dimension T.

        Returns:
            The buffer of `get_buffer`, filled: leaves [N, ...], or [T, N, ...]; owned by the caller.

        Raises:
            StopIteration: nothing is left for any environment.
        """
        if num_transitions_per_env is not None:
            integer("num_transitions_per_env", num_transitions_per_env, minimum=1)
        if not self._is_initialized:
            self.reset()
        buffer = self.get_buffer(num_transitions_per_env)
        self.fill_transition(buffer)
        if self.device is None:
            return buffer
        from reverb_writer.reading.views.torch import TensorConverter  # noqa: PLC0415  # brings PyTorch

        return TensorConverter(self.device)(buffer)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of the batches, for a `DataLoader` with any number of workers.

        Pass `batch_size=None` to the loader: the data set makes the batches. Each worker reads its own share of
        the trajectories, so together they deliver each one as often as a single reader does.

        Args:
            device: of the tensors; None for the CPU. Workers of a data loader should use the CPU.
        """
        from reverb_writer.reading.views.torch import TorchDataset  # noqa: PLC0415  # brings PyTorch

        return TorchDataset(functools.partial(_open_share, self), self.device if device is None else device)

    def shard(self, index: int, num_shards: int) -> None:
        """Read only each `num_shards`-th trajectory, from number `index` on, from the next reset on."""
        raise NotImplementedError

    def reset_all(self) -> None:
        """Look for files, and give each environment its first trajectory."""
        raise NotImplementedError

    def refresh_handlers(self, env_ids: Sequence[int]) -> None:
        """Give the environments `env_ids` their next trajectory, even if the current one has not ended."""
        raise NotImplementedError

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        """Make a batch of zeros: leaves [N, ...], or [T, N, ...], where T is `num_transitions_per_env`."""
        raise NotImplementedError

    def fill_transition(self, buffer: Any, env_ids: Sequence[int] | None = None) -> Any:
        """Copy the next transitions of the environments `env_ids`, or of all, into `buffer`, and return it.

        Raises:
            StopIteration: nothing is left for any environment.
        """
        raise NotImplementedError

    def __iter__(self) -> Any:
        """Start again from the beginning."""
        self.reset()
        return self

    def __next__(self) -> Any:
        """Return the next batch, of one transition of each environment."""
        return self.get_batch()


def _open_share(dataset: RolloutFileBase, index: int, num_shards: int) -> contextlib.AbstractContextManager[Any]:
    """Return a copy of a data set that reads one share of the trajectories, as arrays."""
    share = copy.copy(dataset)
    share.device = None
    if num_shards > 1:
        share.shard(index, num_shards)
    return contextlib.nullcontext(share)
