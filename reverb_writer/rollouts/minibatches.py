"""Minibatches of a rollout: each epoch has each row once, in parts that differ by at most one row or environment.

    shuffled    rows of all environments mixed                    [N, ...]
    recurrent   whole environments; observations by trajectory    [T, n, ...] padded, the rest [T, b, ...]

`columns` has a storage's columns by field of the minibatch, in the order of time: leaves [T, B, ...] or None. Hidden
states are [T, B, layers, H]; a minibatch has the states of its trajectories' first rows, [layers, n, H].

Trajectories end where `dones` is set and at the last row; `slices` finds them:

    dones                 padded: one column per trajectory,
    (D is done)           zeros after its end

    env a  . . . D . .    a0 a4 b0 b3      mask  T T T T
    env b  . . D . . D    a1 a5 b1 b4            T T T T
                          a2 0  b2 b5            T . T T
                          a3 0  0  0             T . . .
                          0  0  0  0             . . . .
                          0  0  0  0             . . . .

Trajectories are ordered by environment, then by time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.errors import StructureError
from reverb_writer.nests import map_present
from reverb_writer.rollouts.array_nests import Arrays, flat_rows
from reverb_writer.slices import Trajectories, find_trajectories
from reverb_writer.slices.boundaries import positions

_OBSERVED = ("obs", "critic_obs", "next_obs", "next_critic_obs")
"""The fields that a recurrent network reads; these are padded."""

Indices = npt.NDArray[np.int64]
Chosen = Indices | slice


@dataclass(frozen=True)
class MiniBatches:
    """Iterators over minibatches: `num_parts` in each of `num_epochs` epochs."""

    arrays: Arrays  # the storage's arrays
    kind: Any  # the class of the minibatches
    columns: Mapping[str, Any]  # see the module's docstring
    num_parts: int  # number of minibatches in an epoch
    num_epochs: int  # number of passes over the rows
    rng: np.random.Generator  # draws the order of rows or environments

    def shuffled(self, rows_of_epoch: Indices) -> Iterator[Any]:
        """Yield minibatches of some rows, numbered t B + b, in a new random order for each epoch."""
        flat = {field: flat_rows(nest) for field, nest in self._present().items() if field != "is_real"}
        for _ in range(self.num_epochs):
            for part in np.array_split(self.rng.permutation(rows_of_epoch), self.num_parts):
                rows = self.arrays.asarray(part)
                yield self._make({field: self.arrays.take(nest, rows) for field, nest in flat.items()})

    def recurrent(self, trajectories: Trajectories, *, shuffle: bool) -> Iterator[Any]:
        """Yield minibatches of whole environments; observations are padded.

        Without `shuffle`, leaves are views of the storage, or of arrays that all minibatches share.
        """
        present = self._present()
        observed = {field: present.pop(field) for field in _OBSERVED if field in present}
        padded, masks = pad(self.arrays, observed, trajectories)
        for env_ids, numbers in self._parts(trajectories, shuffle):
            found = {field: self._columns_of(nest, numbers) for field, nest in padded.items()}
            found |= {field: self._columns_of(nest, env_ids) for field, nest in present.items()}
            found["masks"] = self._columns_of(masks, numbers)
            found["hidden_states"] = self._first_states(trajectories, numbers)
            yield self._make(found)

    def _present(self) -> dict[str, Any]:
        """Return the columns that are not None, without the hidden states."""
        return {field: nest for field, nest in self.columns.items() if nest is not None and field != "hidden_states"}

    def _parts(self, trajectories: Trajectories, shuffle: bool) -> Iterator[tuple[Chosen, Chosen]]:
        """Yield environments and the numbers of their trajectories, which are ordered by environment."""
        num_environments = trajectories.storage_shape[1]
        edges = np.searchsorted(trajectories.env_ids, np.arange(num_environments + 1))
        for _ in range(self.num_epochs):
            if not shuffle:
                for part in np.array_split(np.arange(num_environments), self.num_parts):
                    first, stop = int(part[0]), int(part[-1]) + 1
                    yield slice(first, stop), slice(int(edges[first]), int(edges[stop]))
            else:
                for part in np.array_split(self.rng.permutation(num_environments), self.num_parts):
                    counts = edges[part + 1] - edges[part]
                    yield part, np.repeat(edges[part], counts) + positions(counts)

    def _columns_of(self, nest: Any, which: Chosen) -> Any:
        if isinstance(which, slice):
            return tree.map_structure(lambda leaf: leaf[:, which], nest)
        indices = self.arrays.asarray(which)
        return tree.map_structure(lambda leaf: self.arrays.xp.take(leaf, indices, axis=1), nest)

    def _first_states(self, trajectories: Trajectories, numbers: Chosen) -> Any:
        """Return the hidden states at the first rows of trajectories, leaves [layers, n, H], or None."""
        first = self.arrays.asarray(
            (trajectories.starts * trajectories.storage_shape[1] + trajectories.env_ids)[numbers]
        )

        def take(leaf: Any) -> Any:
            found = self.arrays.take(flat_rows(leaf), first)  # [n, layers, ...]
            return self.arrays.xp.stack([found[:, layer] for layer in range(leaf.shape[2])])

        return map_present(take, self.columns["hidden_states"])

    def _make(self, found: dict[str, Any]) -> Any:
        for observed, by_critic in (("obs", "critic_obs"), ("next_obs", "next_critic_obs")):
            found.setdefault(by_critic, found.get(observed))
        return self.kind(**{field: found.get(field) for field in self.kind._fields})


def split_and_pad_trajectories(nest: Any, dones: Any) -> tuple[Any, Any]:
    """Return each trajectory of a rollout in its own column, [T, n, ...], and masks [T, n], True on real rows.

    Columns are copies, padded with zeros to T rows.

    Args:
        nest: leaves [T, B, ...], all of NumPy or all of PyTorch.
        dones: [T, B] or [T, B, 1], not 0 on the last row of an episode; not changed.

    Raises:
        StructureError: a leaf does not have the rows of `dones`.

    Source: instinct_rl's `split_and_pad_trajectories`, which leaves padding uninitialised.

    >>> padded, masks = split_and_pad_trajectories(np.array([[1], [2], [3]]), np.array([[0], [1], [0]]))
    >>> padded.tolist(), masks.tolist()
    ([[1, 3], [2, 0], [0, 0]], [[True, True], [True, False], [False, False]])
    """
    arrays = _arrays_of(dones)
    return pad(arrays, nest, find(arrays, arrays.asarray(dones)))


def unpad_trajectories(padded: Any, masks: Any) -> Any:
    """Join padded trajectories to a rollout, leaves [T, B, ...]: the inverse of `split_and_pad_trajectories`.

    Differentiable.

    Args:
        padded: leaves [T, n, ...], such as a recurrent network's outputs for padded trajectories.
        masks: [T, n], True on real rows, which come first in each column.

    Raises:
        StructureError: a leaf has another shape, or the real rows do not fill environments of T rows each.

    >>> unpad_trajectories(np.array([[1, 3], [2, 0], [0, 0]]), np.array([[1, 1], [1, 0], [0, 0]]) != 0).tolist()
    [[1], [2], [3]]
    """
    arrays = _arrays_of(masks)
    is_real = arrays.to_numpy(masks) != 0
    if any(tuple(leaf.shape[:2]) != is_real.shape for leaf in tree.flatten(padded)) or is_real.sum() % len(is_real):
        shapes = tree.map_structure(lambda leaf: tuple(leaf.shape), padded)
        raise StructureError(
            f"`padded` must be [T, n, ...] and `masks` [T, n] with a multiple of T real rows, got {shapes} and "
            f"{is_real.shape} with {is_real.sum()} real rows."
        )
    num_rows, num_columns = is_real.shape
    column, row = np.nonzero(is_real.T)  # by environment, then by time
    rows = (row * num_columns + column).reshape(-1, num_rows).T.ravel()
    found = arrays.take(flat_rows(padded), arrays.asarray(rows))
    return tree.map_structure(lambda leaf: leaf.reshape((num_rows, -1, *leaf.shape[1:])), found)


def find(arrays: Arrays, dones: Any) -> Trajectories:
    """Return the trajectories of rows [T, B] that end at flags [T, B] or [T, B, 1]."""
    is_last = arrays.to_numpy(dones).reshape(dones.shape[:2]) != 0
    return find_trajectories(np.where(is_last, rows.ACTION | rows.LAST, rows.ACTION).astype(np.uint8))


def pad(arrays: Arrays, nest: Any, trajectories: Trajectories) -> tuple[Any, Any]:
    """Return each trajectory in its own column, padded with zeros, and the masks."""
    num_rows, _ = trajectories.storage_shape
    num_columns = len(trajectories)
    lengths = trajectories.lengths
    source = arrays.asarray(trajectories.rows())
    target = arrays.asarray(positions(lengths) * num_columns + np.repeat(np.arange(num_columns), lengths))

    def padded(leaf: Any) -> Any:
        if tuple(leaf.shape[:2]) != trajectories.storage_shape:
            raise StructureError(f"shape {tuple(leaf.shape)}, expected rows {trajectories.storage_shape}, as `dones`.")
        out = arrays.zeros((num_rows * num_columns, *leaf.shape[2:]), leaf.dtype)
        out[target] = arrays.xp.take(leaf.reshape((-1, *leaf.shape[2:])), source, axis=0)
        return out.reshape((num_rows, num_columns, *leaf.shape[2:]))

    masks = arrays.asarray(np.arange(num_rows)[:, None] < lengths)
    return tree.map_structure(padded, nest), masks


def _arrays_of(flags: Any) -> Arrays:
    return Arrays(flags.device if hasattr(flags, "detach") else None)
