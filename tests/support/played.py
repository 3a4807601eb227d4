"""Random episodes in every layout, and their transitions and targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from reading import Place

import reverb_writer as rw
from reverb_writer.rows import LastRow
from reverb_writer.rows.layouts import STEP_FIRST, STEP_LAST

GAMMA, LAM, N = 0.9, 0.7, 3


class Pair(NamedTuple):
    """A transition of an episode."""

    observation: int
    action: int
    reward: float
    discount: float
    next_observation: int


class Played(NamedTuple):
    """An episode of `size` actions; row t shows `first + t`. A cut one has no end: the actor stops there."""

    first: int
    size: int
    end: str  # "terminated", "truncated" or "cut"
    stored: float  # the environment's own discount

    @property
    def num_rows(self) -> int:
        return self.size + 1

    def pair(self, t: int, has_discounts: bool) -> Pair:
        """Return the transition of action t, listed by hand: its reward is the number of its row, modulo 7."""
        o = self.first + t
        ended = self.end == "terminated" and t == self.size - 1
        return Pair(o, o % 5, float(o % 7), 0.0 if ended else self.stored if has_discounts else 1.0, o + 1)

    def row(self, t: int) -> dict[str, Any]:
        """Return row t with all that any layout has. A cut episode goes on after its last row."""
        o, is_boundary = self.first + t, t == self.size and self.end != "cut"
        ended = self.end == "terminated" and t == self.size - 1
        return {
            "observation": np.int64(o),
            "action": np.int64(0 if is_boundary else o % 5),
            "reward": np.float32(0 if is_boundary else o % 7),
            "discount": np.float32(0 if ended or is_boundary else self.stored),
            "is_first": np.bool_(t == 0),
            "is_last": np.bool_(is_boundary),
            "is_terminal": np.bool_(is_boundary and self.end == "terminated"),
            "terminated": np.bool_(is_boundary and self.end == "terminated"),
            "truncated": np.bool_(is_boundary and self.end == "truncated"),
        }


COMMON = ("observation", "action", "reward")
LAYOUTS = {
    "recorded": (*COMMON, "discount", "is_first", "is_last", "terminated", "truncated"),
    "rlds": (*COMMON, "is_first", "is_last", "is_terminal"),
    "rlds with discounts": (*COMMON, "discount", "is_first", "is_last", "is_terminal"),
    "flags": (*COMMON, "terminated", "truncated"),
    "discount": (*COMMON, "discount"),
    "trajectory": (),
}


def has_discounts(layout: str) -> bool:
    return layout in ("recorded", "rlds with discounts", "discount", "trajectory")


def last_row_of(layout: str) -> LastRow | None:
    """Return the `last_row` that observers and `to_transitions` need for steps of this layout."""
    return "boundary" if layout in ("flags", "discount") else None


def laid_out(row: dict[str, Any], layout: str, following: dict[str, Any] | None = None) -> Any:
    if layout != "trajectory":
        return {name: row[name] for name in LAYOUTS[layout]}
    kind, next_kind = (
        STEP_LAST if one["is_last"] else STEP_FIRST if one["is_first"] else 1
        for one in (row, following or {"is_last": False, "is_first": False})
    )
    return rw.Trajectory(
        np.int32(kind),
        row["observation"],
        row["action"],
        (),
        np.int32(STEP_FIRST if row["is_last"] else next_kind),
        row["reward"],
        np.float32(1) if row["is_last"] else row["discount"],  # as TF-Agents' boundary steps
    )


@st.composite
def played(draw: st.DrawFn) -> list[Played]:
    """Draw episodes; only the last one may be cut."""
    episodes: list[Played] = []
    first = 1
    for number in range(count := draw(st.integers(1, 4))):
        ends = ["terminated", "truncated", *(["cut"] if number == count - 1 else [])]
        end, size = draw(st.sampled_from(ends)), draw(st.integers(1, 7))
        episodes.append(Played(first, size, end, draw(st.sampled_from([1.0, 0.5]))))
        first += size + 1
    return episodes


def write(observer: Any, episodes: Sequence[Played], layout: str) -> None:
    for episode in episodes:
        for t in range(episode.num_rows):
            row, following = episode.row(t), episode.row(t + 1) if t < episode.size else None
            observer(laid_out(row, layout, following), end_of_episode=bool(row["is_last"]))
    observer.flush()


def read(place: Place, **options: Any) -> rw.Batch | None:
    """Take out all items as one batch."""
    size = place.client.server_info()["a"].current_size
    if not size:
        return None
    with rw.ReplayDataset(place.client, "a", size, max_in_flight_batches=1, timeout_s=60, **options) as dataset:
        batch: rw.Batch = next(iter(dataset))
        return batch


def read_slices(place: Place, num_items: int, slice_len: int, **options: Any) -> rw.Batch:
    """Return a batch with slices of all items, twice as many as there are items."""
    with rw.SliceDataset(
        place.client,
        "a",
        2 * num_items,
        slice_len,
        pool_size=num_items,
        timeout_s=60,
        max_in_flight_batches=1,
        **options,
    ) as dataset:
        batch: rw.Batch = next(dataset)
        return batch


def pairs_of(found: rw.Transitions) -> list[list[Pair]]:
    """Return the transitions of each row of a batch."""
    columns = (*found[:2], found.reward, found.discount, found.next_observation, found.mask)
    return [
        [Pair(*(value.item() for value in values)) for *values, is_real in zip(*row, strict=True) if is_real]
        for row in zip(*columns, strict=True)
    ]


def as_one_row(found: rw.Transitions) -> rw.Transitions:
    return rw.Transitions._make([*(column[None] for column in found[:7]), {}])


def runs_of(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Cut transitions where the next one does not follow, by the numbers of their rows."""
    run: list[Pair] = []
    for pair in pairs:
        if run and run[-1].next_observation != pair.observation:
            yield run
            run = []
        run.append(pair)
    if run:
        yield run


def value(observation: Any) -> Any:
    return np.sin(np.asarray(observation, np.float64))


def ratio(observation: Any) -> Any:
    return 1.0 + 0.9 * np.cos(np.asarray(observation, np.float64))


def targets(found: rw.Transitions, values: Any, ratios: Any, **common: Any) -> dict[str, Any]:
    """Return what each function of `returns` makes of transitions, and `n_step`."""
    traced = rw.returns.vtrace(found, values, ratios, gamma=GAMMA, **common)
    folded = rw.n_step(found, N, GAMMA)
    return {
        "discounted": rw.returns.discounted_returns(found, values, gamma=GAMMA, **common),
        "lambda": rw.returns.lambda_returns(found, values, lambda_=LAM, gamma=GAMMA, **common),
        "gae": rw.returns.gae(found, values, lambda_=LAM, gamma=GAMMA, **common).advantages,
        "n-step": rw.returns.n_step_returns(found, values, N, gamma=GAMMA, **common),
        "folded": np.stack([folded.reward, folded.discount, folded.next_observation], axis=-1),
        "vtrace": traced.values,
        "advantage": traced.advantages,
    }


def targets_of_run(run: Sequence[Pair]) -> dict[str, Any]:
    """Return the targets of transitions that follow each other, taken by themselves: without a mask or other episodes.

    `tests/properties/transitions/test_returns.py` compares such targets with their definitions.
    """
    observation, action, reward, discount, after = (np.array(column) for column in zip(*run, strict=True))
    mask = np.ones(len(run), bool)
    alone = rw.Transitions(observation, action, reward, discount, after, mask, np.arange(len(run)) < len(run) - 1, {})
    return targets(alone, value([*observation, after[-1]]), ratio(observation), time_axis=0)


def check_targets(found: rw.Transitions, observation: Any, expected: Sequence[Sequence[Pair]]) -> None:
    """Compare all functions of `returns`, and `n_step`, with what they make of each run of transitions alone."""
    if not found.mask.any():
        return
    has_next = len(found.mask) == len(observation) and found.mask.ndim == 1  # slices with the row after them
    more = {"next_values": value(found.next_observation)} if has_next else {}
    columns = targets(found, value(observation), ratio(found.observation), **more)
    wanted = [targets_of_run(run) for pairs in expected for run in runs_of(pairs)]
    for name, column in columns.items():
        np.testing.assert_allclose(
            column[found.mask], np.concatenate([target[name] for target in wanted]), rtol=1e-5, atol=1e-5, err_msg=name
        )
        if name != "folded":
            assert not column[~found.mask].any()
