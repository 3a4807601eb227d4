"""Steps of Gymnasium's vector environments, environment by environment in every mode, and data of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import spaces  # noqa: E402  # as the next two: only where gymnasium is
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402
from worlds import Counting, Sampling, counting, refusing, told, told_kinds  # noqa: E402

from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL  # noqa: E402
from reverb_writer.steps import StepStructure  # noqa: E402

MODES = [*AutoresetMode]
ENVS = [[(2, "terminated"), (1, "truncated")], [(3, "both"), (9, "terminated")]]

# What the environments do in every mode. An action is the number of the call to `step`, from 1 on; the action of a
# step that resets an environment has no effect and is not recorded.
SAME_STEP = [
    ["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt", "100 3 1 1 F", "101 0 0 0 Lr", "200 4 1 1 F", "201 5 2 0", "202 0 0 0 Lt"],
    ["1000 1 1 1 F", "1001 2 2 1", "1002 3 3 0", "1003 0 0 0 Lt", "1100 4 1 1 F", "1101 5 2 1"],
]
NEXT_STEP = [
    ["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt", "100 4 1 1 F", "101 0 0 0 Lr"],
    ["1000 1 1 1 F", "1001 2 2 1", "1002 3 3 0", "1003 0 0 0 Lt", "1100 5 1 1 F"],
]


class PerEnv:
    """A function of rows with flags: keeps the rows of each environment, spelled out, and as they came."""

    def __init__(self) -> None:
        self.by_env: list[list[str]] = [[], []]
        self.steps: list[Any] = []

    def __call__(self, step: Any, *, env_mask: Any = None) -> None:
        self.steps.append(step)
        for env_id in range(2) if env_mask is None else np.flatnonzero(env_mask):
            if "extras" in step:
                assert step["extras"][env_id].tolist() == [step["action"][env_id]] * 3
            if np.asarray(step["observation"]).dtype == np.float32:
                self.by_env[env_id].append(told(step, env_id))


class RowsPerEnv(PerEnv):
    """The same for rows with kinds, as `TrajectoryObserver` takes them."""

    num_envs = 2

    def write_row(self, row: Any, kinds: Any, env_mask: Any = None) -> None:
        assert row.keys() - {"extras"} == {"observation", "action", "reward"}
        assert (kinds.dtype, kinds.shape) == (np.uint8, (2,))
        for env_id in range(2) if env_mask is None else np.flatnonzero(env_mask):
            if "extras" in row:
                assert row["extras"][env_id].tolist() == [row["action"][env_id]] * 3
            self.by_env[env_id].append(told_kinds(row, kinds, env_id))


@pytest.fixture(params=["sync", "async", "async without shared memory", "sync without copies"])
def make(request: Any) -> Iterator[Any]:
    made = []

    def make(env_fns: Any, mode: AutoresetMode) -> Any:
        kinds: dict[str, Any] = {
            "sync": lambda: SyncVectorEnv(env_fns, autoreset_mode=mode),
            "sync without copies": lambda: SyncVectorEnv(env_fns, autoreset_mode=mode, copy=False),
            "async": lambda: AsyncVectorEnv(env_fns, autoreset_mode=mode),
            "async without shared memory": lambda: AsyncVectorEnv(env_fns, autoreset_mode=mode, shared_memory=False),
        }
        made.append(kinds[request.param]())
        return made[-1]

    yield make
    for env in made:
        env.close()


def counters() -> list[Any]:
    return [counting(ENVS[0]), counting(ENVS[1], offset=1000)]


HIDDEN = np.zeros((2, 3))  # a policy's states, in an array that the policy reuses


def play(env: Any, mode: AutoresetMode, num_steps: int, *, first: int = 1) -> None:
    for number in range(first, first + num_steps):
        HIDDEN[:] = number
        _, _, terminated, truncated, _ = env.step(np.full(env.num_envs, number))
        if mode is AutoresetMode.DISABLED and (terminated | truncated).any():
            env.reset(options={"reset_mask": terminated | truncated})


@pytest.mark.parametrize("mode", MODES)
def test_every_observation_of_a_environment_is_a_step_of_it(make: Any, mode: AutoresetMode) -> None:
    observer = PerEnv()
    env = rw.environments.record(make(counters(), mode), observer, extras=lambda: HIDDEN)
    env.reset()
    play(env, mode, 5)
    assert observer.by_env == (NEXT_STEP if mode is AutoresetMode.NEXT_STEP else SAME_STEP)


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_an_environment_have_kinds(make: Any, mode: AutoresetMode) -> None:
    observer = RowsPerEnv()
    env = rw.environments.record(make(counters(), mode), observer, extras=lambda: HIDDEN)
    env.reset()
    play(env, mode, 5)
    flagged = NEXT_STEP if mode is AutoresetMode.NEXT_STEP else SAME_STEP
    # The flags of `told` and the kinds of a row: F is FIRST, L is LAST without ACTION, and t is TERMINAL.
    kinds = {"F": FIRST | ACTION, "": ACTION, "Lt": LAST | TERMINAL, "Lr": LAST}
    split = [[[*row.split(), ""] for row in rows] for rows in flagged]
    assert observer.by_env == [[f"{o} {a} {r} {kinds[marks]}" for o, a, r, _, marks, *_ in rows] for rows in split]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("leave", ["reset", "close"])
def test_episodes_that_the_actor_leaves_are_truncated_and_terminal_observations_kept(
    make: Any, mode: AutoresetMode, leave: str
) -> None:
    observer = PerEnv()
    env = rw.environments.record(make(counters(), mode), observer)
    env.reset()
    play(env, mode, 2)
    getattr(env, leave)()
    assert observer.by_env == [
        ["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt"],
        ["1000 1 1 1 F", "1001 2 2 1", "1002 0 0 0 Lr"],
    ]


def test_the_environment_is_otherwise_the_same(make: Any) -> None:
    mode = AutoresetMode.NEXT_STEP
    env, bare = rw.environments.record(make(counters(), mode), PerEnv()), make(counters(), mode)
    assert isinstance(env, gymnasium.vector.VectorWrapper)
    np.testing.assert_array_equal(env.reset(seed=3)[0], bare.reset(seed=3)[0])
    for _ in range(4):
        for mine, theirs in zip(env.step(np.zeros(2, int))[:4], bare.step(np.zeros(2, int))[:4], strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_a_part_of_the_environments_may_be_reset_in_mid_episode() -> None:
    observer = PerEnv()
    mode = AutoresetMode.DISABLED
    env = rw.environments.record(SyncVectorEnv(counters(), autoreset_mode=mode), observer)
    env.reset()
    play(env, mode, 1)
    env.reset(options={"reset_mask": np.array([False, True])})
    play(env, mode, 1, first=2)
    assert observer.by_env == [
        ["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt"],
        ["1000 1 1 1 F", "1001 0 0 0 Lr", "1100 2 1 1 F"],
    ]


def test_an_environment_that_is_over_must_be_reset() -> None:
    env = rw.environments.record(SyncVectorEnv(counters(), autoreset_mode=AutoresetMode.DISABLED), PerEnv())
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(2, int))
    env.reset()
    env.step(np.zeros(2, int))
    env.step(np.zeros(2, int))
    with pytest.raises(gymnasium.error.ResetNeeded, match=r"environments \[0\]"):
        env.step(np.zeros(2, int))


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        # A refused step ends the episodes before it.
        (2, [["0 1 1 1 F", "1 0 0 0 Lr"], ["1000 1 1 1 F", "1001 0 0 0 Lr"]]),
        # A refused terminal observation is written at the next reset.
        (3, [["0 1 1 1 F", "1 2 2 0", "2 0 0 0 Lt"], ["1000 1 1 1 F", "1001 2 2 1", "1002 0 0 0 Lr"]]),
    ],
)
def test_episodes_with_a_refused_step_end_at_the_next_reset(refused: int, expected: list[list[str]]) -> None:
    observer, mode = PerEnv(), AutoresetMode.SAME_STEP
    env = rw.environments.record(SyncVectorEnv(counters(), autoreset_mode=mode), refusing(observer, refused))
    env.reset()
    with pytest.raises(rw.errors.ReplayTimeoutError):
        play(env, mode, 2)
    if refused == 2:
        with pytest.raises(gymnasium.error.ResetNeeded):
            play(env, mode, 1)
    env.reset()
    assert observer.by_env == expected


NEST = spaces.Dict(
    box=spaces.Box(-1, 1, (2,), np.float64),
    text=spaces.Text(5),
    parts=spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3]))),
)


def leaves_of(nest: Any) -> list[Any]:
    """Return the leaves of a sample of `NEST`, or of several environments, as lists."""
    return [np.asarray(leaf).tolist() for leaf in (nest["box"], nest["text"], *nest["parts"])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_nested_spaces_are_recorded_environment_by_environment(mode: AutoresetMode, kind: Any) -> None:
    envs = [Sampling(NEST, NEST) for _ in range(2)]
    for env_id, env in enumerate(envs):
        env.observation_space.seed(env_id)
    observer = PerEnv()
    env = rw.environments.record(kind([lambda: envs[0], lambda: envs[1]], autoreset_mode=mode), observer)
    taken = [env.action_space.sample() for _ in range(3)]
    seen = [env.reset()[0], *(env.step(action)[0] for action in taken)]
    if mode is AutoresetMode.NEXT_STEP:
        env.step(taken[-1])
    *steps, last = observer.steps
    for step, observation, action in zip(steps, seen, taken, strict=False):
        assert leaves_of(step["observation"]) == leaves_of(observation)
        assert leaves_of(step["action"]) == leaves_of(action)
    assert last["is_last"].tolist() == last["terminated"].tolist() == [True, True]
    if kind is SyncVectorEnv:
        finals = zip(*(leaves_of(env.observed[3]) for env in envs), strict=True)
        assert leaves_of(last["observation"]) == [list(pair) for pair in finals]
    structure = StepStructure(observer.steps[0], batch_size=2)
    assert all(structure.flatten(step, 0) for step in observer.steps)
    env.close()


def test_an_environment_that_does_not_say_when_it_resets_is_refused() -> None:
    env = SyncVectorEnv(counters())
    del env.metadata["autoreset_mode"]
    with pytest.raises(rw.errors.SpecError, match="autoreset_mode"):
        rw.environments.record(env, PerEnv())


@pytest.mark.parametrize(
    ("num_envs", "takes", "message"),
    [
        (2, None, "is 2 environments that step together, and the TrajectoryObserver takes steps of a single"),
        (2, 3, "is 2 environments .* takes steps of 3 environments that step together. Pass `num_envs=2` to it"),
        (None, 2, "is a single environment, and the .* takes steps of 2 environments .* Pass `num_envs=None` to it"),
    ],
)
def test_observers_and_environments_must_be_of_one_number(
    num_envs: int | None, takes: int | None, message: str
) -> None:
    env = counters()[0]() if num_envs is None else SyncVectorEnv(counters())
    with rw.LocalServer([rw.TableConfig("replay")]) as server:
        observer = rw.TrajectoryObserver(server, "replay", 2, num_envs=takes)
        with observer, pytest.raises(rw.errors.SpecError, match=message):
            rw.environments.record(env, observer)


def test_an_environment_that_hides_its_terminal_observations_is_refused() -> None:
    class Hiding(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *result, infos = super().step(actions)
            return *result, {name: info for name, info in infos.items() if name != "final_obs"}

    env = rw.environments.record(Hiding(counters(), autoreset_mode=AutoresetMode.SAME_STEP), PerEnv())
    env.reset()
    env.step(np.zeros(2, int))
    with pytest.raises(rw.errors.StructureError, match="`infos` have no `final_obs`"):
        env.step(np.zeros(2, int))


def test_infos_may_be_a_list() -> None:
    observer = PerEnv()
    envs = SyncVectorEnv(counters(), autoreset_mode=AutoresetMode.SAME_STEP)
    env = rw.environments.record(gymnasium.wrappers.vector.DictInfoToList(envs), observer)
    env.reset()
    play(env, AutoresetMode.SAME_STEP, 5)
    assert observer.by_env == SAME_STEP


def ignore(step: Any, *, env_mask: Any = None) -> None:
    """Take a step and do nothing."""


def test_extras_that_cannot_be_are_refused_before_the_environment_moves() -> None:
    with pytest.raises(rw.errors.SpecError, match=r"`extras` must be a function .*, got dict"):
        rw.environments.record(Counting([(2, "terminated")]), print, extras={})  # type: ignore[arg-type]
    envs = SyncVectorEnv([counting([(2, "terminated")])] * 2)
    env = rw.environments.record(envs, ignore, extras=lambda: {"value": np.zeros(3)})
    env.reset()
    with pytest.raises(rw.errors.StructureError, match=r"leaf `value` has shape \(3,\), expected \(2, \.\.\.\)"):
        env.step(np.zeros(2, np.int64))
