"""What the getters of an episode return, worked by RLlib 2.35 itself; `make rllib` compares the two alive.

The table is of the example in RLlib's own documentation. `tests/properties/episodes` has an oracle for indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.episodes import Episode, InfiniteLookbackBuffer
from reverb_writer.errors import OutOfRangeError, SpecError, StructureError

spaces = pytest.importorskip("gymnasium").spaces


def listed(result: Any) -> Any:
    """Return a result as plain numbers."""
    return np.asarray(result).tolist()


def test_negative_indices_count_from_the_end_or_from_ts_0() -> None:
    buffer = InfiniteLookbackBuffer([*range(10)], lookback=4)
    assert (buffer.get(), buffer[-1], buffer[-7], buffer[0]) == ([4, 5, 6, 7, 8, 9], 9, 3, 4)
    assert buffer.get(-1, neg_index_as_lookback=True) == 3
    assert (len(buffer), buffer.len_incl_lookback()) == (6, 10)
    with pytest.raises(IndexError, match=r"no row at -5: there are 6 rows and 4 of look-back. Pass `fill`, or a slice"):
        buffer.get(-5, neg_index_as_lookback=True)
    with pytest.raises(OutOfRangeError, match="no row at 6, -11"):
        buffer.get([0, 6, -11])


def test_empty_buffer_has_the_shape_of_its_space() -> None:
    box = InfiniteLookbackBuffer(space=spaces.Box(-1, 1, (2,), np.float32)).finalize()
    assert listed(box.get(slice(0, 2), fill=0.5)) == [[0.5, 0.5], [0.5, 0.5]]
    assert box.get().shape == (0, 2)


def example(**options: Any) -> Episode:
    """Return the episode of RLlib's documentation."""
    return Episode(
        observations=[0, 1, 2, 3],
        actions=[1, 2, 3],
        rewards=[1.0, 2.0, 3.0],
        infos=[{"a": 0}, {"b": 1}, {"c": 2}, {"d": 3}],
        extra_model_outputs={"mo": [1, 2, 3]},
        observation_space=spaces.Discrete(4),
        action_space=spaces.Discrete(4),
        len_lookback_buffer=0,
        **options,
    )


@pytest.mark.parametrize(
    ("indices", "fill", "observations", "others", "infos"),
    [
        (-1, None, 3, 3, {"d": 3}),
        (0, None, 0, 1, {"a": 0}),
        ([-1, 0], None, [3, 0], [3, 1], [{"d": 3}, {"a": 0}]),
        (slice(None, 2), None, [0, 1], [1, 2], [{"a": 0}, {"b": 1}]),
        (slice(-5, -2), -9, [-9, 0, 1], [-9, -9, 1], [-9, {"a": 0}, {"b": 1}]),
        (slice(2, 5), -7, [2, 3, -7], [3, -7, -7], [{"c": 2}, {"d": 3}, -7]),
    ],
)
@pytest.mark.parametrize("finalized", [False, True])
def test_each_getter_reads_its_column(
    indices: Any, fill: Any, observations: Any, others: Any, infos: Any, finalized: bool
) -> None:
    episode = example().finalize() if finalized else example()
    assert listed(episode.get_observations(indices, fill=fill)) == observations
    assert listed(episode.get_actions(indices, fill=fill)) == others
    assert listed(episode.get_rewards(indices, fill=fill)) == others
    assert listed(episode.get_extra_model_outputs("mo", indices, fill=fill)) == others
    assert episode.get_infos(indices, fill=fill) == infos


@pytest.mark.parametrize("finalized", [False, True])
def test_one_hot_getters(finalized: bool) -> None:
    episode = example().finalize() if finalized else example()
    assert listed(episode.get_actions(1, one_hot_discrete=True)) == [0, 0, 1, 0]
    assert listed(episode.get_actions(slice(0, 2), one_hot_discrete=True)) == [[0, 1, 0, 0], [0, 0, 1, 0]]
    zero_hot = episode.get_actions(-1, neg_index_as_lookback=True, fill=0.0, one_hot_discrete=True)
    assert (listed(zero_hot), zero_hot.dtype) == ([0, 0, 0, 0], np.float32)
    with pytest.raises(ValueError, match="one-hot vectors need a space"):
        episode.observations.__class__([1]).get(0, one_hot_discrete=True)


def test_one_hot_reaches_into_nests_and_leaves_the_rest() -> None:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    space = spaces.Dict(a=spaces.Discrete(3, start=1), b=spaces.MultiDiscrete([2, 3]), c=box)
    item = {"a": 3, "b": np.array([1, 2]), "c": np.array([0.5, -0.5], np.float32)}
    buffer = InfiniteLookbackBuffer([item], space=space)
    before, row = buffer.get(slice(-1, 1), neg_index_as_lookback=True, fill=0.0, one_hot_discrete=True)
    assert {key: leaf.tolist() for key, leaf in row.items()} == {"a": [0, 0, 1], "b": [0, 1, 0, 0, 1], "c": [0.5, -0.5]}
    assert {key: leaf.tolist() for key, leaf in before.items()} == {"a": [0] * 3, "b": [0] * 5, "c": [0, 0]}
    buffer.append({**item, "a": 0})
    with pytest.raises(StructureError, match="one-hot vectors need values of Discrete"):
        buffer.get(1, one_hot_discrete=True)


@pytest.mark.parametrize(
    ("rows", "fill", "dtype", "expected"),
    [
        ([1, 2], 0.0, np.int64, [0, 1]),  # an int column stays one, if the fill is whole
        ([1, 2], 0.5, np.float64, [0.5, 1.0]),
        (np.array([1, 2], np.uint8), -1, np.int64, [-1, 1]),
        (np.array([1, 2], np.float32), 0.5, np.float32, [0.5, 1.0]),
        (np.ones((2, 2), np.float32), 3, np.float32, [[3, 3], [1, 1]]),
        (np.ones((2, 2), np.float32), [3, 4], np.float32, [[3, 4], [1, 1]]),
        ([1, 2], np.array(0.5), np.float64, [0.5, 1.0]),
        (np.ones((2, 2), np.uint8), np.array([300, 4]), np.int64, [[300, 4], [1, 1]]),
    ],
)
def test_fill_widens_a_column_without_a_space_only_if_it_must(rows: Any, fill: Any, dtype: Any, expected: Any) -> None:
    result = InfiniteLookbackBuffer(rows).finalize().get(slice(-1, 1), neg_index_as_lookback=True, fill=fill)
    assert (result.dtype, result.tolist()) == (dtype, expected)


def test_fill_is_cast_to_the_space_or_refused() -> None:
    discrete = InfiniteLookbackBuffer([1], space=spaces.Discrete(4))
    assert discrete.get(slice(0, 2), fill=0.5) == [1, 0]
    pixels = InfiniteLookbackBuffer(np.ones((2, 3), np.uint8), space=spaces.Box(0, 255, (3,), np.uint8))
    assert pixels.get(slice(1, 3), fill=7).tolist() == [[1, 1, 1], [7, 7, 7]]
    for fill, message in ((-1, "a number that uint8 can hold"), ([1, 2], r"uint8 \(3,\)"), ("x", "a number")):
        with pytest.raises(SpecError, match=message):
            pixels.get(slice(1, 3), fill=fill)
    with pytest.raises(SpecError, match="a number, or a row like the others"):
        InfiniteLookbackBuffer([1.0]).get(slice(0, 2), fill="x")


def test_nests_are_filled_leaf_by_leaf() -> None:
    buffer = InfiniteLookbackBuffer([{"a": 1, "b": (np.ones(2),)}]).finalize()
    padded = buffer.get(slice(0, 2), fill=0)
    assert (padded["a"].tolist(), padded["b"][0].tolist()) == ([1, 0], [[1, 1], [0, 0]])
    padded = buffer.get(slice(0, 2), fill={"a": 5, "b": (np.array([6.0, 7.0]),)})
    assert (padded["a"].tolist(), padded["b"][0].tolist()) == ([1, 5], [[1, 1], [6, 7]])
    with pytest.raises(SpecError, match="a row of 2 leaves"):
        buffer.get(slice(0, 2), fill={"a": 5})


def test_what_is_returned_is_the_callers_own() -> None:
    episode = Episode(observations=np.zeros((3, 2)), actions=[0, 0], rewards=[0.0, 0.0], len_lookback_buffer=0)
    for indices in (0, [0], slice(0, 2), None):
        episode.get_observations(indices)[...] = 9
    assert not np.any(episode.get_observations())


@pytest.mark.parametrize("indices", [1.5, "1", slice(0.5, 2), slice(0, 2, 0), [None]])
def test_index_that_is_none_is_refused(indices: Any) -> None:
    with pytest.raises(SpecError, match=r"must be an integer|must not be 0"):
        InfiniteLookbackBuffer([1, 2, 3]).get(indices)


@pytest.mark.parametrize(
    ("rows", "row"), [([2**53 + 1], 0.5), ([0.5], 2**53 + 1), ([0.5], np.int64(-(2**60) - 1)), ([2**53 + 1], 1j)]
)
@pytest.mark.parametrize("finalized", [False, True])
def test_integer_that_a_float_cannot_hold_is_refused_beside_floats(rows: Any, row: Any, finalized: bool) -> None:
    """It was rounded: 9007199254740992.0 for 9007199254740993."""
    buffer = InfiniteLookbackBuffer(rows)
    if finalized:
        buffer.finalize()
    before = str(buffer)
    calls: list[Any] = [
        lambda: buffer.append(row), lambda: buffer.extend([row]), lambda: buffer.set([row], at_indices=[0]),
        lambda: buffer.concat(InfiniteLookbackBuffer([row])), lambda: InfiniteLookbackBuffer([*rows, row]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StructureError, match=r"integers beyond 9007199254740992, which .* would round"):
            call()
    assert str(buffer) == before


def test_integers_beyond_int64_are_kept() -> None:
    buffer = InfiniteLookbackBuffer([1])
    for number in (2**63, 2**64 - 1):
        with pytest.raises(StructureError, match="would round"):  # int64 and uint64 have only a float in common
            buffer.append(number)
    assert InfiniteLookbackBuffer([2**64 - 1]).finalize().get().tolist() == [2**64 - 1]
