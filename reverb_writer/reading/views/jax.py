"""A dataset as an iterator of JAX arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reverb_writer.lazy import needs

with needs("`as_jax`", "reverb-writer[jax]"):
    import jax


def jax_batches(dataset: Any, device: Any) -> Iterator[Any]:
    """Yield batches whose leaves are JAX arrays on `device`; strings stay NumPy arrays.

    JAX makes 64-bit numbers 32-bit ones unless `jax_enable_x64` is set.
    """

    def put(array: Any) -> Any:
        return array if array.dtype.kind == "O" else jax.device_put(array, device)

    for batch in dataset:
        yield batch.map_arrays(put)
