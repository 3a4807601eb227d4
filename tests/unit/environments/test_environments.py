"""What Gymnasium's environments are recorded as, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tree

import reverb_writer as rw

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import Env, spaces  # noqa: E402  # as the next ones: only where gymnasium is
from gymnasium.vector import VectorEnv  # noqa: E402
from worlds import Counting, Rows, Sampling, refusing, told  # noqa: E402

from reverb_writer.steps import StepStructure  # noqa: E402

EPISODES = [(2, "terminated"), (1, "truncated"), (2, "both")]


HIDDEN = np.zeros(3)  # a policy's state, in an array that the policy reuses


def play(env: Any, num_steps: int, first_action: int = 10) -> None:
    env.reset()
    for action in range(first_action, first_action + num_steps):
        HIDDEN[:] = action
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()


def test_every_observation_is_a_step_and_the_terminal_one_says_how_it_ended() -> None:
    steps: list[Any] = []
    env = rw.environments.record(Counting(EPISODES), steps.append, extras=lambda: HIDDEN)
    play(env, 5)
    assert [told(step) for step in steps] == [
        "0 10 1 1 F",
        "1 11 2 0",  # this action led to the terminal state
        "2 0 0 0 Lt",
        "100 12 1 1 F",
        "101 0 0 0 Lr",
        "200 13 1 1 F",
        "201 14 2 0",
        "202 0 0 0 Lt",
    ]
    assert [step.pop("extras").tolist() for step in steps] == [[step["action"]] * 3 for step in steps]
    expected = {
        "observation": (np.float32, (2,)),
        "action": (np.int64, ()),
        "reward": (np.float32, ()),
        "discount": (np.float32, ()),
        **dict.fromkeys(("is_first", "is_last", "terminated", "truncated"), (np.bool_, ())),
    }
    assert [{name: (leaf.dtype, leaf.shape) for name, leaf in step.items()} for step in steps] == [expected] * 8
    env.reset()  # without steps it leaves nothing
    env.close()
    assert len(steps) == 8


def test_an_observer_gets_rows_with_kinds_and_no_flags() -> None:
    observer = Rows()
    env = rw.environments.record(Counting(EPISODES), observer)
    play(env, 5)
    env.step(15)
    env.close()
    assert observer.told == [  # FIRST 1, ACTION 2, LAST 4, TERMINAL 8
        "0 10 1 3",
        "1 11 2 2",
        "2 0 0 12",
        "100 12 1 3",
        "101 0 0 4",
        "200 13 1 3",
        "201 14 2 2",
        "202 0 0 12",
        "300 15 1 3",
        "301 0 0 4",
    ]
    assert {tuple(row) for row in observer.rows} == {("observation", "action", "reward")}


def test_the_environment_is_otherwise_the_same() -> None:
    env, bare = rw.environments.record(Counting(EPISODES), [].append), Counting(EPISODES)
    assert isinstance(env, gymnasium.Wrapper)
    np.testing.assert_array_equal(env.reset(seed=3)[0], bare.reset(seed=3)[0])
    observation, *rest = env.step(0)
    expected, *expected_rest = bare.step(0)
    np.testing.assert_array_equal(observation, expected)
    assert rest == expected_rest
    assert env.np_random_seed == 3
    assert env.observation_space is env.unwrapped.observation_space


@pytest.mark.parametrize("leave", ["reset", "close"])
def test_an_episode_that_the_actor_leaves_is_truncated(leave: str) -> None:
    steps: list[Any] = []
    env = rw.environments.record(Counting([(9, "terminated")]), steps.append)
    env.reset()
    env.step(1)
    getattr(env, leave)()
    assert [told(step) for step in steps] == ["0 1 1 1 F", "1 0 0 0 Lr"]
    env.close()
    env.close()
    assert len(steps) == 2


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_a_step_out_of_an_episode_is_refused(end: str) -> None:
    steps: list[Any] = []
    env = rw.environments.record(Counting([(1, end)]), steps.append)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset()
    env.step(0)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        (1, ["100 3 1 1 F", "101 4 2 1", "102 0 0 0 Lr"]),  # nothing of the first episode was written
        (2, ["0 1 1 1 F", "1 0 0 0 Lr", "100 3 1 1 F", "101 4 2 1", "102 0 0 0 Lr"]),
    ],
)
def test_an_episode_with_a_step_that_the_observer_refused_ends_before_it(refused: int, expected: list[str]) -> None:
    steps: list[Any] = []
    env = rw.environments.record(Counting([(9, "terminated")]), refusing(steps.append, refused))
    env.reset()
    with pytest.raises(rw.errors.ReplayTimeoutError):  # noqa: PT012  # either of the two
        env.step(1)
        env.step(2)
    with pytest.raises(gymnasium.error.ResetNeeded):  # a step would be missing
        env.step(2)
    env.reset()
    env.step(3)
    env.step(4)
    env.close()
    assert [told(step) for step in steps] == expected


def test_a_step_that_the_environment_refused_is_not_recorded() -> None:
    class Broken(Counting):
        def step(self, action: Any) -> Any:
            if action == 666:
                raise RuntimeError("broken")
            return super().step(action)

    steps: list[Any] = []
    env = rw.environments.record(Broken([(2, "terminated")]), steps.append)
    env.reset()
    env.step(1)
    with pytest.raises(RuntimeError, match="broken"):
        env.step(666)
    env.step(2)
    assert [told(step) for step in steps] == ["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt"]


SPACES: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2, 3), np.float64),
    "pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "number": spaces.Box(-1, 1, (), np.float32),
    "discrete": spaces.Discrete(5, start=-2),
    "multi8": spaces.MultiDiscrete([2, 3], dtype=np.uint8),
    "multi": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "binary": spaces.MultiBinary((2, 3)),
    "text": spaces.Text(8),
    "dict": spaces.Dict(z=spaces.Discrete(3), a=spaces.Dict(b=spaces.Box(0, 1, (2,)), t=spaces.Text(4))),
    "tuple": spaces.Tuple((spaces.MultiBinary(3), spaces.Tuple((spaces.Discrete(2), spaces.Dict(x=spaces.Text(3)))))),
}


@pytest.mark.parametrize("name", SPACES)
def test_spaces_of_this_kind_are_recorded_as_they_are(name: str) -> None:
    space = SPACES[name]
    space.seed(0)
    steps: list[Any] = []
    env = Sampling(space, space)
    recorder = rw.environments.record(env, steps.append)
    recorder.reset()
    actions = [space.sample() for _ in range(3)]
    for action in actions:
        recorder.step(action)
    for step, observation in zip(steps, env.observed, strict=True):
        assert equal(step["observation"], observation)
        assert space.contains(dict(step["observation"]) if name == "dict" else step["observation"])
    for step, action in zip(steps, actions, strict=False):
        assert equal(step["action"], action)
    structure = StepStructure(steps[0])
    assert all(structure.flatten(step, 0) for step in steps)


def equal(mine: Any, theirs: Any) -> bool:
    tree.assert_same_structure(mine, theirs, check_types=False)
    return all(np.array_equal(a, b) for a, b in zip(tree.flatten(mine), tree.flatten(theirs), strict=True))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Graph(spaces.Box(0, 1, (2,)), None), "`observation`: a space of type Graph .* nodes and edges"),
        (spaces.Sequence(spaces.Discrete(3)), "`observation`: a space of type Sequence .* its length differs"),
        (spaces.OneOf([spaces.Discrete(3), spaces.Text(3)]), "`observation`: a space of type OneOf"),
        (
            spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Sequence(spaces.Discrete(3))))),
            "`observation/a/1`: a space of type Sequence",
        ),
    ],
)
def test_a_space_whose_elements_differ_in_shape_is_refused_by_name(space: Any, message: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=message):
        rw.environments.record(Sampling(space, spaces.Discrete(2)), print)
    with pytest.raises(rw.errors.SpecError, match=message.replace("observation", "action")):
        rw.environments.record(Sampling(spaces.Discrete(2), space), print)


@pytest.mark.parametrize(
    ("space", "given", "written"),
    [
        (spaces.Box(-1, 1, (2,), np.float32), [0.5, 1], np.array([0.5, 1], np.float32)),
        (spaces.Box(-1, 1, (1,), np.float32), 0.5, np.array([0.5], np.float32)),
        (spaces.Discrete(3), np.array([2]), np.int64(2)),
        (spaces.Discrete(3), np.int32(2), np.int64(2)),
        (spaces.Discrete(3), True, np.int64(1)),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 255]), np.array([3, 255], np.uint8)),
    ],
)
def test_an_action_is_brought_to_the_form_of_its_space(space: Any, given: Any, written: Any) -> None:
    steps: list[Any] = []
    env = rw.environments.record(Sampling(spaces.Discrete(2), space), steps.append)
    env.reset()
    env.step(given)
    assert steps[0]["action"].dtype == written.dtype
    np.testing.assert_array_equal(steps[0]["action"], written, strict=True)


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (spaces.Discrete(3), 1.5),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([3, 256])),
        (spaces.Box(-1, 1, (2,), np.float32), np.zeros(3)),
        (spaces.Box(-1, 1, (2,), np.float32), np.array(["a", "b"])),
        (spaces.Box(-1, 1, (2,), np.float32), None),
    ],
)
def test_an_action_that_is_not_of_its_space_is_refused(space: Any, given: Any) -> None:
    steps: list[Any] = []
    env = rw.environments.record(Sampling(spaces.Discrete(2), space), steps.append)
    env.reset()
    with pytest.raises(rw.errors.StructureError, match=r"`action`: .* as its space says"):
        env.step(given)
    assert steps == []
    env.step(space.sample())  # nothing has changed
    assert len(steps) == 1


def test_environment_that_resets_itself_is_recorded_as_one_that_the_actor_resets() -> None:
    steps: list[Any] = []
    env = rw.environments.record(gymnasium.wrappers.Autoreset(Counting(EPISODES)), steps.append)
    env.reset(seed=3)
    for action in (10, 11, -1, 12, -2, 13, 14, -3):  # the negative ones reset, and are taken by nobody
        env.step(action)
    by_hand: list[Any] = []
    play(rw.environments.record(Counting(EPISODES), by_hand.append), 5)
    assert [told(step) for step in steps] == [told(step) for step in by_hand]


def test_environment_that_resets_itself_needs_a_reset_when_a_step_was_not_recorded() -> None:
    steps: list[Any] = []
    env = rw.environments.record(gymnasium.wrappers.Autoreset(Counting(EPISODES)), refusing(steps.append, 2))
    env.reset()
    env.step(10)
    with pytest.raises(rw.errors.ReplayTimeoutError):
        env.step(11)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(12)
    env.reset()
    env.step(13)
    assert [told(step) for step in steps] == ["0 10 1 1 F", "1 0 0 0 Lr", "100 13 1 1 F", "101 0 0 0 Lr"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # its check warns of bounds that are infinite
def test_recorded_environment_passes_gymnasiums_own_check_and_is_made_again_from_its_spec() -> None:
    from gymnasium.utils.env_checker import check_env

    steps: list[Any] = []
    env = rw.environments.record(gymnasium.make("CartPole-v1"), steps.append)
    check_env(env, skip_render_check=True)
    steps.clear()
    with gymnasium.make(env.spec) as again:  # has the same observer
        again.reset(seed=1)
        again.step(0)
    assert [bool(step["is_last"]) for step in steps] == [False, True]


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_environment_without_a_space_is_refused(missing: str) -> None:
    class Bare(Env[Any, Any]):
        """An environment that says of one side only what it is like."""

    class BareLanes(VectorEnv[Any, Any, Any]):
        """The same in several environments."""

        num_envs = 2
        metadata: Any = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # noqa: RUF012  # as Gymnasium's

    for kind, prefix in ((Bare, ""), (BareLanes, "single_")):
        for name in {"observation_space", "action_space"} - {missing}:
            setattr(kind, prefix + name, spaces.Discrete(2))
        said = rf"`env` must have `{prefix}{missing}`, a gymnasium.Space; {kind.__name__}"
        with pytest.raises(rw.errors.SpecError, match=said):
            rw.environments.record(kind(), [].append)


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(rw.errors.SpecError, match=r"`env` must be a gymnasium.Env, .* got int"):
        rw.environments.record(3, print)


class Costly(Counting):
    """A `Counting` with the number of the step as its cost, in `info`."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        return *result, {**info, "cost": self._t / 2}


def test_extras_may_look_at_the_info_of_their_step() -> None:
    observer = Rows()
    env = rw.environments.record(
        Costly(EPISODES), observer, extras=lambda info: {"cost": np.float32(info["cost"]), "text": "a\0"}
    )
    play(env, 3)
    assert [row["extras"]["cost"].item() for row in observer.rows] == [0.5, 1.0, 0.0, 0.5, 0.0]
    assert [np.asarray(row["extras"]["text"], object).item() for row in observer.rows][:3] == ["a\0", "a\0", b""]


def test_the_last_row_has_the_final_extras() -> None:
    observer = Rows()
    env = rw.environments.record(
        Counting([(2, "truncated")]),
        observer,
        extras=lambda: {"value": np.float32(7), "log_prob": np.float32(-1)},
        final_extras=lambda observation: {"value": observation.sum()},
    )
    play(env, 3)
    env.close()
    values = [(row["extras"]["value"].item(), row["extras"]["log_prob"].item()) for row in observer.rows]
    # Both numbers of the final observations are 2 and 101.
    assert values == [(7, -1), (7, -1), (4, 0), (7, -1), (202, 0)]
    assert {row["extras"]["value"].dtype for row in observer.rows} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("extras", "final", "message"),
    [
        (None, lambda _: {}, "`final_extras` needs `extras`"),
        (dict, 3, "`final_extras` must be a function of observations, got int"),
        (lambda a, b: {a: b}, None, r"`extras` must be .*; it needs a, b"),
        (lambda *, a: {a: 0}, None, r"`extras` must be .*; it needs a"),
        ({}, None, r"`extras` must be a function of no arguments, .*, got dict"),
    ],
)
def test_functions_that_cannot_be_extras_are_refused(extras: Any, final: Any, message: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=message):
        rw.environments.record(Counting(EPISODES), Rows(), extras=extras, final_extras=final)


@pytest.mark.parametrize(
    ("final", "message"),
    [
        ({"values": 1}, "`final_extras` has `values`, which `extras` does not have"),
        ({"value": np.zeros(2)}, r"`final_extras`, leaf `value`: float64 \(2,\), expected float32 \(\) as in `extras`"),
        (3.0, "`final_extras`: its leaves are not those of `extras`"),
    ],
)
def test_final_extras_that_do_not_fit_are_refused(final: Any, message: str) -> None:
    env = rw.environments.record(
        Counting(EPISODES), Rows(), extras=lambda: {"value": np.float32(0)}, final_extras=lambda _: final
    )
    env.reset()
    env.step(0)
    with pytest.raises(rw.errors.StructureError, match=message):
        env.step(0)


def test_extras_of_none_are_named() -> None:
    env = rw.environments.record(Counting(EPISODES), Rows(), extras=lambda: None)
    env.reset()
    with pytest.raises(rw.errors.StructureError, match="`extras`: NoneType is not an array"):
        env.step(0)


class Returning(Sampling):
    """Returns an observation and a reward, whatever is done."""

    def __init__(self, space: spaces.Space[Any], observation: Any, reward: Any) -> None:
        super().__init__(space, spaces.Discrete(9))
        self._observation, self._reward = observation, reward

    def step(self, action: Any) -> Any:  # noqa: ARG002  # whatever is done
        return self._observation, self._reward, False, False, {}


BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
PAIR = spaces.Dict(a=BOX, b=spaces.Discrete(3))
ONES = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("space", "observation", "reward", "message"),
    [
        (BOX, np.array([1e300, 0]), 0.0, r"`observation`: 1e\+300 \(float64\) does not fit into float32"),
        (BOX, None, 0.0, r"`observation`: NoneType \(\), expected float32 \(2,\) as its space says"),
        (BOX, ONES, 1e300, r"`reward`: 1e\+300 .* does not fit into float32"),
        (BOX, ONES, None, r"`reward`: NoneType \(\), expected float32 \(\) as rewards are stored"),
        (
            PAIR,
            {"a": ONES},
            0.0,
            "`observation`: its leaves are not those of its space. Missing: `b`; unexpected: none",
        ),
        (PAIR, {"a": ONES, "b": 1, "c": 2}, 0.0, "`observation`: .* Missing: none; unexpected: `c`"),
        (PAIR, ONES, 0.0, "`observation`: ndarray, expected a dict, as its space says"),
        (spaces.Tuple((BOX, BOX)), (ONES,), 0.0, "`observation`: tuple of 1 parts, expected a tuple of 2 parts"),
    ],
)
def test_observations_and_rewards_that_cannot_be_stored_are_refused(
    space: Any, observation: Any, reward: Any, message: str
) -> None:
    observer = Rows()
    env = rw.environments.record(Returning(space, observation, reward), observer)
    env.reset()
    with pytest.raises(rw.errors.StructureError, match=message):
        env.step(0)
    assert observer.rows == []
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


def test_infinite_and_undefined_numbers_of_the_environment_are_kept() -> None:
    steps: list[Any] = []
    env = rw.environments.record(Returning(BOX, np.array([np.inf, np.nan]), np.float64(-np.inf)), steps.append)
    env.reset()
    env.step(0)
    env.step(0)
    np.testing.assert_array_equal(steps[1]["observation"], [np.inf, np.nan])
    assert steps[0]["reward"] == -np.inf
