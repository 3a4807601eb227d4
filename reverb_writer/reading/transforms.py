"""Functions of a batch: frames stacked when they are sampled, and the burn-in of a recurrent network.

    stored once      f0 f1 f2 f3 f4              each frame of an episode, in whatever windows
    frame_stack(3)   f0 f0 f0 f1 f2              [B, T, ...] -> [B, T, 3, ...], the newest frame last
                     f0 f0 f1 f2 f3              before an episode's first frame, or the window's: that frame
                     f0 f1 f2 f3 f4

Pure. On NumPy arrays; `burn_in` also on the arrays of frameworks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer.arguments import integer
from reverb_writer.errors import StructureError
from reverb_writer.nests import fields_of, named_leaves, shapes_text
from reverb_writer.slices import read_markers
from reverb_writer.slices.axes import taken
from reverb_writer.slices.batch import Batch
from reverb_writer.slices.boundaries import first_rows
from reverb_writer.transitions.step_flags import split_mask


def frame_stack(k: int, leaf: str = "observation", *, drop: bool = False) -> Callable[[Batch], Batch]:
    """Return a `transform` that stacks each frame with the k - 1 before it, so that each is stored once; picklable.

    A stack never crosses the start of an episode, which any marker of starts or ends tells that `rw.slices` reads:
    there, and at the start of a window, the oldest frame known is repeated. Leaves [B, T, ...] become [B, T, k, ...];
    those of slices, [N, ...], become [N, k, ...].

    Args:
        k: frames in a stack, >= 1.
        leaf: name of the leaf, or of the part of the nest, such as "observation/rgb".
        drop: cut the first k - 1 rows of each window off all leaves [B, T, ...], for their stacks may lack frames:
            write windows of T + k - 1 steps.

    Raises:
        SpecError: `k` is no such number. The transform raises it if windows are too short to drop rows, or these are
            slices; and StructureError if there is no such leaf, or the batch is a list, or flat without markers.
    """
    return functools.partial(_stacked, k=integer("k", k, minimum=1), leaf=leaf, drop=drop)


def _stacked(batch: Batch, *, k: int, leaf: str, drop: bool) -> Batch:
    rows, shape = _rows_of_stacks(batch, k)
    if batch.next is not None:
        return _stacked_with_next(batch, leaf, rows)

    def stack(frames: npt.NDArray[Any]) -> npt.NDArray[Any]:
        flat = frames.reshape(-1, *frames.shape[len(shape) :])
        return flat[rows].reshape(*shape, k, *flat.shape[1:])

    stacked = dataclasses.replace(batch, data=_with_part(batch.data, leaf.split("/"), stack, leaf))
    return burn_in(stacked, k - 1)[1] if drop else stacked


def _stacked_with_next(batch: Batch, leaf: str, rows: npt.NDArray[np.int64]) -> Batch:
    """Return slices with the rows after them: the stack of such a row continues that of the slice's last row."""
    slices, num_rows, path = batch.markers.slices, len(rows), leaf.split("/")
    of_last = rows[slices.first_rows + slices.lengths - 1]
    following = np.append(of_last[:, 1:], num_rows + np.arange(len(of_last))[:, None], axis=1)
    all_rows = np.append(rows, np.where(slices.cut_by_sampler[:, None], following, of_last), axis=0)
    frames_after: list[Any] = []
    _with_part(batch.next, path, frames_after.append, leaf)
    stacked_after: list[Any] = []

    def stack(frames: npt.NDArray[Any]) -> npt.NDArray[Any]:
        stacked: npt.NDArray[Any] = np.concatenate([frames, frames_after[len(stacked_after)]])[all_rows]
        stacked_after.append(stacked[num_rows:])
        return stacked[:num_rows]

    data = _with_part(batch.data, path, stack, leaf)
    after = _with_part(batch.next, path, lambda _: stacked_after.pop(0), leaf)
    return dataclasses.replace(batch, data=data, next=after)


def _rows_of_stacks(batch: Batch, k: int) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
    """Return [N, k] which row each frame of each stack is, and the leading sizes of the leaves: N, or B and T."""
    shape: tuple[int, ...]
    if batch.markers is not None:
        shape, starts = batch.markers.done.shape, batch.markers.slices.starts
        markers = read_markers(batch.data)
    else:
        shape = _windows_shape(batch, "`frame_stack`")
        starts = np.tile(np.arange(shape[1]) == 0, shape[0])
        markers = read_markers(tree.map_structure(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch.data))
    starts = starts | first_rows(markers, len(starts))
    numbers = np.arange(len(starts))
    first = np.maximum.accumulate(np.where(starts, numbers, 0))
    return np.maximum(numbers[:, None] - np.arange(k)[::-1], first[:, None]), shape


def burn_in(batch: Batch, n: int) -> tuple[Batch, Batch]:
    """Split windows after their first n steps: those that only warm up a recurrent network, and those that train it.

    Args:
        batch: leaves [B, T, ...], of any framework.
        n: steps of the first part, 0..T - 1.

    Returns:
        Two batches, leaves [B, n, ...] and [B, T - n, ...], with the same info but for `mask` and `lengths`.

    Raises:
        SpecError: `n` is no such number.
        StructureError: these are no windows of one length.

    Source: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning.
    """
    num_steps = _windows_shape(batch, "`burn_in`")[1]
    n = integer("n", n, minimum=0, maximum=num_steps - 1, hint=f"The windows have {num_steps} steps.")

    def part(start: int, stop: int) -> Batch:
        info, mask = batch.info, batch.info.mask
        lengths = info.lengths - start
        info = dataclasses.replace(
            info,
            lengths=lengths.clip(0, stop - start),
            mask=None if mask is None else mask[:, start:stop],
        )
        return Batch(tree.map_structure(lambda leaf: leaf[:, start:stop], batch.data), info)

    return part(0, n), part(n, num_steps)


def split_windows(n: int) -> Callable[[Batch], Batch]:
    """Return a `transform` that cuts each window into windows of n steps, and drops the steps left at its end.

    A batch of B windows of T steps becomes one of B * (T // n) windows. Each has the info of the window that it is of.

    Args:
        n: steps of a window, >= 1.

    Raises:
        SpecError: `n` is no such number. The transform raises it if windows have fewer steps than n, and StructureError
            if these are no windows of one length.

    Source: TF-Agents 0.19, `ReverbReplayBuffer.as_dataset(num_steps)`.
    """
    return functools.partial(_split, n=integer("n", n, minimum=1))


def _split(batch: Batch, *, n: int) -> Batch:
    num_windows, num_steps = _windows_shape(batch, "`split_windows`")
    n = integer("n", n, minimum=1, maximum=num_steps, hint=f"The windows have {num_steps} steps.")
    count = num_steps // n

    def split(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return leaf[:, : count * n].reshape(num_windows * count, n, *leaf.shape[2:])

    info = taken(batch.info, samples=np.repeat(np.arange(num_windows), count))
    begins = np.tile(np.arange(count) * n, num_windows)
    mask = None if batch.info.mask is None else split(batch.info.mask)
    info = dataclasses.replace(info, lengths=(info.lengths - begins).clip(0, n), mask=mask)
    return Batch(tree.map_structure(split, batch.data), info)


def _windows_shape(batch: Batch, what: str) -> tuple[int, ...]:
    """Return B and T of windows."""
    sizes = {tuple(np.shape(leaf)[:2]) for leaf in tree.flatten(batch.data)}
    if len(sizes) != 1 or len(shape := sizes.pop()) < 2 or batch.markers is not None or shape[0] != len(batch.info):  # noqa: PLR2004  # B and T
        raise StructureError(
            f"{what} needs leaves [B, T, ...] with one T for all, got {shapes_text(batch.data)}. Use `collate='pad'` "
            "where lengths differ."
        )
    return shape


def _with_part(nest: Any, path: list[str], function: Any, leaf: str) -> Any:
    """Return a nest with a function applied to the leaves of one part of it."""
    if not path:
        return tree.map_structure(function, nest)
    steps, mask = split_mask(nest)
    if mask is not None:
        return _with_part(steps, path, function, leaf), mask
    name, *rest = path
    fields = fields_of(nest) or {}
    if name not in fields:
        paths = ", ".join(f"`{one}`" for one in named_leaves(nest, "the batch")[0])
        raise StructureError(f"`frame_stack`: a batch without `{leaf}`; its leaves there are {paths}.")
    part = _with_part(fields[name], rest, function, leaf)
    if isinstance(nest, Mapping):
        return {**nest, name: part}
    return nest._replace(**{name: part})
