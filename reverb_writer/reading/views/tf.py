"""A `ReplayDataset` as a `tf.data.Dataset`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tree

__all__ = ["tf_dataset"]


def tf_dataset(dataset: Any) -> Any:
    """Return a `tf.data.Dataset` of pairs: the nest of a batch, and a dict of the numbers of its info.

    The element spec is taken from the first batch, which is then the first element. Sizes B and T are left open, for a
    last batch may be smaller; all others are known. As everywhere in `tf.data`, lists become tuples.
    """
    first = next(dataset)
    head = _element(first)

    def batches() -> Iterator[Any]:
        for batch in itertools.chain([first] if not started else [], dataset):
            started.append(True)
            yield _element(batch)

    started: list[bool] = []
    return tf.data.Dataset.from_generator(batches, output_signature=tree.map_structure(_spec, head))


def _element(batch: Any) -> Any:
    info = batch.info
    numbers = {
        "keys": info.keys,
        "priorities": info.priorities,
        "probabilities": info.probabilities,
        "table_sizes": info.table_sizes,
        "times_sampled": info.times_sampled,
        "lengths": info.lengths,
    }
    if info.mask is not None:
        numbers["mask"] = info.mask
    return _tuples(batch.data), numbers


def _tuples(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _tuples(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return tuple(map(_tuples, nest))
    if isinstance(nest, tuple):
        values = map(_tuples, nest)
        return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)
    return nest


def _spec(array: Any) -> Any:
    dtype = tf.string if array.dtype == np.object_ else tf.as_dtype(array.dtype)
    open_sizes = min(array.ndim, 2)
    return tf.TensorSpec((None,) * open_sizes + array.shape[open_sizes:], dtype)
