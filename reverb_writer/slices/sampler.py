"""Draw slices of trajectories: integers only.

A slice is a run of L = `slice_len` rows within one trajectory of n rows. So the slices of a trajectory are:

    a slice from each row 0 ... n - L
    if n < L: one slice, the whole trajectory

These are max(1, n - L + 1) slices. With `start="episode"`, only the slice from row 0 exists, if this row is the first
of an episode. "trajectory" draws a trajectory, then one of its slices; "row" draws one of the slices of all
trajectories. Both are uniform, or in proportion to priorities. By trajectory, rows of short episodes are drawn more
often than others. By row, only rows near the edges of trajectories are drawn less often.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from reverb_writer.arguments import integer
from reverb_writer.arrays import array_namespace, concatenated
from reverb_writer.errors import IncompleteError, SpecError
from reverb_writer.slices.axes import ROWS, SAMPLES, Flags, Integers, joined, taken
from reverb_writer.slices.boundaries import Trajectories, positions

By = Literal["trajectory", "row"]
Short = Literal["keep", "skip", "pad"]
Start = Literal["any", "episode"]


@dataclass(frozen=True)
class Slices:
    """Rows that form slices, laid end to end: [N] rows of S slices.

    Attributes:
        rows: [N] flat index of each row in its storage, padding included.
        starts: [N] whether the row is the first row of a slice.
        mask: [N] False for padding.
        lengths: [S] rows of each slice without padding.
        first_rows: [S] place of the first row of each slice among the N rows.
        trajectories: [S] number of the trajectory of each slice. In a `Batch` whose steps have ids, the id.
        cut_by_sampler: [S] whether the trajectory continues after the slice.
        probabilities: [S] probability of each slice in one draw.
        next_rows: [S] flat index of the row that follows each slice in its trajectory, or of the slice's last row if
            the trajectory ends there (`cut_by_sampler` is False).
        storage_shape: `Trajectories.storage_shape`; () for slices of several storages.
        members: [S] number of the storage or dataset of each slice; None for a single one.
    """

    rows: Integers = field(metadata=ROWS)
    starts: Flags = field(metadata=ROWS)
    mask: Flags = field(metadata=ROWS)
    lengths: Integers = field(metadata=SAMPLES)
    first_rows: Integers = field(metadata=SAMPLES)
    trajectories: npt.NDArray[Any] = field(metadata=SAMPLES)
    cut_by_sampler: Flags = field(metadata=SAMPLES)
    probabilities: npt.NDArray[np.float64] = field(metadata=SAMPLES)
    next_rows: Integers = field(metadata=SAMPLES)
    storage_shape: tuple[int, ...]
    members: Integers | Any = field(default=None, metadata=SAMPLES)  # Any: readers need not check for None

    def __len__(self) -> int:
        """Return S."""
        return len(self.lengths)

    @property
    def last_rows(self) -> Integers:
        """[S] place of the last real row of each slice among the N rows."""
        return self.first_rows + self.lengths - 1

    @property
    def offsets(self) -> Integers:
        """[S + 1] first row of each slice, and N: `cu_seqlens` of FlashAttention, which takes int32."""
        xp = array_namespace(self.first_rows)
        stop = self.first_rows[-1:] * 0 + len(self.rows)
        offsets: Integers = concatenated(xp, [self.first_rows, stop], 0)
        return offsets

    def part(self, first: int, stop: int) -> Slices:
        """Return the slices `first` to `stop` - 1; arrays are views."""
        edges = np.append(self.first_rows, len(self.rows))
        before, after = edges[first], edges[stop]
        found = taken(self, samples=slice(first, stop), rows=slice(before, after))
        return dataclasses.replace(found, first_rows=found.first_rows - before)

    @classmethod
    def concatenate(cls, parts: Sequence[Slices], numbers: Sequence[int] | None = None) -> Slices:
        """Return slices of several storages or draws, `parts`, laid end to end; `numbers` has each part's member."""
        before = np.cumsum([0, *(len(part.rows) for part in parts[:-1])])
        first_rows = np.concatenate([part.first_rows + rows for part, rows in zip(parts, before, strict=True)])
        members = None if numbers is None else np.repeat(numbers, [len(part) for part in parts])
        return joined(parts, first_rows=first_rows, members=members, storage_shape=())


@dataclass(frozen=True)
class SliceSampler:
    """Draw slices of trajectories. Immutable; safe to share between threads.

    Attributes:
        num_slices: slices in a batch, >= 1.
        slice_len: L, rows in a slice, >= 1; fewer are possible unless `short` is "skip" or "pad".
        by: unit of a draw: "trajectory" draws a trajectory and then one of its slices; "row" draws one of all slices.
        short: treatment of trajectories of fewer than L rows. "keep" returns shorter slices, and so batches of fewer
            rows. "skip" never draws them, so the data of short episodes are unused. "pad" repeats the last row, and
            the mask is False there.
        start: "any" for slices that start at any row, or "episode" for slices that start with the first row of an
            episode. Trajectories whose first row is not known to be the first of an episode then are never drawn.

    Raises:
        SpecError: a number is out of range, or a name is unknown.

    Source: TorchRL `SliceSampler`. Its default, `strict_length`, is "skip".
    """

    num_slices: int
    slice_len: int
    by: By = "trajectory"
    short: Short = "keep"
    start: Start = "any"

    def __post_init__(self) -> None:
        """Check the fields."""
        for name, kind in (("by", By), ("short", Short), ("start", Start)):
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise SpecError(f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}.")
        integer("num_slices", self.num_slices, minimum=1)
        integer("slice_len", self.slice_len, minimum=1)

    def sample(self, trajectories: Trajectories, rng: np.random.Generator, priorities: Any = None) -> Slices:
        """Draw `num_slices` slices, with replacement. A warning says if no trajectory has `slice_len` rows.

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
        self._warn(trajectories)
        return self._drawn(trajectories, rng, self.num_slices, priorities)

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

        `trajectories`, `rng`, `priorities`, errors and the warning are as in `sample`; higher priorities come earlier
        on average. If `shuffle` is False, trajectories are in the order of the storage; the slice of each trajectory is
        random. `drop_last` leaves out a last batch of fewer than `num_slices` slices.

        Yields:
            Batches of `num_slices` slices; the last one may have fewer.

        >>> trajectories = Trajectories.from_lengths([3, 6, 2])
        >>> passes = SliceSampler(2, 5).one_pass(trajectories, np.random.default_rng(0), shuffle=False)
        >>> [slices.trajectories.tolist() for slices in passes]
        [[0, 1], [2]]
        """
        self._warn(trajectories)
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

    def of_pool(self, trajectories: Trajectories, rng: np.random.Generator, num_rounds: int = 1) -> Slices:
        """Draw the slices of a pool of items: as many as `each` draws; `num_slices` is not used.

        "trajectory" draws as `each`. "row" draws among all slices of the `trajectories`, with replacement. `rng` and
        `num_rounds` are as in `each`.

        Raises:
            IncompleteError: all trajectories are too short.
        """
        if self.by == "trajectory":
            return self.each(trajectories, rng, num_rounds)
        return self._drawn(trajectories, rng, num_rounds * len(trajectories))

    def advice(self, trajectories: Trajectories) -> str:
        """Return a warning if there are several `trajectories`, and none is as long as a slice; otherwise ""."""
        if self.short == "skip" or len(trajectories) == 1 or trajectories.lengths.max() >= self.slice_len:
            return ""
        return (
            f"No trajectory has `slice_len` = {self.slice_len} rows, so each slice is a whole trajectory. If "
            "trajectories should be longer: ids must not alternate from row to row, and kinds must be [N], or [T, B] "
            "with time as the first axis. If not, pass the length of the longest trajectory."
        )

    def _warn(self, trajectories: Trajectories) -> None:
        if text := self.advice(trajectories):
            warnings.warn(text, stacklevel=3)

    def _drawn(
        self, trajectories: Trajectories, rng: np.random.Generator, num_slices: int, priorities: Any = None
    ) -> Slices:
        units = self._units(trajectories, priorities, list_slices=priorities is not None)
        edges = np.cumsum(units.weights)
        drawn = np.searchsorted(edges, rng.random(num_slices) * edges[-1], "right")
        # Rounding may give an index after the last unit that has a weight.
        return self._slices(trajectories, units, np.minimum(drawn, np.flatnonzero(units.weights)[-1]), rng)

    def _num_slices_of(self, lengths: Integers) -> Integers:
        return np.ones_like(lengths) if self.start == "episode" else np.maximum(1, lengths - self.slice_len + 1)

    def _can_be_drawn(self, trajectories: Trajectories) -> Flags:
        can_be_drawn = trajectories.lengths >= (self.slice_len if self.short == "skip" else 1)
        if not can_be_drawn.any():
            shortest, longest = trajectories.lengths.min(), trajectories.lengths.max()
            raise IncompleteError(
                f"no trajectory is long enough: expected {self.slice_len} rows, got {len(trajectories)} of "
                f"{shortest} to {longest}. Lower `slice_len`, or draw short trajectories with `short='keep'`."
            )
        if self.start == "episode":
            can_be_drawn &= trajectories.begins_episode
            if not can_be_drawn.any():
                raise IncompleteError(
                    f"none of {len(trajectories)} trajectories begins with a row that is known to be the first of an "
                    "episode. Write with an observer, or steps with `is_first`; or pass `start='any'`."
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
                weights = weights[trajectories.rows(which, number, np.ones_like(number))]
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
            begin, probabilities = rng.integers(counts), probabilities / counts
        else:
            begin = units.number[drawn]
        lengths = np.minimum(self.slice_len, all_lengths - begin)
        cut_by_sampler = begin + lengths < all_lengths
        rows, first_rows = trajectories.rows(which, begin, lengths), np.cumsum(lengths) - lengths
        mask = np.ones(len(rows), bool)
        if self.short == "pad":
            widths = np.full_like(lengths, self.slice_len)
            place, last = positions(widths), np.repeat(lengths - 1, widths)
            mask = place <= last
            rows = rows[np.repeat(first_rows, widths) + np.minimum(place, last)]
            first_rows = np.cumsum(widths) - widths
        starts = np.zeros(len(rows), bool)
        starts[first_rows] = True
        return Slices(
            rows=rows,
            starts=starts,
            mask=mask,
            lengths=lengths,
            first_rows=first_rows,
            trajectories=which,
            cut_by_sampler=cut_by_sampler,
            probabilities=probabilities,
            next_rows=trajectories.rows(which, begin + lengths - ~cut_by_sampler, np.ones_like(begin)),
            storage_shape=trajectories.storage_shape,
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
