"""Which slices are drawn: integers only.

A slice is a run of rows within one trajectory. Let L = `slice_len`, and `left` and `right` be the rows that a slice may
hang over the edges of a trajectory of `n` rows; the rows that overhang are cut off. The slices that a trajectory has:

    first rows -left ... n - L + right, each with the L rows from there on that exist;
    if there is no such first row (n < L, mostly): one slice, the whole trajectory

So there are max(1, n - L + left + right + 1) of them. What is equally likely, or in proportion to priorities, is a
trajectory and then each of its slices (`By.TRAJECTORY`), or each slice of all trajectories (`By.ROW`: a slice for each
row that one can begin at). By trajectory, rows of short episodes are drawn more often than others. By row, only rows
near the edges are drawn less often, and with `span` L - 1 not even those: then every row is in exactly L slices.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError
from reverb_writer.slices.boundaries import Trajectories, positions
from reverb_writer.slices.markers import Flags, Integers

__all__ = ["By", "Short", "SliceSampler", "Slices"]


class By(enum.Enum):
    """What is drawn: a trajectory and then one of its slices, or one of all slices. Lower-case names are taken too."""

    TRAJECTORY = "trajectory"
    ROW = "row"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise SpecError(f"`by` must be 'trajectory' or 'row', got {value!r}.")


class Short(enum.Enum):
    """What becomes of trajectories shorter than a slice. Wherever a member is taken, its lower-case name is too.

    KEEP gives shorter slices, and so batches of fewer rows; SKIP never draws them, which loses the data of short
    episodes; PAD repeats the last row, and says so in a mask. Slices that `span` cut short are padded by PAD, too.
    """

    KEEP = "keep"
    SKIP = "skip"
    PAD = "pad"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise SpecError(f"`short` must be 'keep', 'skip' or 'pad', got {value!r}.")


@dataclass(frozen=True)
class Slices:
    """Slices laid end to end, as rows of a storage: what to gather.

    Attributes:
        rows: [N] flat index of each row in the storage, those of the padding too.
        lengths: [S] real rows of each slice.
        widths: [S] rows of each slice with its padding.
        trajectories: [S] number of the trajectory of each slice.
        cut_by_sampler: [S] whether the trajectory continues after the slice.
        probabilities: [S] that one draw gives this slice.
        is_padded: whether there is a mask, even if no slice needs padding.
        storage_shape: as `Trajectories.storage_shape`.
    """

    rows: Integers
    lengths: Integers
    widths: Integers
    trajectories: Integers
    cut_by_sampler: Flags
    probabilities: npt.NDArray[np.float64]
    is_padded: bool
    storage_shape: tuple[int, ...]

    @property
    def first_rows(self) -> Integers:
        """[S] where each slice begins among the N rows."""
        return np.cumsum(self.widths) - self.widths

    @property
    def starts(self) -> Flags:
        """[N] True on the first row of each slice."""
        return self._marked(self.first_rows)

    @property
    def ends(self) -> Flags:
        """[N] True on the last real row of each slice."""
        return self._marked(self.first_rows + self.lengths - 1)

    @property
    def mask(self) -> Flags:
        """[N] True on real rows."""
        return positions(self.widths) < np.repeat(self.lengths, self.widths)

    def by_row(self, of_slices: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give each row what its slice has: [S, ...] to [N, ...]."""
        return np.repeat(of_slices, self.widths, axis=0)

    def part(self, first: int, stop: int) -> Slices:
        """Return some of the slices, by their numbers, of the same storage.

        >>> slices = SliceSampler(2, 4).each(Trajectories.from_lengths([2, 3]), np.random.default_rng(0))
        >>> slices.part(1, 2).rows.tolist()
        [2, 3, 4]
        """
        chosen = slice(first, stop)
        ends = np.concatenate([[0], np.cumsum(self.widths)])
        return Slices(
            rows=self.rows[ends[first] : ends[min(stop, len(self.widths))]],
            lengths=self.lengths[chosen],
            widths=self.widths[chosen],
            trajectories=self.trajectories[chosen],
            cut_by_sampler=self.cut_by_sampler[chosen],
            probabilities=self.probabilities[chosen],
            is_padded=self.is_padded,
            storage_shape=self.storage_shape,
        )

    def _marked(self, at: Integers) -> Flags:
        marked = np.zeros(len(self.rows), bool)
        marked[at] = True
        return marked


@dataclass(frozen=True)
class SliceSampler:
    """Draw slices; see the top of this module for which there are. Immutable; safe to share between threads.

    Attributes:
        num_slices: slices in a batch, >= 1.
        slice_len: L, rows in a slice, >= 1; at most, unless `short` is SKIP or PAD.
        by: what is equally likely, or in proportion to priorities.
        short: what becomes of trajectories shorter than that.
        span: rows that a slice may hang over the first and over the last row of its trajectory: a pair, or one
            number for both; 0 to L - 1.

    Raises:
        SpecError: a number out of range, or an unknown name.

    Source: TorchRL `SliceSampler` (behaviour, 4.3), whose `strict_length` is SKIP, and not the default here.
    """

    num_slices: int
    slice_len: int
    by: By | str = By.TRAJECTORY
    short: Short | str = Short.KEEP
    span: int | tuple[int, int] = 0

    def __post_init__(self) -> None:
        """Check the fields, and store plain ints, members of the enums, and `span` as a pair."""
        slice_len = integer("slice_len", self.slice_len, minimum=1)
        span = self.span if isinstance(self.span, tuple) else (self.span, self.span)
        if len(span) != 2:  # noqa: PLR2004  # left and right
            raise SpecError(f"`span` must be a number or a pair of them, got {self.span!r}.")
        checked = {
            "num_slices": integer("num_slices", self.num_slices, minimum=1),
            "slice_len": slice_len,
            "by": By(self.by),
            "short": Short(self.short),
            "span": tuple(integer("span", rows, minimum=0, maximum=slice_len - 1) for rows in span),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_batch_size(
        cls, batch_size: int, *, num_slices: int | None = None, slice_len: int | None = None, **options: Any
    ) -> SliceSampler:
        """Make a sampler of batches of this many rows, from one of the two numbers, as TorchRL does.

        Args:
            batch_size: rows in a batch; at most, unless `short` is SKIP or PAD.
            num_slices: slices in it, or None.
            slice_len: rows in a slice, or None.
            options: as those of `SliceSampler`.

        Raises:
            SpecError: not exactly one is given, or `batch_size` is no multiple of it.

        >>> SliceSampler.from_batch_size(256, slice_len=32).num_slices
        8
        """
        if (num_slices is None) == (slice_len is None):
            raise SpecError(f"pass `num_slices` or `slice_len`, one of them; got {num_slices!r} and {slice_len!r}.")
        name, value = ("num_slices", num_slices) if slice_len is None else ("slice_len", slice_len)
        value = integer(name, value, minimum=1)
        other, rest = divmod(integer("batch_size", batch_size, minimum=1), value)
        if rest or not other:
            raise SpecError(f"`batch_size` must be a multiple of `{name}`, got {batch_size} and {value}.")
        return cls(*((value, other) if slice_len is None else (other, value)), **options)

    def sample(self, trajectories: Trajectories, rng: np.random.Generator, priorities: Any = None) -> Slices:
        """Draw `num_slices` slices, with replacement.

        Args:
            trajectories: to draw from.
            rng: source of randomness.
            priorities: finite numbers >= 0, one a trajectory, [n], if `by` is TRAJECTORY; one a row, of the storage's
                shape, if it is ROW: that of a slice's first row counts, and 0 is never drawn. None if all are alike.

        Raises:
            IncompleteError: there is nothing to draw: all trajectories are too short, or all priorities 0.
            SpecError: priorities of another number, negative or not finite.

        >>> trajectories = Trajectories.from_lengths([3, 6, 2])
        >>> slices = SliceSampler(2, 5, short="skip").sample(trajectories, np.random.default_rng(0))
        >>> slices.trajectories.tolist(), slices.rows.tolist()
        ([1, 1], [3, 4, 5, 6, 7, 3, 4, 5, 6, 7])
        """
        units = self._units(trajectories, priorities, list_slices=priorities is not None)
        edges = np.cumsum(units.weights)
        drawn = np.searchsorted(edges, rng.random(self.num_slices) * edges[-1], "right")
        # Rounding may reach beyond the last unit that has a weight.
        return self._cut(trajectories, units, np.minimum(drawn, np.flatnonzero(units.weights)[-1]), rng)

    def one_pass(
        self,
        trajectories: Trajectories,
        rng: np.random.Generator,
        priorities: Any = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> Iterator[Slices]:
        """Draw without replacement: batches in which each trajectory, or each slice if `by` is ROW, comes once.

        Args:
            trajectories: to draw from.
            rng: source of randomness.
            priorities: as in `sample`; what has more comes earlier, on average.
            shuffle: False for the order of the storage; of a trajectory, a slice is drawn at random all the same.
            drop_last: leave out a last batch of fewer than `num_slices` slices.

        Yields:
            Batches of `num_slices` slices. Endless passes are a loop around it.

        Raises:
            IncompleteError: there is nothing to draw: all trajectories are too short, or all priorities 0.
            SpecError: priorities of another number, negative or not finite.

        >>> trajectories = Trajectories.from_lengths([3, 6, 2])
        >>> passes = SliceSampler(2, 5).one_pass(trajectories, np.random.default_rng(0), shuffle=False)
        >>> [slices.trajectories.tolist() for slices in passes]
        [[0, 1], [2]]
        """
        units = self._units(trajectories, priorities, list_slices=True)
        order = np.flatnonzero(units.weights)
        if shuffle:
            # The least of exponential times, each divided by a weight, is that of a unit in proportion to its weight.
            order = order[np.argsort(rng.standard_exponential(len(order)) / units.weights[order])]
        batches = (order[first : first + self.num_slices] for first in range(0, len(order), self.num_slices))
        return (
            self._cut(trajectories, units, drawn, rng)
            for drawn in batches
            if len(drawn) == self.num_slices or not drop_last
        )

    def each(self, trajectories: Trajectories, rng: np.random.Generator) -> Slices:
        """Draw one slice of each trajectory, in their order: for trajectories that have been drawn already.

        `num_slices` and `by` have no part in it. Trajectories that SKIP skips are left out.

        Raises:
            IncompleteError: all trajectories are too short.
        """
        units = _Units(np.arange(len(trajectories)), None, self._can_be_drawn(trajectories) * 1.0)
        return self._cut(trajectories, units, np.flatnonzero(units.weights), rng)

    def _num_slices_of(self, lengths: Integers) -> Integers:
        assert isinstance(self.span, tuple)  # noqa: S101  # made so above
        return np.maximum(1, lengths - self.slice_len + sum(self.span) + 1)

    def _parts(self, lengths: Integers, number: Integers) -> tuple[Integers, Integers]:
        """Return first step and length of the slices of these numbers, in trajectories of these lengths."""
        assert isinstance(self.span, tuple)  # noqa: S101  # made so above
        left, right = self.span
        is_whole = lengths - self.slice_len + left + right < 0
        first = np.where(is_whole, 0, number - left)
        begin = np.maximum(first, 0)
        return begin, np.minimum(first + self.slice_len, lengths) - begin

    def _can_be_drawn(self, trajectories: Trajectories) -> Flags:
        can_be_drawn = trajectories.lengths >= (self.slice_len if self.short is Short.SKIP else 1)
        if not can_be_drawn.any():
            shortest, longest = trajectories.lengths.min(), trajectories.lengths.max()
            raise IncompleteError(
                f"no trajectory is long enough: expected {self.slice_len} rows, got {len(trajectories)} of "
                f"{shortest} to {longest}. Lower `slice_len`, or draw short ones with `short='keep'`."
            )
        return can_be_drawn

    def _units(self, trajectories: Trajectories, priorities: Any, *, list_slices: bool) -> _Units:
        """List what can be drawn: trajectories, or slices if `by` is ROW; those are spared if they are all alike."""
        can_be_drawn = self._can_be_drawn(trajectories)
        which, number = np.arange(len(trajectories)), None
        if self.by is By.TRAJECTORY:
            weights = _weights(priorities, which.shape, "trajectory") * can_be_drawn
        else:
            weights = _weights(priorities, trajectories.storage_shape, "row").ravel()
            counts = self._num_slices_of(trajectories.lengths) * can_be_drawn
            if list_slices:
                which, number = np.repeat(which, counts), positions(counts)
                begin, _ = self._parts(trajectories.lengths[which], number)
                weights = weights[trajectories.rows(which, begin, np.ones_like(which))]
            else:
                weights = counts * 1.0
        if not weights.any():
            raise IncompleteError(f"nothing can be drawn: the priorities of all {len(weights)} candidates are 0.")
        return _Units(which, number, weights)

    def _cut(self, trajectories: Trajectories, units: _Units, drawn: Integers, rng: np.random.Generator) -> Slices:
        which = units.which[drawn]
        all_lengths = trajectories.lengths[which]
        probabilities = units.weights[drawn] / units.weights.sum()
        if units.number is None:
            counts = self._num_slices_of(all_lengths)
            number, probabilities = rng.integers(counts), probabilities / counts
        else:
            number = units.number[drawn]
        begin, lengths = self._parts(all_lengths, number)
        cut = begin + lengths < all_lengths
        rows, widths = trajectories.rows(which, begin, lengths), lengths
        if self.short is Short.PAD:
            widths = np.full_like(lengths, self.slice_len)
            last = np.repeat(lengths - 1, widths)
            rows = rows[np.repeat(np.cumsum(lengths) - lengths, widths) + np.minimum(positions(widths), last)]
        return Slices(
            rows, lengths, widths, which, cut, probabilities, self.short is Short.PAD, trajectories.storage_shape
        )


@dataclass(frozen=True)
class _Units:
    """What is drawn: the trajectory, the number of its slice if that is drawn with it, and the weight of each."""

    which: Integers
    number: Integers | None
    weights: npt.NDArray[np.float64]


def _weights(priorities: Any, shape: tuple[int, ...], unit: str) -> npt.NDArray[np.float64]:
    if priorities is None:
        return np.ones(shape)
    weights = np.asarray(priorities, np.float64)
    if weights.shape != shape:
        raise SpecError(f"`priorities` must be one a {unit}, {shape}, got shape {weights.shape}.")
    if not np.isfinite(weights).all() or weights.min() < 0:
        raise SpecError("`priorities` must be finite numbers >= 0.")
    return weights
