"""A dataset as a `tf.data.Dataset`, or Reverb's own dataset in the same form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import SpecError
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


def reverb_dataset(address: str, table: str, spec: Any, *, has_time: bool, batch_size: int, max_in_flight: int) -> Any:
    """Return `reverb.TrajectoryDataset` batched, as pairs: the nest of a batch, and a dict of the numbers of its info.

    It runs in TensorFlow's own threads. It decodes everything that a writer has stored, VARIANT tensors included: use
    it only if you trust all writers.

    Args:
        address: of the server.
        table: its name.
        spec: nest of `ArraySpec` of the table's items.
        has_time: whether the shapes in `spec` have the time dimension.
        batch_size: samples in a batch; of one length.
        max_in_flight: limit of samples fetched ahead.
    """
    with needs("`native`", "dm-reverb[tensorflow]"):
        import reverb  # noqa: PLC0415  # not a dependency
    if spec is None:
        raise SpecError(f"`native` needs the structure of table `{table}`: a signature, or an observer that stores it.")
    leaves = tree.flatten(_tuples(spec))
    shapes = [leaf.shape if has_time else (None, *leaf.shape) for leaf in leaves]
    samples = reverb.TrajectoryDataset(
        address,
        table,
        dtypes=tuple(tf.string if leaf.dtype == np.object_ else tf.as_dtype(leaf.dtype) for leaf in leaves),
        shapes=tuple(map(tf.TensorShape, shapes)),
        max_in_flight_samples_per_worker=max_in_flight,
    )

    def pair(sample: Any) -> Any:
        info = sample.info
        numbers = {
            "keys": info.key,
            "priorities": info.priority,
            "probabilities": info.probability,
            "table_sizes": info.table_size,
            "times_sampled": info.times_sampled,
        }
        return tree.unflatten_as(_tuples(spec), list(sample.data)), numbers

    return samples.map(pair).batch(batch_size).prefetch(1)


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
