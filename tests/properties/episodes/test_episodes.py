"""What holds for every episode: an oracle for the getters, a list as model, and chunks that make the whole again."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import tree
from hypothesis import example, given
from hypothesis import strategies as st

from reverb_writer.episodes import Episode, InfiniteLookbackBuffer
from reverb_writer.errors import StructureError
from reverb_writer.leaves import padded_rows
from reverb_writer.rows import PADDING

BOUNDS = st.none() | st.integers(-9, 9)
STEPS = st.none() | st.integers(-4, 4).filter(bool)
FILL = -7


def oracle(data: list[int], lookback: int, indices: Any, neg: bool) -> Any:
    """Return items of the data with fill on both sides, farther than any index reaches."""
    total, far = len(data), 50
    line = [FILL] * far + data + [FILL] * far

    def where(bound: int) -> int:
        return int(bound) + (lookback if bound >= 0 or neg else total)

    if not isinstance(indices, slice):
        found = [line[far + where(index)] for index in np.atleast_1d(indices)]
        return found if np.ndim(indices) else found[0]
    step = 1 if indices.step is None else indices.step
    start, stop = (lookback, total) if step > 0 else (total - 1, lookback - 1)
    start = start if indices.start is None else where(indices.start)
    stop = stop if indices.stop is None else where(indices.stop)
    if step > 0 and start > stop and (max(start, stop) < 0 or min(start, stop) >= total):
        start, stop = stop, start  # the one oddity of RLlib's that is kept
    return line[far + start : far + stop : step]


NUMBER, NUMBERS = st.integers(-9, 9), st.lists(st.integers(-9, 9), min_size=1, max_size=4)
INDICES = st.builds(slice, BOUNDS, BOUNDS, STEPS) | NUMBER | NUMBER.map(np.int64) | NUMBERS | NUMBERS.map(np.array)


@example(3, 0, slice(5, -9, -1), False, False)  # fill on both sides, backwards
@example(3, 0, slice(5, 3), False, False)  # its bounds are swapped
@given(st.integers(0, 6), st.integers(0, 6), INDICES, st.booleans(), st.booleans())
def test_getter_with_fill_reads_an_endless_line(
    size: int, lookback: int, indices: Any, neg: bool, finalized: bool
) -> None:
    data = [*range(10, 10 + size)]
    buffer = InfiniteLookbackBuffer(data, lookback)
    if finalized:
        buffer.finalize()
    result = buffer.get(indices, neg_index_as_lookback=neg, fill=FILL)
    assert np.asarray(result).tolist() == oracle(data, buffer.lookback, indices, neg)
    if isinstance(indices, slice) or np.ndim(indices):
        assert isinstance(result, np.ndarray if finalized else list)


@example(3, 0, slice(2, -9, -1), False)
@given(st.integers(0, 6), st.integers(0, 6), st.builds(slice, BOUNDS, BOUNDS, STEPS), st.booleans())
def test_getter_without_fill_is_the_slice_of_a_list(size: int, lookback: int, indices: slice, neg: bool) -> None:
    data = [*range(size)]
    buffer = InfiniteLookbackBuffer(data, lookback)
    total, step = len(data), 1 if indices.step is None else indices.step

    def clamped(bound: int | None, default: int) -> int | None:
        if bound is None:
            return default
        at = bound + (buffer.lookback if bound >= 0 or neg else total)
        return min(max(at, 0 if step > 0 else -1), total)

    start = clamped(indices.start, buffer.lookback if step > 0 else total - 1)
    stop = clamped(indices.stop, total if step > 0 else buffer.lookback - 1)
    assert start is not None
    start = start if step > 0 else min(start, total - 1)
    expected = [] if start < 0 else data[start : None if stop == -1 else stop : step]
    assert buffer.get(indices, neg_index_as_lookback=neg) == expected


@given(
    st.lists(
        st.one_of(
            st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans(),
            st.floats(width=32, allow_nan=False).map(np.float32), st.integers(0, 255).map(np.uint8),
        ),
        min_size=1, max_size=200,
    )
)  # fmt: skip
def test_column_of_numbers_is_what_stacking_them_makes(items: list[Any]) -> None:
    buffer = InfiniteLookbackBuffer()
    for item in items:
        buffer.append(item)
    expected = np.stack(items)
    result = buffer.finalize().get()
    assert result.dtype == expected.dtype
    assert np.array_equal(result, expected)


ITEMS = st.sampled_from(
    [1, 2.5, np.zeros(2), np.zeros(3), {"a": 1}, {"a": 1, "b": 2}, {"a": np.zeros(2)}, (1, 2), "s", None]
)
CALLS = st.lists(st.tuples(st.sampled_from(["append", "extend", "set", "pop"]), ITEMS, st.integers(-3, 3)), max_size=12)


@given(CALLS)
def test_buffer_is_a_list_and_a_refused_call_changes_nothing(calls: list[tuple[str, Any, int]]) -> None:
    buffer, model = InfiniteLookbackBuffer(), []
    for name, item, index in calls:
        before = str(buffer)
        try:
            if name == "append":
                buffer.append(item)
                model.append(item)
            elif name == "extend":
                buffer.extend([item] * abs(index))
                model += [item] * abs(index)
            elif name == "set":
                buffer.set(item, at_indices=index)
                model[index] = item
            else:
                buffer.pop(index)
                model.pop(index)
        except (StructureError, IndexError):
            assert str(buffer) == before
    assert len(buffer) == len(model)
    assert plain(buffer.get()) == plain(model)


def plain(value: Any) -> Any:
    """Return a nest as JSON has it."""
    return json.loads(json.dumps(value, default=lambda leaf: np.asarray(leaf).tolist()))


def told(episode: Episode) -> Any:
    """Return all that an episode tells of itself, the look-back aside, as plain data."""
    names = ("observations", "actions", "rewards", "infos")
    columns: dict[str, Any] = {name: getattr(episode, f"get_{name}")() for name in names}
    columns |= {key: episode.get_extra_model_outputs(key) for key in episode.extra_model_outputs}
    columns |= {name: getattr(episode, name) for name in ("t", "t_started", "is_terminated", "is_truncated")}
    return plain(columns)


@given(
    st.lists(st.integers(0, 70), max_size=3).map(lambda lengths: [*lengths, 1]),
    st.integers(0, 9),
    st.sampled_from(["", "terminated", "truncated"]),
)
def test_chunks_put_together_are_the_uncut_episode(lengths: list[int], lookback: int, ending: str) -> None:
    vector, action = np.zeros(2, np.float32), np.zeros(3)  # an environment and a policy may reuse their arrays

    def observation(n: int) -> Any:
        vector[:] = n / 3
        action[:] = n
        return {"n": n, "v": vector}

    whole, first = Episode("x"), Episode("x")
    for episode in (whole, first):
        episode.add_env_reset(observation(0), {"n": 0})
    chunks, numbers = [first], itertools.count(1)
    for part, length in enumerate(lengths):
        if part:
            chunks.append(chunks[-1].cut(lookback))
            assert (len(chunks[-1]), chunks[-1].t, chunks[-1].t_started) == (0, whole.t, whole.t)
            for column in (chunks[-1].observations, chunks[-1].actions):
                assert column.lookback == min(lookback, whole.t)
        for n in itertools.islice(numbers, length):
            over = n == sum(lengths)
            for episode in (whole, chunks[-1]):
                episode.add_env_step(
                    observation(n), action, n / 7, {"n": n},
                    terminated=over and ending == "terminated", truncated=over and ending == "truncated",
                    extra_model_outputs={"logp": np.float32(n)},
                )  # fmt: skip
        start = whole.t - length
        reach = min(lookback, start)
        seen = chunks[-1].get_rewards(slice(-lookback, length), neg_index_as_lookback=True, fill=-1.0)
        assert seen == [-1.0] * (lookback - reach) + whole.get_rewards(slice(start - reach, whole.t))
    assert sum(map(len, chunks)) == len(whole)
    for chunk in chunks[1:]:
        first.concat_episode(chunk)
    assert told(first) == told(whole)


@given(
    st.integers(0, 5), st.integers(0, 3), st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 3)), st.booleans()
)
def test_slice_holds_its_steps_and_the_observation_that_they_lead_to_and_a_look_back(
    size: int, lookback: int, wanted: slice, done: bool
) -> None:
    numbers = [*range(-lookback, size + 1)]
    columns: dict[str, Any] = {"observations": numbers, "actions": numbers[1:], "rewards": [0.0] * (size + lookback)}
    episode = Episode("x", **columns, t_started=10, len_lookback_buffer=lookback, terminated=done)
    episode.set_extra_model_outputs(key="value", new_data=[*range(size)])  # without look-back
    part = episode[wanted]
    start, stop, step = wanted.indices(size)
    steps = range(start, stop, step)
    assert part.get_observations() == ([*steps, stop] if start <= stop else [])
    assert part.get_actions() == [number + 1 for number in steps]
    assert (part.t_started, part.t, part.is_terminated) == (10 + start, 10 + start + len(steps), done and stop == size)
    if step == 1 and start <= stop:
        assert part.actions.data[: part.actions.lookback] == [*range(start - lookback + 1, start + 1)]
        values = part.extra_model_outputs["value"]
        assert values.data[: values.lookback] == [*range(max(start - lookback, 0), start)]
    part.validate()


@given(st.integers(1, 9), st.sampled_from(["", "terminated", "truncated"]), st.integers(0, 5))
def test_steps_make_the_episode_again(num_steps: int, ending: str, num_padding: int) -> None:
    flags: Any = {ending: True} if ending else {}
    episode = Episode(
        "x",
        observations={"n": np.arange(num_steps + 1), "v": (np.ones((num_steps + 1, 2)),)},
        actions=np.arange(num_steps),
        rewards=np.arange(num_steps) / 2,
        extra_model_outputs={"logp": np.ones(num_steps)},
        len_lookback_buffer=0,
        t_started=7,
        **flags,
    )
    steps = tree.map_structure(lambda leaf: padded_rows(leaf, num_steps + 1 + num_padding), episode.steps())
    kinds = np.append(episode.kinds(), np.full(num_padding, PADDING, np.uint8))
    again = Episode.from_steps(steps, kinds=kinds, id_="x", t_started=7)
    assert (again.id_, again.is_finalized, told(again)) == ("x", True, told(episode))
