"""Batches as PyTorch tensors, and a data set as an `IterableDataset`. PyTorch is imported on first use."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from reverb_writer.extras import needs
from reverb_writer.nests import map_present

__all__ = ["as_torch", "to_torch"]


def to_torch(batch: Any, device: Any) -> Any:
    """Return a nest of arrays as tensors, strings as lists; on the CPU tensors share the arrays' memory."""
    with needs("`device`", "reverb-writer[torch]"):
        from reverb_writer.reading.views.torch import tensor_of  # noqa: PLC0415  # brings PyTorch

    def convert(leaf: Any) -> Any:
        found = tensor_of(leaf)
        return found if isinstance(found, list) else found.to(device)

    return map_present(convert, batch)


def as_torch(dataset: Any, device: Any) -> Any:
    """Return a `torch.utils.data.IterableDataset` of a rollout data set's batches; picklable if the data set is."""
    return _iterable_dataset()(dataset, device)


@functools.cache
def _iterable_dataset() -> Any:
    with needs("`as_torch`", "reverb-writer[torch]"):
        from torch.utils.data import IterableDataset, get_worker_info  # noqa: PLC0415  # not a dependency

    class TorchRollouts(IterableDataset):  # type: ignore[misc, type-arg, unused-ignore]  # torch may not be installed
        def __init__(self, dataset: Any, device: Any) -> None:
            super().__init__()
            self.dataset = dataset
            self.device = device

        def __iter__(self) -> Iterator[Any]:
            dataset = copy.copy(self.dataset)
            dataset.device = None
            worker = get_worker_info()
            if worker is not None:
                dataset.shard(worker.id, worker.num_workers)
            for batch in dataset:
                yield to_torch(batch, self.device or "cpu")

        def __reduce__(self) -> Any:
            return as_torch, (self.dataset, self.device)

    return TorchRollouts
