"""Batches as PyTorch tensors: the rule of dtypes and devices, and an `IterableDataset` for every data set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from reverb_writer.errors import SpecError
from reverb_writer.lazy import needs
from reverb_writer.reading.views.forms import Form, converted

with needs("`as_torch`", "reverb-writer[torch]"):
    import torch
    import torch.utils.data

# Dtypes that PyTorch lacks, or cannot compute with.
_WIDER = {np.dtype(np.uint16): np.int32, np.dtype(np.uint32): np.int64, np.dtype(np.uint64): np.int64}


class TensorConverter:
    """Converts arrays to tensors on one device; strings stay NumPy arrays.

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

    def __call__(self, found: Any) -> Any:
        """Return a batch, transitions, or a nest of arrays, as tensors. None stays None."""
        return converted(found, self.tensor, self._info_tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorConverter) and self._device == other._device

    def __hash__(self) -> int:
        return hash(self._device)

    def __repr__(self) -> str:
        return f"TensorConverter(device={str(self._device or 'cpu')!r})"

    def _info_tensor(self, array: Any) -> Any:
        """Return keys as int64 with the same bits, and float64 as float32, so that weights do not widen a loss."""
        if array.dtype == np.uint64:
            array = array.view(np.int64)
        return self.tensor(array.astype(np.float32) if array.dtype == np.float64 else array)

    def tensor(self, array: Any) -> Any:
        """Return an array, or a transform's tensor, as a tensor on the device; strings and other leaves as they are."""
        if isinstance(array, torch.Tensor):
            return array if self._device is None else array.to(self._device)
        if not isinstance(array, np.ndarray) or array.dtype.kind == "O":
            return array
        if array.dtype.name == "bfloat16":
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array.astype(_WIDER.get(array.dtype, array.dtype), copy=False))
        if self._device is None:
            return tensor
        # A copy from pinned memory is asynchronous; the batch's own memory is not pinned.
        return (tensor.pin_memory() if self._pins else tensor).to(self._device, non_blocking=self._pins)


class TorchDataset(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]  # not installed where mypy runs
    """A data set that each worker process of a `DataLoader` opens for itself, and this process at its first use.

    Pass `batch_size=None` to the loader, because this data set already makes batches.
    """

    def __init__(
        self, open_share: Callable[[int, int], AbstractContextManager[Any]], convert: Callable[[Any], Any]
    ) -> None:
        """Take a function that opens a share, and the function that makes tensors of its batches.

        `open_share` gets the number of a worker and the number of workers. Both must be picklable for spawned workers.
        """
        super().__init__()
        self._open_share, self._convert = open_share, convert
        self._iterator: Iterator[Any] | None = None  # of `next`

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        with self._open_share(number, num_workers) as dataset:
            yield from map(self._convert, dataset)

    def __next__(self) -> Any:
        """Return the next batch of this process."""
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, without the iterator of this process."""
        return {**self.__dict__, "_iterator": None}


@functools.cache
def loadable(view: type[Any]) -> type[Any]:
    """Return the class of views that is also a data set of PyTorch: each worker of a `DataLoader` opens an equal view.

    The class of views is a parameter, because its module needs this one.
    """

    class TorchView(view, torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]  # as above
        """A view of a dataset as tensors."""

        def __reduce__(self) -> tuple[Any, ...]:
            """Return how to open an equal view at its first use, so that its errors reach the loader."""
            return TorchDataset, (functools.partial(_open_view, view, self.reader.__reduce__(), self._form), _unchanged)

    return TorchView


def _open_view(view: type[Any], opening: tuple[Any, ...], form: Form, *_: int) -> Any:
    open_reader, arguments = opening
    return view(open_reader(*arguments), form)


def _unchanged(batch: Any) -> Any:
    return batch
