"""A dataset as PyTorch's `IterableDataset`: batches of tensors, on the device that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError
from reverb_writer.extras import needs

with needs("`as_torch`", "reverb-writer[torch]"):
    import torch
    import torch.utils.data

__all__ = ["TorchDataset", "tensor_of"]

# What PyTorch has no dtype for, or computes nothing with.
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class TorchDataset(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]  # not installed where mypy runs
    """Batches whose leaves are tensors; keys and other numbers of `info` stay NumPy arrays.

    In `DataLoader` workers each worker opens a dataset of its own, so that each fetches and decodes in its own process;
    start them with `spawn`, and pass `batch_size=None`: batches are batches already.
    """

    def __init__(self, open_dataset: Callable[[], Any], dataset: Any, device: Any) -> None:
        """Wrap a dataset.

        Args:
            open_dataset: makes another one like it, in a worker; must be picklable for workers.
            dataset: the one to iterate over in this process.
            device: where tensors go; None for the CPU. For CUDA they are pinned and copied without waiting.

        Raises:
            SpecError: it is a CUDA device, and PyTorch finds none.
        """
        super().__init__()
        self._open = open_dataset
        self._dataset = dataset
        self._device = None if device is None else torch.device(device)
        self._pins = self._device is not None and self._device.type == "cuda"
        if self._pins and not torch.cuda.is_available():
            raise SpecError(f"`device` is {str(device)!r}, but PyTorch finds no CUDA device. Pass None for the CPU.")

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches, without end."""
        if torch.utils.data.get_worker_info() is not None:
            with self._open() as dataset:
                for batch in dataset:
                    yield batch.map_arrays(self._tensor)
        else:
            for batch in self._dataset:
                yield batch.map_arrays(self._tensor)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs; the dataset of this process stays here."""
        return {**self.__dict__, "_dataset": None}

    def _tensor(self, array: Any) -> Any:
        tensor = tensor_of(array)
        if self._device is None or isinstance(tensor, list):
            return tensor
        # A copy from pinned memory does not wait; the batch's own memory is not pinned.
        return (tensor.pin_memory() if self._pins else tensor).to(self._device, non_blocking=self._pins)


def tensor_of(array: Any) -> Any:
    """Return an array as a tensor that shares its memory, where PyTorch has the dtype; strings as a list."""
    if array.dtype.kind == "O":
        return array.tolist()
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(_WIDER.get(array.dtype, array.dtype), copy=False))
