"""A dataset as a `tf.data.Dataset`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tree

from reverb_writer.lazy import needs

with needs("`as_tf`", "tensorflow"):
    import tensorflow as tf


def tf_dataset(dataset: Any, num_open: int = 2) -> Any:
    """Return a `tf.data.Dataset` of pairs: the nest of a batch, and a dict of the arrays of its info and markers.

    This waits for the first batch, takes the element spec from it, and returns it as the first element. The first
    `num_open` sizes of each shape are None in the spec, because a last batch may be smaller. Lists become tuples, as
    `tf.data` requires. Batches that have `next` become triples, with it as the third.
    """
    first = next(dataset)
    head = _element(first)

    def batches() -> Iterator[Any]:
        for batch in itertools.chain([first] if not started else [], dataset):
            started.append(True)
            yield _element(batch)

    def spec(array: Any) -> Any:
        dtype = tf.string if array.dtype == np.object_ else tf.as_dtype(array.dtype)
        open_sizes = min(array.ndim, num_open)
        return tf.TensorSpec((None,) * open_sizes + array.shape[open_sizes:], dtype)

    started: list[bool] = []
    return tf.data.Dataset.from_generator(batches, output_signature=tree.map_structure(spec, head))


def _element(batch: Any) -> Any:
    pair = _tuples(batch.data), batch.numbers()
    return pair if batch.next is None else (*pair, _tuples(batch.next))


def _tuples(nest: Any) -> Any:
    if isinstance(nest, dict):
        return {key: _tuples(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return tuple(map(_tuples, nest))
    if isinstance(nest, tuple):
        values = map(_tuples, nest)
        return type(nest)(*values) if hasattr(nest, "_fields") else tuple(values)
    return nest
