"""Transitions over n steps, in numbers worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import given
from hypothesis import strategies as st
from worlds import refusing

import reverb_writer as rw
from reverb_writer.steps import FIRST, LAST, MID

Passed = list[tuple[dict[str, Any], bool]]


def step(observation: float, reward: Any = 0.0, discount: Any = 0.0, *, last: bool = False, **more: Any) -> Any:
    return {
        "observation": np.float32(observation),
        "action": np.int32(10 * observation),
        "reward": reward,
        "discount": discount,
        "is_last": np.bool_(last),
        **more,
    }


def episode(rewards: list[float], discounts: list[float], first: int = 1) -> list[Any]:
    rows = enumerate(zip(rewards, discounts, strict=True))
    steps = [step(first + t, np.float32(reward), np.float32(discount)) for t, (reward, discount) in rows]
    return [*steps, step(first + len(rewards), np.float32(0), np.float32(0), last=True)]


def folding(n: int, gamma: float, *refused: int) -> tuple[Any, Passed]:
    """Return a transform, and what it passes on; its observer refuses the calls of these numbers."""
    passed: Passed = []

    def observer(transition: Any, *, end_of_episode: bool) -> None:
        passed.append((transition, end_of_episode))

    return rw.environments.NStepTransform(refusing(observer, *refused), n, gamma), passed


def transform(n: int, gamma: float, steps: list[Any]) -> Passed:
    fold, passed = folding(n, gamma)
    for one in steps:
        fold(one)
    return passed


def told(passed: Passed) -> list[tuple[float, ...]]:
    names = ("observation", "next_observation", "reward", "discount")
    return [tuple(round(float(transition[name]), 5) for name in names) for transition, _ in passed]


def test_transitions_grow_to_n_steps_and_shrink_at_the_end() -> None:
    passed = transform(3, 0.5, episode([2, 3, 5, 7], [1, 1, 1, 0]))
    expected = [(1, 2, 2, 1), (1, 3, 3.5, 0.5), (1, 4, 4.75, 0.25), (2, 5, 7.25, 0), (3, 5, 8.5, 0), (4, 5, 7, 0)]
    assert np.allclose(told(passed), expected)
    assert [end for _, end in passed] == [False] * 5 + [True]


def test_episodes_do_not_mix() -> None:
    one, other = episode([1, 1], [1, 0]), episode([5], [1], first=7)
    assert told(transform(2, 0.5, one + other)) == told(transform(2, 0.5, one)) + told(transform(2, 0.5, other))


def test_the_rest_of_the_first_step_goes_with_its_transition_and_markers_do_not() -> None:
    steps = episode([1, 1], [1, 0])
    for t, one in enumerate(steps):
        one |= {"seed": np.int64(t), "is_first": t == 0, "terminated": False, "truncated": False}
    (first, _), *_, (last, _) = transform(2, 0.5, steps)
    assert {*first} == {"observation", "action", "reward", "discount", "next_observation", "seed"}
    assert (first["seed"], first["action"], last["seed"], last["action"]) == (0, 10, 1, 20)
    assert (first["reward"].dtype, first["discount"].dtype) == (np.float32, np.float32)


def test_trajectories_of_tf_agents_are_taken() -> None:
    kinds, one = enumerate([(FIRST, MID), (MID, LAST), (LAST, FIRST)]), np.float32(1)
    steps = [rw.Trajectory(kind, np.float32(t), t, (), following, one, one) for t, (kind, following) in kinds]
    passed = transform(2, 0.5, steps)
    assert told(passed) == [(0, 1, 1, 1), (0, 2, 1.5, 0.5), (1, 2, 1, 1)]
    assert passed[0][0]["policy_info"] == ()


def test_rewards_and_discounts_may_be_nests_and_arrays_and_go_with_each_other() -> None:
    def steps(reward: Any, discount: Any) -> list[Any]:
        return [step(1, reward, discount), step(2, reward, discount), step(3, reward, discount, last=True)]

    (_, _), (two, _), _ = transform(2, 0.5, steps({"a": np.float32(1), "b": np.array([1.0, 2.0])}, np.float32(1)))
    assert two["reward"]["a"] == np.float32(1.5)
    assert two["reward"]["b"].tolist() == [1.5, 3.0]
    assert two["discount"] == {"a": 0.5, "b": 0.5}
    (one, _), (two, _), _ = transform(2, 0.5, steps(np.float32(1), (np.float64(1), np.array([0.0, 1.0]))))
    assert one["reward"][1].tolist() == [1, 1]
    assert (two["reward"][0], two["reward"][1].tolist()) == (1.5, [1, 1.5])
    assert (two["reward"][0].dtype, two["reward"][1].dtype) == (np.float32, np.float32)
    assert (two["discount"][0], two["discount"][1].tolist()) == (0.5, [0, 0.5])


@pytest.mark.parametrize("integer", [int, np.int32, bool])
def test_sums_of_integers_are_floats_because_they_have_fractions(integer: Any) -> None:
    one, zero = integer(1), integer(0)
    passed = transform(2, 0.5, [step(1, one, one), step(2, one, one), step(3, zero, zero, last=True)])
    assert told(passed) == [(1, 2, 1, 1), (1, 3, 1.5, 0.5), (2, 3, 1, 1)]
    assert {passed[0][0][name].dtype for name in ("reward", "discount")} == {np.dtype(np.float32)}


@given(
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.lists(st.tuples(st.integers(-9, 9), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
)
def test_transitions_that_end_n_steps_later_are_those_of_the_returns(
    n: int, gamma: float, rows: list[tuple[int, float]]
) -> None:
    rewards, discounts = [float(r) for r, _ in rows], [d for _, d in rows]
    passed = told(transform(n, gamma, episode(rewards, discounts, first=0)))
    size = len(rows)
    numbers, mask = np.arange(size), np.ones(size, bool)
    of_rows = np.array(rewards), np.array(discounts), numbers + 1, mask, numbers < size - 1
    pairs = rw.Transitions(numbers, numbers, *of_rows, extras={})
    expected = rw.n_step(pairs, n, gamma)
    longest = {start: (reward, discount) for start, _, reward, discount in passed}  # the last of each start
    assert [*longest] == [*range(len(rows))]
    folded = np.stack([expected.reward, expected.discount], -1)
    np.testing.assert_allclose([*longest.values()], folded, atol=1e-4)


def test_steps_without_a_marker_need_to_be_told_the_end() -> None:
    fold, passed = folding(2, 0.5)
    steps = [{k: v for k, v in one.items() if k != "is_last"} for one in episode([1, 1], [1, 0])]
    with pytest.raises(rw.errors.StructureError, match="need `is_last` or `step_type`"):
        fold(steps[0])
    for t, one in enumerate(steps):
        fold(one, end_of_episode=t == 2)
    assert told(passed) == [(1, 2, 1, 1), (1, 3, 1.5, 0), (2, 3, 1, 0)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"observation": 1, "action": 1, "is_last": False}, r"has no \['reward', 'discount'\]"),
        (3, "has no"),
        (step(1, (1.0, 2.0), (1.0, 1.0, 1.0)), "2 rewards and 3 discounts"),
    ],
)
def test_a_step_that_cannot_be_folded_is_refused(bad: Any, message: str) -> None:
    with pytest.raises(rw.errors.StructureError, match=message):
        transform(2, 0.5, [bad, bad])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reward": 0.5}, r"leaf `reward`: float64 \(\), expected int64 \(\) as in the first step"),
        ({"action": np.zeros(3, np.int32)}, r"leaf `action`: int32 \(3,\), expected int32 \(\) as in the first step"),
        ({"more": 1}, "its leaves are not those of the first step. Missing: none; unexpected: `more`"),
    ],
)
def test_a_step_that_does_not_fit_the_first_one_is_refused_and_changes_nothing(bad: Any, message: str) -> None:
    fold, passed = folding(2, 0.5)
    steps = [step(1, 2, 1.0), step(2, 4, 1.0), step(3, 6, 1.0), step(4, None, None, last=True)]
    for one in steps:
        if not one["is_last"] and one is not steps[0]:
            with pytest.raises(rw.errors.StructureError, match=message):
                fold({**one, **bad})
        fold(one)
    assert told(passed) == [(1, 2, 2, 1), (1, 3, 4, 0.5), (2, 4, 7, 0.5), (3, 4, 6, 1)]


@pytest.mark.parametrize(("n", "gamma"), [(0, 0.9), (1.5, 0.9), (2, 1.5), (2, -0.1), (2, float("nan"))])
def test_numbers_that_can_never_work_are_refused(n: Any, gamma: float) -> None:
    with pytest.raises(rw.errors.SpecError):
        rw.environments.NStepTransform(print, n, gamma)


class PerEnv:
    """Stands for a `TrajectoryObserver`: keeps what each environment is given."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.passed: list[Passed] = [[] for _ in range(num_envs)]

    def __call__(self, transition: Any, *, end_of_episode: Any, env_mask: Any) -> None:
        for env_id in np.flatnonzero(env_mask):
            row = tree.map_structure(lambda leaf, env_id=env_id: leaf[env_id], transition)
            self.passed[env_id].append((row, bool(end_of_episode[env_id])))


@st.composite
def schedules(draw: st.DrawFn) -> list[list[Any]]:
    """Draw for each environment its steps in the order of calls; None where it has none in a call."""
    num_envs, num_calls = draw(st.integers(1, 4)), draw(st.integers(1, 25))
    schedule: list[list[Any]] = []
    for env_id in range(num_envs):
        steps: list[Any] = []
        left = 0
        for number in range(num_calls):
            if draw(st.integers(0, 4)) == 0:
                steps.append(None)
                continue
            left = draw(st.integers(1, 6)) if left == 0 else left - 1
            numbers = float(100 * env_id + number), draw(st.integers(-9, 9)), draw(st.sampled_from([0, 0.5, 1]))
            steps.append(step(numbers[0], np.float32(numbers[1]), np.float32(numbers[2]), last=left == 0))
        schedule.append(steps)
    return schedule


@given(st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0]), schedules(), st.integers(1, 9))
def test_many_environments_are_folded_as_each_by_itself(
    n: int, gamma: float, schedule: list[list[Any]], refused: int
) -> None:
    num_envs = len(schedule)
    observer = PerEnv(num_envs)
    assert rw.environments.NStepTransform(observer, n, gamma).num_envs == num_envs
    fold = rw.environments.NStepTransform(refusing(observer, refused), n, gamma, num_envs=num_envs)
    nothing = step(-1.0, np.float32(99), np.float32(1), last=True)  # is not read
    for rows in zip(*schedule, strict=True):
        present = [row is not None for row in rows]
        given = [row or nothing for row in rows]
        together = {name: np.array([row[name] for row in given]) for name in nothing}
        try:
            fold(together, env_mask=None if all(present) else present)
        except rw.errors.ReplayTimeoutError:
            fold(together, env_mask=present)
    for env_id, steps in enumerate(schedule):
        alone = transform(n, gamma, [one for one in steps if one is not None])
        passed = observer.passed[env_id]
        assert np.allclose(told(passed), told(alone), atol=1e-4)
        assert [(end, row["action"], row.keys()) for row, end in passed] == [
            (end, row["action"], row.keys()) for row, end in alone
        ]


def test_steps_of_many_environments_that_do_not_fit_are_refused() -> None:
    def together(**more: Any) -> Any:
        return {**dict.fromkeys(("observation", "action", "reward"), np.zeros(2)), "discount": np.ones(2), **more}

    fold = rw.environments.NStepTransform(PerEnv(2), 3, 0.5)
    for bad, message in [
        (together(), "need `is_last` or `step_type`"),
        (together(is_last=np.zeros(3)), r"`end_of_episode` has shape \(3,\), expected \(2,\)"),
        (together(is_last=np.zeros(2), action=np.zeros(3)), r"leaf `action`: shape \(3,\), expected \(2, ...\)"),
        (together(is_last=np.zeros(2), reward=np.ones((2, 2)), discount=np.ones((2, 3))), "of shapes that broadcast"),
    ]:
        with pytest.raises(rw.errors.StructureError, match=message):
            fold(bad)
    with pytest.raises(rw.errors.SpecError, match="Pass `num_envs`"):
        rw.environments.NStepTransform(print, 3, 0.5)(step(1, 1.0, 1.0), env_mask=[True])
    with pytest.raises(rw.errors.SpecError, match="`num_envs` must be >= 1"):
        rw.environments.NStepTransform(print, 3, 0.5, num_envs=0)


def test_reset_forgets_the_episodes() -> None:
    (alone, passed), observer = folding(2, 0.5), PerEnv(1)
    together = rw.environments.NStepTransform(observer, 2, 0.5)
    for number, one in enumerate([step(1, 1.0, 1.0), *episode([5], [1], first=7)]):
        if number == 1:
            alone.reset()
            together.reset()
        alone(one)
        together({name: np.array([value]) for name, value in one.items()})
    assert told(passed) == told(observer.passed[0]) == [(7, 8, 5, 1)]
