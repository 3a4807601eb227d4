"""Batches as PyTorch tensors: the rule of dtypes and devices, and an `IterableDataset` for every data set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError
from reverb_writer.lazy import needs
from reverb_writer.nests import map_present
from reverb_writer.slices.batch import Batch

with needs("`as_torch`", "reverb-writer[torch]"):
    import torch
    import torch.utils.data

# Dtypes that PyTorch lacks, or cannot compute with.
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class TensorConverter:
    """Converts batches to tensors on one device; strings become lists.

    On the CPU, tensors share the arrays' memory where PyTorch has the dtype. Unsigned integers that PyTorch cannot
    compute with get the next wider dtype.
    """

    def __init__(self, device: Any) -> None:
        """Set the device; None for the CPU. For a CUDA device, tensors are pinned and copied asynchronously.

        Raises:
            SpecError: `device` is a CUDA device, and PyTorch finds none.
        """
        self._device = None if device is None else torch.device(device)
        self._pins = self._device is not None and self._device.type == "cuda"
        if self._pins and not torch.cuda.is_available():
            raise SpecError(f"`device` is {str(device)!r}, but PyTorch finds no CUDA device. Pass None for the CPU.")

    def __call__(self, batch: Any) -> Any:
        """Return a nest of arrays, or a `Batch` with info and slices, as tensors. None stays None."""
        if isinstance(batch, Batch):
            return batch.map_arrays(self.tensor, self._info_tensor)
        return map_present(self.tensor, batch)

    def _info_tensor(self, array: Any) -> Any:
        """Return keys as int64 with the same bits, and float64 as float32, so that weights do not widen a loss."""
        if array.dtype == np.uint64:
            array = array.view(np.int64)
        return self.tensor(array.astype(np.float32) if array.dtype == np.float64 else array)

    def tensor(self, array: Any) -> Any:
        """Return an array, or a transform's tensor, as a tensor on the device; an array of strings as a list."""
        if isinstance(array, torch.Tensor):
            return array if self._device is None else array.to(self._device)
        if array.dtype.kind == "O":
            return array.tolist()
        if array.dtype.name == "bfloat16":
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array.astype(_WIDER.get(array.dtype, array.dtype), copy=False))
        if self._device is None:
            return tensor
        # A copy from pinned memory is asynchronous; the batch's own memory is not pinned.
        return (tensor.pin_memory() if self._pins else tensor).to(self._device, non_blocking=self._pins)


class TorchDataset(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]  # not installed where mypy runs
    """Batches as tensors: their data, kinds and slices, and the numbers of their info.

    In a `DataLoader`, each worker process opens its own data set. Pass `batch_size=None`, because this data set already
    makes batches.
    """

    def __init__(
        self,
        open_share: Callable[[int, int], AbstractContextManager[Any]],
        device: Any,
        dataset: Any = None,
        make: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap a data set: `dataset` in this process, or the share of a single worker if it is None.

        `open_share` gets the number of a worker and the number of workers, and opens that worker's share. `make` is
        applied to each batch of tensors. Both must be picklable for spawned workers.
        """
        super().__init__()
        self._open_share, self._to_tensors, self._dataset = open_share, TensorConverter(device), dataset
        self._make = make
        self._iterator: Iterator[Any] | None = None  # of `next`

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        if worker is None and self._dataset is not None:
            yield from map(self._convert, self._dataset)
        else:
            number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
            with self._open_share(number, num_workers) as dataset:
                yield from map(self._convert, dataset)

    def __next__(self) -> Any:
        """Return the next batch of this process."""
        if self._dataset is not None:  # an error would end a generator, and the next batch is still there
            return self._convert(next(self._dataset))
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def _convert(self, batch: Any) -> Any:
        tensors = self._to_tensors(batch)
        return tensors if self._make is None else self._make(tensors)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the data set of this process."""
        return {**self.__dict__, "_dataset": None, "_iterator": None}


def replay_view(dataset: Any, device: Any, make: Callable[[Any], Any] | None = None) -> TorchDataset:
    """Return the view of a dataset of replay tables. Each worker opens an equal dataset, as unpickling does."""
    return TorchDataset(functools.partial(_opened_anew, *dataset.__reduce__()), device, dataset, make)


def _opened_anew(open_dataset: Callable[..., Any], arguments: tuple[Any, ...], *_: int) -> Any:
    return open_dataset(*arguments)
