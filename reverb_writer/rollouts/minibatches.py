"""Minibatches of a rollout: every row is in every epoch once, in parts that differ by one row or environment at most.

    shuffled    rows of all environments mixed                    [N, ...]
    recurrent   whole environments; observations by trajectory    [T, n, ...] padded, the rest [T, b, ...]
    contiguous  whole environments; everything by trajectory      [N, ...] end to end

`columns` are those of a storage, in the order of time, by field of the minibatch: leaves [T, B, ...], None where there
are none, and hidden states [T, layers, B, H].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.rollouts.arrays import Arrays, flat_rows
from reverb_writer.rollouts.trajectories import pad
from reverb_writer.rollouts.transitions import ContiguousMiniBatch
from reverb_writer.slices import Trajectories
from reverb_writer.slices.boundaries import positions

__all__ = ["contiguous", "recurrent", "shuffled"]

_OBSERVED = ("obs", "critic_obs", "next_obs", "next_critic_obs")
"""What a recurrent network reads, and so is padded."""

Columns = Mapping[str, Any]
Indices = npt.NDArray[np.int64]


class _Part(NamedTuple):
    """Some of the environments, and their trajectories: numbers, or a slice of them."""

    environments: Indices | slice
    trajectories: Indices | slice


def shuffled(
    arrays: Arrays, batch: Any, columns: Columns, num_parts: int, num_epochs: int, rng: np.random.Generator
) -> Iterator[Any]:
    """Yield `num_parts` minibatches an epoch, of rows in an order that is drawn anew for each epoch."""
    flat = {field: flat_rows(nest) for field, nest in columns.items() if nest is not None and field != "hidden_states"}
    num_rows = tree.flatten(flat["obs"])[0].shape[0]
    for _ in range(num_epochs):
        for part in np.array_split(rng.permutation(num_rows), num_parts):
            rows = arrays.asarray(part)
            yield _make(batch, {field: arrays.take(nest, rows) for field, nest in flat.items()})


def recurrent(
    arrays: Arrays,
    batch: Any,
    columns: Columns,
    trajectories: Trajectories,
    num_parts: int,
    num_epochs: int,
    rng: np.random.Generator | None,
) -> Iterator[Any]:
    """Yield `num_parts` minibatches an epoch; with a generator, of environments drawn anew for each epoch.

    Without one, leaves are views of the storage, or of what all minibatches share.
    """
    padded, masks = pad(
        arrays, {field: columns[field] for field in _OBSERVED if columns.get(field) is not None}, trajectories
    )
    whole = {
        field: nest
        for field, nest in columns.items()
        if nest is not None and field not in (*_OBSERVED, "hidden_states")
    }
    for _ in range(num_epochs):
        for part in _parts(trajectories, num_parts, rng):
            found = {field: _columns_of(arrays, nest, part.trajectories) for field, nest in padded.items()}
            found |= {field: _columns_of(arrays, nest, part.environments) for field, nest in whole.items()}
            found["masks"] = _columns_of(arrays, masks, part.trajectories)
            found["hidden_states"] = _states(arrays, columns["hidden_states"], trajectories, part)
            yield _make(batch, found)


def contiguous(
    arrays: Arrays,
    batch: Any,
    columns: Columns,
    trajectories: Trajectories,
    num_parts: int,
    num_epochs: int,
    rng: np.random.Generator | None,
) -> Iterator[ContiguousMiniBatch]:
    """Yield `num_parts` minibatches an epoch, as `recurrent`, laid end to end; all are copies."""
    flat = {field: flat_rows(nest) for field, nest in columns.items() if nest is not None and field != "hidden_states"}
    numbers = np.arange(len(trajectories))
    for _ in range(num_epochs):
        for part in _parts(trajectories, num_parts, rng):
            rows = arrays.asarray(trajectories.rows(numbers[part.trajectories]))
            lengths = trajectories.lengths[part.trajectories]
            found = {field: arrays.take(nest, rows) for field, nest in flat.items()}
            found["hidden_states"] = _states(arrays, columns["hidden_states"], trajectories, part)
            is_init = arrays.asarray(positions(lengths) == 0)
            yield ContiguousMiniBatch(_make(batch, found), is_init, arrays.asarray(lengths))


def _parts(trajectories: Trajectories, num_parts: int, rng: np.random.Generator | None) -> Iterator[_Part]:
    """Divide the environments; each brings all of its trajectories, which are ordered by environment."""
    num_environments = trajectories.storage_shape[1]
    edges = np.searchsorted(trajectories.lanes, np.arange(num_environments + 1))
    if rng is None:
        bounds = np.cumsum([0, *map(len, np.array_split(np.arange(num_environments), num_parts))])
        for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield _Part(slice(first, stop), slice(int(edges[first]), int(edges[stop])))
        return
    for drawn in np.array_split(rng.permutation(num_environments), num_parts):
        counts = edges[drawn + 1] - edges[drawn]
        yield _Part(drawn, np.repeat(edges[drawn], counts) + positions(counts))


def _columns_of(arrays: Arrays, nest: Any, which: Indices | slice) -> Any:
    if isinstance(which, slice):
        return tree.map_structure(lambda leaf: leaf[:, which], nest)
    indices = arrays.asarray(which)
    return tree.map_structure(lambda leaf: arrays.xp.take(leaf, indices, axis=1), nest)


def _states(arrays: Arrays, nest: Any, trajectories: Trajectories, part: _Part) -> Any:
    """Return [layers, n, H]: the states at the first rows of trajectories, of leaves [T, layers, B, H]."""
    if nest is None:
        return None
    starts, lanes = trajectories.starts[part.trajectories], trajectories.lanes[part.trajectories]

    def take(leaf: Any) -> Any:
        num_layers, num_environments = leaf.shape[1:3]
        rows = (starts * num_layers + np.arange(num_layers)[:, None]) * num_environments + lanes
        found = arrays.xp.take(leaf.reshape((-1, *leaf.shape[3:])), arrays.asarray(rows.ravel()), axis=0)
        return found.reshape((num_layers, len(starts), *leaf.shape[3:]))

    return tree.map_structure(take, nest)


def _make(batch: Any, found: dict[str, Any]) -> Any:
    for observed, by_critic in (("obs", "critic_obs"), ("next_obs", "next_critic_obs")):
        found.setdefault(by_critic, found.get(observed))
    return batch(**{field: found.get(field) for field in batch._fields})
