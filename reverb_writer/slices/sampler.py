"""Draw slices of trajectories: integers only.

A slice is a run of rows within one trajectory of n rows. Let L be `slice_len`. With `span`, a slice may begin up to
`left` rows before the trajectory and end up to `right` rows after it; the rows outside are dropped. So the slices are:

    a slice from each row -left ... n - L + right, which has the existing ones of its L rows;
    if this range is empty (usually because n < L): one slice, the whole trajectory

These are max(1, n - L + left + right + 1) slices. "trajectory" draws a trajectory, then one of its slices; "row" draws
one of the slices of all trajectories. Both are uniform, or in proportion to priorities. By trajectory, rows of short
episodes are drawn more often than others. By row, only rows near the edges are drawn less often; with a `span` of
L - 1, every row is in exactly L slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError
from reverb_writer.slices.axes import ROWS, SAMPLES
from reverb_writer.slices.boundaries import Trajectories, positions
from reverb_writer.slices.markers import Flags, Integers

By = Literal["trajectory", "row"]
Short = Literal["keep", "skip", "pad"]


@dataclass(frozen=True)
class Slices:
    """Rows of a storage that form slices, laid end to end.

    Attributes:
        rows: [N] flat index of each row in the storage, padding included.
        lengths: [S] rows of each slice without padding.
        widths: [S] rows of each slice with padding.
        trajectories: [S] number of the trajectory of each slice.
        cut_by_sampler: [S] whether the trajectory continues after the slice.
        probabilities: [S] probability of each slice in one draw.
        is_padded: whether batches have a mask, even if no slice needs padding.
        storage_shape: `Trajectories.storage_shape`.
        next_rows: [S] flat index of the row that follows each slice in its trajectory, or of the slice's last row if
            the trajectory ends there (`cut_by_sampler` is False).
    """

    rows: Integers = field(metadata=ROWS)
    lengths: Integers = field(metadata=SAMPLES)
    widths: Integers = field(metadata=SAMPLES)
    trajectories: Integers = field(metadata=SAMPLES)
    cut_by_sampler: Flags = field(metadata=SAMPLES)
    probabilities: npt.NDArray[np.float64] = field(metadata=SAMPLES)
    is_padded: bool
    storage_shape: tuple[int, ...]
    next_rows: Integers = field(metadata=SAMPLES)

    @property
    def first_rows(self) -> Integers:
        """[S] first row of each slice among the N rows."""
        return np.cumsum(self.widths) - self.widths

    @property
    def starts(self) -> Flags:
        """[N] True on the first row of each slice."""
        return self._marked(self.first_rows)

    @property
    def ends(self) -> Flags:
        """[N] True on the last row of each slice that is not padding."""
        return self._marked(self.first_rows + self.lengths - 1)

    @property
    def mask(self) -> Flags:
        """[N] True on rows that are not padding."""
        if not self.is_padded:
            return np.ones(len(self.rows), bool)
        return positions(self.widths) < np.repeat(self.lengths, self.widths)

    def _marked(self, at: Integers) -> Flags:
        marked = np.zeros(len(self.rows), bool)
        marked[at] = True
        return marked


@dataclass(frozen=True)
class SliceSampler:
    """Draw slices of trajectories. Immutable; safe to share between threads.

    Attributes:
        num_slices: slices in a batch, >= 1.
        slice_len: L, rows in a slice, >= 1; fewer are possible unless `short` is "skip" or "pad".
        by: unit of a draw: "trajectory" draws a trajectory and then one of its slices; "row" draws one of all slices.
        short: treatment of trajectories of fewer than L rows. "keep" returns shorter slices, and so batches of fewer
            rows. "skip" never draws them, so the data of short episodes are unused. "pad" repeats the last row, and
            returns a mask; it also pads slices that `span` shortens.
        span: rows of a slice that may lie before the first and after the last row of its trajectory: a pair, or one
            number for both; 0 to L - 1.

    Raises:
        SpecError: a number is out of range, or a name is unknown.

    Source: TorchRL `SliceSampler`. Its default, `strict_length`, is "skip".
    """

    num_slices: int
    slice_len: int
    by: By = "trajectory"
    short: Short = "keep"
    span: int | tuple[int, int] = 0

    def __post_init__(self) -> None:
        """Check the fields, and store `span` as a pair."""
        for name, kind in (("by", By), ("short", Short)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise SpecError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}.")
        slice_len = integer("slice_len", self.slice_len, minimum=1)
        span = self.span if isinstance(self.span, tuple) else (self.span, self.span)
        if len(span) != 2:  # noqa: PLR2004  # left and right
            raise SpecError(f"`span` must be a number or a pair of numbers, got {self.span!r}.")
        integer("num_slices", self.num_slices, minimum=1)
        checked = tuple(integer("span", rows, minimum=0, maximum=slice_len - 1) for rows in span)
        object.__setattr__(self, "span", checked)

    def sample(self, trajectories: Trajectories, rng: np.random.Generator, priorities: Any = None) -> Slices:
        """Draw `num_slices` slices, with replacement.

        Args:
            trajectories: trajectories to draw from.
            rng: source of randomness.
            priorities: finite numbers >= 0; a priority of 0 is never drawn. If `by` is "trajectory": [n], one per
                trajectory. If `by` is "row": one per row, in the shape of the storage; a slice has the priority of its
                first row. None for equal priorities.

        Raises:
            IncompleteError: all trajectories are too short, or all priorities are 0.
            SpecError: the number of priorities is wrong, or a priority is negative or not finite.

        >>> trajectories = Trajectories.from_lengths([3, 6, 2])
        >>> slices = SliceSampler(2, 5, short="skip").sample(trajectories, np.random.default_rng(0))
        >>> slices.trajectories.tolist(), slices.rows.tolist()
        ([1, 1], [3, 4, 5, 6, 7, 3, 4, 5, 6, 7])
        """
        units = self._units(trajectories, priorities, list_slices=priorities is not None)
        edges = np.cumsum(units.weights)
        drawn = np.searchsorted(edges, rng.random(self.num_slices) * edges[-1], "right")
        # Rounding may give an index after the last unit that has a weight.
        return self._slices(trajectories, units, np.minimum(drawn, np.flatnonzero(units.weights)[-1]), rng)

    def one_pass(
        self,
        trajectories: Trajectories,
        rng: np.random.Generator,
        priorities: Any = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Slices]:
        """Draw without replacement: batches that contain each trajectory once, or each slice once if `by` is "row".

        `trajectories`, `rng`, `priorities` and errors are as in `sample`; higher priorities come earlier on average.
        If `shuffle` is False, trajectories are in the order of the storage; the slice of each trajectory is random.
        `drop_last` leaves out a last batch of fewer than `num_slices` slices.

        Yields:
            Batches of `num_slices` slices; the last one may have fewer.

        >>> trajectories = Trajectories.from_lengths([3, 6, 2])
        >>> passes = SliceSampler(2, 5).one_pass(trajectories, np.random.default_rng(0), shuffle=False)
        >>> [slices.trajectories.tolist() for slices in passes]
        [[0, 1], [2]]
        """
        units = self._units(trajectories, priorities, list_slices=True)
        order = np.flatnonzero(units.weights)
        if shuffle:
            # If each random exponential time is divided by its weight, the probability that it is the least is the
            # share of its weight.
            order = order[np.argsort(rng.standard_exponential(len(order)) / units.weights[order])]
        batches = (order[first : first + self.num_slices] for first in range(0, len(order), self.num_slices))
        return (
            self._slices(trajectories, units, drawn, rng)
            for drawn in batches
            if len(drawn) == self.num_slices or not drop_last
        )

    def each(self, trajectories: Trajectories, rng: np.random.Generator, num_rounds: int = 1) -> Slices:
        """Draw one slice of each of the `trajectories`, in their order; for trajectories that were drawn before.

        This is done `num_rounds` times with numbers of `rng`; slices of one trajectory are drawn independently of each
        other. `num_slices` and `by` are not used. With "skip", short trajectories have no slice.

        Raises:
            IncompleteError: all trajectories are too short.
        """
        units = _Units(np.arange(len(trajectories)), None, self._can_be_drawn(trajectories) * 1.0)
        return self._slices(trajectories, units, np.tile(np.flatnonzero(units.weights), num_rounds), rng)

    def _num_slices_of(self, lengths: Integers) -> Integers:
        left, right = self.span  # type: ignore[misc]  # `__post_init__` made it a pair
        return np.maximum(1, lengths - self.slice_len + left + right + 1)

    def _parts(self, lengths: Integers, number: Integers) -> tuple[Integers, Integers]:
        """Return first row and length of slices, given by number, of trajectories of these lengths."""
        left, right = self.span  # type: ignore[misc]  # `__post_init__` made it a pair
        is_whole = lengths - self.slice_len + left + right < 0
        first = np.where(is_whole, 0, number - left)
        begin = np.maximum(first, 0)
        return begin, np.minimum(first + self.slice_len, lengths) - begin

    def _can_be_drawn(self, trajectories: Trajectories) -> Flags:
        can_be_drawn = trajectories.lengths >= (self.slice_len if self.short == "skip" else 1)
        if not can_be_drawn.any():
            shortest, longest = trajectories.lengths.min(), trajectories.lengths.max()
            raise IncompleteError(
                f"no trajectory is long enough: expected {self.slice_len} rows, got {len(trajectories)} of "
                f"{shortest} to {longest}. Lower `slice_len`, or draw short trajectories with `short='keep'`."
            )
        return can_be_drawn

    def _units(self, trajectories: Trajectories, priorities: Any, *, list_slices: bool) -> _Units:
        """Return the candidates: trajectories, or slices if `by` is "row" and slices are needed one by one."""
        can_be_drawn = self._can_be_drawn(trajectories)
        which, number = np.arange(len(trajectories)), None
        if self.by == "trajectory":
            weights = _weights(priorities, which.shape, "trajectory") * can_be_drawn
        else:
            weights = _weights(priorities, trajectories.storage_shape, "row").ravel()
            counts = self._num_slices_of(trajectories.lengths) * can_be_drawn
            if list_slices:
                which, number = np.repeat(which, counts), positions(counts)
                begin, _ = self._parts(trajectories.lengths[which], number)
                weights = weights[trajectories.rows(which, begin, np.ones_like(begin))]
            else:
                weights = counts * 1.0
        if not weights.any():
            raise IncompleteError(f"no slice can be drawn: the priorities of all {len(weights)} candidates are 0.")
        return _Units(which, number, weights)

    def _slices(self, trajectories: Trajectories, units: _Units, drawn: Integers, rng: np.random.Generator) -> Slices:
        which = units.which[drawn]
        all_lengths = trajectories.lengths[which]
        probabilities = units.weights[drawn] / units.weights.sum()
        if units.number is None:
            counts = self._num_slices_of(all_lengths)
            number, probabilities = rng.integers(counts), probabilities / counts
        else:
            number = units.number[drawn]
        begin, lengths = self._parts(all_lengths, number)
        cut_by_sampler = begin + lengths < all_lengths
        rows, widths = trajectories.rows(which, begin, lengths), lengths
        if self.short == "pad":
            widths = np.full_like(lengths, self.slice_len)
            last = np.repeat(lengths - 1, widths)
            rows = rows[np.repeat(np.cumsum(lengths) - lengths, widths) + np.minimum(positions(widths), last)]
        return Slices(
            rows,
            lengths,
            widths,
            which,
            cut_by_sampler,
            probabilities,
            self.short == "pad",
            trajectories.storage_shape,
            trajectories.rows(which, begin + lengths - ~cut_by_sampler, np.ones_like(begin)),
        )


@dataclass(frozen=True)
class _Units:
    """Candidates of a draw: trajectories, numbers of slices if these are drawn at the same time, and weights."""

    which: Integers
    number: Integers | None
    weights: npt.NDArray[np.float64]


def _weights(priorities: Any, shape: tuple[int, ...], unit: str) -> npt.NDArray[np.float64]:
    if priorities is None:
        return np.ones(shape)
    weights = np.asarray(priorities, np.float64)
    if weights.shape != shape:
        raise SpecError(f"`priorities` must be one for each {unit}, {shape}, got shape {weights.shape}.")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise SpecError("`priorities` must be finite numbers >= 0.")
    return weights
