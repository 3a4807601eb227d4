"""The dm-reverb table of a `TableConfig`."""

from __future__ import annotations

from typing import Any

import reverb
import tensorflow as tf
import tree
from reverb import pybind

from reverb_writer.errors import SpecError
from reverb_writer.protocol import messages
from reverb_writer.tables import Selector, TableConfig
from reverb_writer.tables.table_messages import write_selector


def reverb_table(config: TableConfig) -> reverb.Table:
    """Return a new, empty table.

    Raises:
        SpecError: A leaf of the signature has no shape, or no dtype of TensorFlow.
    """
    balance = config.rate_limiter.balance
    return reverb.Table(
        name=config.name,
        sampler=_selector(config.sampler),
        remover=_selector(config.remover),
        max_size=config.max_size,
        rate_limiter=reverb.rate_limiters.RateLimiter(
            samples_per_insert=balance.samples_per_insert,
            min_size_to_sample=balance.min_size,
            min_diff=balance.min_diff,
            max_diff=balance.max_diff,
        ),
        max_times_sampled=config.max_times_sampled,
        signature=_signature(config),
    )


def _selector(selector: Selector) -> Any:
    options = messages.KeyDistributionOptions()
    write_selector(selector, options)
    return pybind.selector_from_proto(options.SerializeToString())


def _signature(config: TableConfig) -> Any:
    if config.signature is None:
        return None

    def spec(leaf: Any) -> tf.TensorSpec:
        try:
            return tf.TensorSpec(leaf.shape, leaf.dtype, getattr(leaf, "name", None) or None)
        except (AttributeError, TypeError, ValueError) as error:
            where, expected = f"table `{config.name}`: a leaf of `signature`", "an object with `shape` and `dtype`"
            raise SpecError(f"{where} must be {expected}, such as ArraySpec, got {leaf!r}.") from error

    return tree.map_structure(spec, config.signature)
