"""Random episodes, written in every layout and read back: their transitions and targets are those of the episodes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import Place
from server_process import ServerProcess

import reverb_writer as rw
from reverb_writer.steps import FIRST, LAST, MID

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

NEEDS_OVERLAP = ("cover", "truncate", "align_end")
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


def laid_out(row: dict[str, Any], layout: str, following: dict[str, Any] | None = None) -> Any:
    if layout != "trajectory":
        return {name: row[name] for name in LAYOUTS[layout]}
    kind, next_kind = (
        LAST if one["is_last"] else FIRST if one["is_first"] else MID
        for one in (row, following or {"is_last": False, "is_first": False})
    )
    return rw.Trajectory(
        np.int32(kind),
        row["observation"],
        row["action"],
        (),
        np.int32(FIRST if row["is_last"] else next_kind),
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
        return next(iter(dataset))


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


def defined(run: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return every target of a run by its definition, a sum over all that follow: O(T^2)."""
    size = len(run)
    reward, discount = np.array([pair.reward for pair in run]), np.array([pair.discount for pair in run])
    v, after = value([pair.observation for pair in run]), value([pair.next_observation for pair in run])
    rho = np.minimum(ratio([pair.observation for pair in run]), 1.0)
    error = reward + GAMMA * discount * after - v

    def n_step(t: int, n: int) -> tuple[float, float, int]:
        """Return the sum of rewards, the discount and the last row, for at most n steps."""
        stop = min(t + n, size)
        weight = [GAMMA ** (k - t) * np.prod(discount[t:k]) for k in range(t, stop)]
        return float(weight @ reward[t:stop]), float(weight[-1] * discount[stop - 1]), stop - 1

    def target(t: int, n: int) -> float:
        total, weight, last = n_step(t, n)
        return total + GAMMA * weight * float(after[last])

    def vtrace(t: int) -> float:
        if t == size:
            return float(after[-1])
        weights = [GAMMA ** (k - t) * np.prod(discount[t:k]) * np.prod(rho[t:k]) * rho[k] for k in range(t, size)]
        return float(v[t] + np.array(weights) @ error[t:])

    found = []
    for t in range(size):
        left = size - t
        parts = [(1 - LAM) * LAM ** (n - 1) * target(t, n) for n in range(1, left)]
        rewards, weight, last = n_step(t, N)
        traces = [(GAMMA * LAM) ** (k - t) * np.prod(discount[t:k]) for k in range(t, size)]
        found.append(
            {
                "discounted": target(t, left),
                "lambda": sum(parts) + LAM ** (left - 1) * target(t, left),
                "gae": float(np.array(traces) @ error[t:]),
                "n-step": target(t, N),
                "folded": (rewards, weight, run[last].next_observation),
                "vtrace": vtrace(t),
                "advantage": float(rho[t] * (reward[t] + GAMMA * discount[t] * vtrace(t + 1) - v[t])),
            }
        )
    return found


def check_targets(found: rw.Transitions, observation: Any, expected: Sequence[Sequence[Pair]]) -> None:
    """Compare all functions of `returns`, and `n_step`, with their definitions."""
    if not found.mask.any():
        return
    values, ratios = value(observation), ratio(found.observation)
    common: dict[str, Any] = {"gamma": GAMMA}
    traced = rw.returns.vtrace(found, values, ratios, **common)
    folded = rw.n_step(found, N, GAMMA)
    columns = {
        "discounted": rw.returns.discounted_returns(found, values, **common),
        "lambda": rw.returns.lambda_returns(found, values, lam=LAM, **common),
        "gae": rw.returns.gae(found, values, lam=LAM, **common).advantages,
        "n-step": rw.returns.n_step_returns(found, values, N, **common),
        "folded": np.stack([folded.reward, folded.discount, folded.next_observation], axis=-1),
        "vtrace": traced.values,
        "advantage": traced.advantages,
    }
    wanted = [target for pairs in expected for run in runs_of(pairs) for target in defined(run)]
    for name, column in columns.items():
        np.testing.assert_allclose(
            column[found.mask], [target[name] for target in wanted], rtol=1e-5, atol=1e-5, err_msg=name
        )
        if name != "folded":
            assert not column[~found.mask].any()


@pytest.fixture(scope="module")
def uniform(shared_process: ServerProcess) -> Iterator[Place]:
    """A server whose table gives its items as often as they are asked for."""
    server = shared_process.start(rw.TableConfig("a", 1000))
    with rw.Client(server.address, timeout_s=60) as client:
        yield Place(server.address, client)
    server.stop()


patient = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@patient
@given(
    episodes=played(),
    layout=st.sampled_from([*LAYOUTS]),
    length=st.integers(2, 5),
    stride=st.integers(1, 4),
    end=st.sampled_from([*rw.EndOfEpisode]),
    mask=st.booleans(),
)
def test_windows_give_the_pairs_of_their_episodes(
    place: Place, episodes: list[Played], layout: str, length: int, stride: int, end: rw.EndOfEpisode, mask: bool
) -> None:
    place.client.reset("a")
    stride = min(stride, length) if end.value in NEEDS_OVERLAP else stride
    mask = mask or layout in ("flags", "discount")  # padding that no flag tells
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a stride above the length leaves steps out
        spec = rw.WindowSpec(length, stride, end)
    expected = []
    for episode in episodes:
        windows = spec.windows(episode.num_rows)
        if episode.end == "cut":  # only what is complete without an end
            windows = rw.WindowSpec(length, stride).windows(episode.num_rows) if stride <= length else windows
            windows = [window for window in windows if window[1] <= episode.num_rows]
        for start, stop in windows:
            rows = range(start, min(stop, episode.num_rows) - 1)
            expected.append([episode.pair(t, has_discounts(layout)) for t in rows])
    with rw.TrajectoryObserver(
        place.client, "a", length, stride, end_of_episode=end, mask=mask, timeout_s=60
    ) as observer:
        write(observer, episodes, layout)
        batch = read(place, collate="pad")
    if batch is None:
        assert not expected
        return
    steps = batch.data[0] if mask else batch.data
    if np.shape(tree.flatten(steps)[0])[1] < 2:
        return
    found = rw.to_transitions(batch)
    assert pairs_of(found) == expected
    observation = steps.observation if layout == "trajectory" else steps["observation"]
    check_targets(found, observation, expected)


@patient
@given(episodes=played(), layout=st.sampled_from([*LAYOUTS]), flat=st.booleans())
def test_whole_episodes_give_all_their_pairs(place: Place, episodes: list[Played], layout: str, flat: bool) -> None:
    place.client.reset("a")
    whole = [episode for episode in episodes if episode.end != "cut"]
    expected = [[one.pair(t, has_discounts(layout)) for t in range(one.size)] for one in whole]
    with rw.EpisodeObserver(place.client, "a", 100, timeout_s=60) as observer:
        write(observer, whole, layout)
        batch = read(place, collate="flat" if flat else "pad")
    if batch is None:
        return
    found = rw.to_transitions(batch)
    if flat:  # as one row
        assert pairs_of(as_one_row(found)) == [[*itertools.chain(*expected)]]
    else:
        assert pairs_of(found) == expected
    observation = batch.data.observation if layout == "trajectory" else batch.data["observation"]
    check_targets(found, observation, expected)


@patient
@given(episodes=played(), layout=st.sampled_from(["recorded", "rlds", "trajectory"]), length=st.integers(2, 9))
def test_windows_that_span_episodes_have_no_pair_of_two(
    place: Place, episodes: list[Played], layout: str, length: int
) -> None:
    place.client.reset("a")
    rows = [(episode, t) for episode in episodes for t in range(episode.num_rows)]
    expected = []
    for start in range(0, len(rows) - length + 1, length):
        window = rows[start : start + length]
        pairs = [one.pair(t, has_discounts(layout)) for one, t in window[:-1] if t < one.size]
        expected.append(pairs)
    with rw.SequenceObserver(place.client, "a", length, length, timeout_s=60) as observer:
        write(observer, episodes, layout)
        batch = read(place)
    if batch is None:
        assert not expected
        return
    found = rw.to_transitions(batch)
    assert pairs_of(found) == expected
    check_targets(found, batch.data.observation if layout == "trajectory" else batch.data["observation"], expected)


@patient
@given(
    episodes=played(),
    layout=st.sampled_from(["recorded", "rlds", "trajectory", "flags"]),
    slice_len=st.integers(1, 5),
    short=st.sampled_from(["keep", "pad"]),
    span=st.booleans(),
    seed=st.integers(0, 99),
)
def test_slices_give_the_pairs_of_their_rows(
    uniform: Place, episodes: list[Played], layout: str, slice_len: int, short: Any, span: bool, seed: int
) -> None:
    uniform.client.reset("a")
    whole = [episode for episode in episodes if episode.end != "cut"]
    if not whole:
        return
    with rw.EpisodeObserver(uniform.client, "a", 100, timeout_s=60) as observer:
        write(observer, whole, layout)
    with rw.ContiguousDataset(
        uniform.client,
        "a",
        2 * len(whole),
        slice_len,
        by="row",
        pool_size=len(whole),
        short=short,
        span=slice_len - 1 if span else 0,
        seed=seed,
        timeout_s=60,
        max_in_flight_batches=1,
    ) as dataset:
        batch = next(dataset)
    found = rw.to_transitions(batch)
    episode_of = {one.first + t: (one, t) for one in whole for t in range(one.num_rows)}
    observation = batch.data.observation if layout == "trajectory" else batch.data["observation"]
    expected = []
    lengths = batch.markers.slices.lengths.tolist()
    for rows, size in zip(np.split(observation, batch.markers.slices.first_rows[1:]), lengths, strict=True):
        parts = [episode_of[row] for row in rows[:size].tolist()]
        expected.append([one.pair(t, has_discounts(layout)) for one, t in parts[:-1]])
    assert pairs_of(as_one_row(found)) == [[*itertools.chain(*expected)]]
    check_targets(found, observation, expected)


@patient
@given(
    size=st.integers(1, 7), end=st.sampled_from(["terminated", "truncated", "cut"]), length=st.integers(2, 5), spans=...
)
def test_episodes_of_an_actors_memory_give_their_pairs(
    place: Place, size: int, end: str, length: int, spans: bool
) -> None:
    """A chunk that was cut has no flag on its last row, which has no action; padding or the next chunk follows."""
    place.client.reset("a")
    one = Played(1, size, end, 1.0)
    first = rw.Episode(
        observations=np.arange(1, size + 2),
        actions=np.array([1 + one.pair(t, True).action for t in range(size)]),  # 0 is the action of the last row
        rewards=np.array([one.pair(t, True).reward for t in range(size)]),
        terminated=end == "terminated",
        truncated=end == "truncated",
        len_lookback_buffer=0,
    )
    chunks = [first]
    if end == "cut":
        chunks.append(first.cut())
        chunks[1].add_env_step(observation=size + 2, action=9, reward=2.0, terminated=True)
    whole = [one.pair(t, True)._replace(action=1 + one.pair(t, True).action) for t in range(size)]
    pairs = [whole, [Pair(size + 1, 9, 2.0, 0.0, size + 2)]][: len(chunks)]  # of each chunk, in the order of its rows
    if spans:  # windows over all chunks, end to end
        observer: Any = rw.SequenceObserver(place.client, "a", length, length, end_of_episode="drop", timeout_s=60)
        rows = [pair for part in pairs for pair in (*part, None)]  # the last row of a chunk has no action
        windows = [(start, start + length) for start in range(0, len(rows) - length + 1, length)]
        expected = [[pair for pair in rows[a : b - 1] if pair is not None] for a, b in windows]
    else:
        observer = rw.TrajectoryObserver(place.client, "a", length, end_of_episode="tile", timeout_s=60)
        tiled = rw.WindowSpec(length, 1, "tile")
        expected = [part[a : b - 1] for part in pairs for a, b in tiled.windows(len(part) + 1)]
    with observer:
        for chunk in chunks:
            observer.write_episode(chunk)
        observer.flush()
        batch = read(place)
    if batch is None:
        assert not expected
        return
    assert pairs_of(rw.to_transitions(batch)) == expected
    steps = tree.map_structure(lambda leaf: leaf[None], first.steps())
    assert pairs_of(rw.to_transitions(steps)) == [whole]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_recorded_critic_of_50_is_told_of_the_end_that_it_did_not_expect(place: Place, end: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    with rw.EpisodeObserver(place.client, "a", 10) as observer:

        class Env(gymnasium.Env[Any, Any]):  # type: ignore[misc,name-defined]  # not installed everywhere
            observation_space, action_space = gymnasium.spaces.Discrete(9), gymnasium.spaces.Discrete(2)

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # noqa: ARG002
                self.at = 0
                return 0, {}

            def step(self, action: Any) -> Any:  # noqa: ARG002
                self.at += 1
                over = self.at == 3
                return self.at, 1.0, over and end == "terminated", over and end == "truncated", {}

        env = rw.environments.record(Env(), observer)
        env.reset()
        for _ in range(3):
            env.step(1)
        observer.flush()
        batch = read(place)
    assert batch is not None
    assert batch.data["reward"].shape == (1, 4)
    found = rw.returns.gae(rw.to_transitions(batch), np.full((1, 4), 50.0), gamma=0.99, lam=0.9).advantages
    assert found.shape == (1, 3)
    assert found[0, 2] == (pytest.approx(1 - 50) if end == "terminated" else pytest.approx(1 + 0.99 * 50 - 50))
