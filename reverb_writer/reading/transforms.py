"""Functions of a batch: frame stacks, and the burn-in of a recurrent network.

    stored once      f0 f1 f2 f3 f4              each frame of an episode
    frame_stack(3)   f0 f0 f0 f1 f2              [B, T, ...] -> [B, T, 3, ...], the newest frame last
                     f0 f0 f1 f2 f3              the first frame of an episode or window replaces earlier ones
                     f0 f1 f2 f3 f4

Pure. They take NumPy arrays; `burn_in` also takes the arrays of frameworks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.arguments import integer
from reverb_writer.errors import StructureError
from reverb_writer.nests import leaf_at, shapes_text
from reverb_writer.rows.layouts import steps_and_mask
from reverb_writer.slices.axes import taken
from reverb_writer.slices.batch import Batch


def frame_stack(k: int, leaf: str = "observation", *, drop: bool = False) -> Callable[[Batch], Batch]:
    """Return a picklable `transform` that stacks each frame with the k - 1 frames before it; storage has each once.

    A stack never crosses the start of an episode, which the kinds of rows show. There, and at the start of a window or
    slice, the oldest known frame is repeated. Leaves [B, T, ...] become [B, T, k, ...]; leaves of slices, [N, ...],
    become [N, k, ...].

    Args:
        k: frames in a stack, >= 1.
        leaf: name of the leaf, or of the part of the nest, such as "observation/rgb".
        drop: whether to remove the first k - 1 rows of each window from all leaves [B, T, ...], because their stacks
            may lack frames: write windows of T + k - 1 steps.

    Raises:
        SpecError: `k` is out of range. The transform raises SpecError if windows are too short to drop rows, or if rows
            of slices would be dropped. It raises StructureError if the leaf does not exist, or no leaf
            shows where episodes end.
    """
    return functools.partial(_stacked, k=integer("k", k, minimum=1), leaf=leaf, drop=drop)


def _stacked(batch: Batch, *, k: int, leaf: str, drop: bool) -> Batch:
    steps, column = steps_and_mask(batch.data)
    slices = batch.slices
    shape = _windows_shape(batch, "`frame_stack`") if slices is None else (len(slices.rows),)
    starts = np.broadcast_to(np.arange(shape[-1]) == 0 if slices is None else slices.starts, shape)
    leaf_at(steps, leaf)  # raises an error that names the leaves
    wanted = leaf.split("/") if column is None else ["0", *leaf.split("/")]
    kinds = batch.row_kinds
    if kinds is None:  # rows after a last row begin an episode, or are padding, whose stacks have no meaning
        real = np.ones(shape, bool)
        kinds = rows.kinds_of(batch.data, mask=real, last_row=batch.last_row, starts=starts, outcome=False)
    begins = (rows.first_rows(kinds, starts) | starts).reshape(-1)
    numbers = np.arange(len(begins))
    first = np.maximum.accumulate(np.where(begins, numbers, 0))
    of_stack = np.maximum(numbers[:, None] - np.arange(k)[::-1], first[:, None])  # rows of the frames of each stack

    def is_wanted(path: tuple[Any, ...]) -> bool:
        return list(map(str, path[: len(wanted)])) == wanted

    def stack(path: tuple[Any, ...], stored: npt.NDArray[Any]) -> Any:
        if not is_wanted(path):
            return stored
        sizes = stored.shape[len(shape) :]
        return stored.reshape(len(begins), *sizes)[of_stack].reshape(*shape, k, *sizes)

    def stack_after(path: tuple[Any, ...], stacks: npt.NDArray[Any], after: npt.NDArray[Any]) -> Any:
        """Return the stacks of the rows after slices, which continue the stacks of the slices' last rows."""
        if not is_wanted(path):
            return after
        cut = slices.cut_by_sampler
        of_last = stacks[slices.first_rows + slices.lengths - 1]
        of_last[cut] = np.concatenate([of_last, after[:, None]], axis=1)[cut, 1:]
        return of_last

    data = tree.map_structure_with_path(stack, batch.data)
    after = batch.next and tree.map_structure_with_path(stack_after, data, batch.next)
    stacked = dataclasses.replace(batch, data=data, next=after)
    return burn_in(stacked, k - 1)[1] if drop else stacked


def burn_in(batch: Batch, n: int) -> tuple[Batch, Batch]:
    """Split windows into their first n steps, which only warm up a recurrent network, and the steps that train it.

    Args:
        batch: leaves [B, T, ...], of any framework.
        n: steps of the first part, 0..T - 1.

    Returns:
        Two batches, leaves [B, n, ...] and [B, T - n, ...], with the same info except `lengths`. Rows keep their kinds.

    Raises:
        SpecError: `n` is out of range.
        StructureError: the batch does not have windows of equal length.

    Source: Kapturowski et al. 2019, Recurrent Experience Replay in Distributed Reinforcement Learning.
    """
    num_steps = _windows_shape(batch, "`burn_in`")[1]
    n = integer("n", n, minimum=0, maximum=num_steps - 1, hint=f"The windows have {num_steps} steps.")

    kinds = _kinds(batch)

    def part(start: int, stop: int) -> Batch:
        lengths = (batch.info.lengths - start).clip(0, stop - start)
        return dataclasses.replace(
            batch,
            data=tree.map_structure(lambda leaf: leaf[:, start:stop], batch.data),
            info=dataclasses.replace(batch.info, lengths=lengths),
            row_kinds=None if kinds is None else kinds[:, start:stop],
        )

    return part(0, n), part(n, num_steps)


def split_windows(n: int) -> Callable[[Batch], Batch]:
    """Return a `transform` that cuts each window into windows of n steps, and drops the remaining steps at its end.

    A batch of B windows of T steps becomes a batch of B * (T // n) windows. Each has the info of its original window.

    Args:
        n: steps of a window, >= 1.

    Raises:
        SpecError: `n` is out of range. The transform raises SpecError if windows have fewer than n steps, and
            StructureError if the batch does not have windows of equal length.

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
    info = dataclasses.replace(info, lengths=(info.lengths - begins).clip(0, n))
    kinds = _kinds(batch)
    row_kinds = None if kinds is None else split(kinds)
    return dataclasses.replace(batch, data=tree.map_structure(split, batch.data), info=info, row_kinds=row_kinds)


def _kinds(batch: Batch) -> Any:
    """Return the kinds of rows, stored or as the whole windows show them, which parts may not show; else None."""
    try:
        return batch.kinds
    except StructureError:  # `kinds` of the parts raises it again, when they are needed
        return None


def _windows_shape(batch: Batch, what: str) -> tuple[int, ...]:
    """Return B and T of windows."""
    sizes = {tuple(np.shape(leaf)[:2]) for leaf in tree.flatten(batch.data)}
    shape = sizes.pop() if len(sizes) == 1 else ()
    if len(shape) != 2 or shape[0] != len(batch.info) or batch.slices is not None:  # noqa: PLR2004
        raise StructureError(
            f"{what} needs leaves [B, T, ...] with equal T, got {shapes_text(batch.data)}. Use `collate='pad'` "
            "if lengths differ."
        )
    return shape
