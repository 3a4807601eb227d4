"""Rows of simulators: one `gymnasium.Env` of N environments that takes and returns tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw

gymnasium = pytest.importorskip("gymnasium")

from gymnasium import Env, spaces  # noqa: E402  # as the next one: only where gymnasium is
from worlds import told_kinds  # noqa: E402

LENGTHS = np.array([2, 3])


class Tensor:
    """Numbers on a device: as PyTorch's tensors, they become an array only after `detach().cpu()`."""

    def __init__(self, array: Any) -> None:
        self.array = np.array(array)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> np.ndarray[Any, Any]:
        return Copied(self.array)  # type: ignore[return-value]

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("cannot convert a tensor on a device to an array")


class Copied:
    """The same numbers on the host."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def is_floating_point(self) -> bool:
        return bool(self._array.dtype.kind == "f")

    def element_size(self) -> int:
        return int(self._array.itemsize)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:  # NumPy 2 passes `copy`
        return self._array if dtype is None else self._array.astype(dtype)


class Simulator(Env[Any, Any]):
    """Environment e is observed as 1000 * e + 100 * episode + step; it ends, terminated or truncated, after its length.

    It has the attributes of Isaac Lab's environments.
    """

    num_envs = 2
    single_observation_space = spaces.Dict(policy=spaces.Box(-np.inf, np.inf, (2,), np.float32))
    single_action_space = spaces.Box(-1, 100, (1,), np.float32)
    observation_space = spaces.Dict(policy=spaces.Box(-np.inf, np.inf, (2, 2), np.float32))
    action_space = spaces.Box(-1, 100, (2, 1), np.float32)

    def __init__(self, final: str = "final_obs") -> None:
        self._final = final
        self._episode, self._t = np.zeros(2, int), np.zeros(2, int)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert isinstance(action, Tensor)
        self._t += 1
        over, infos = self._t == LENGTHS, {}
        if over.any() and self._final:
            infos = {self._final: self._observe(), f"_{self._final}": Tensor(over)}
        reward = Tensor(self._t.astype(np.float32))
        self._t[over] = 0
        self._episode[over] += 1
        return self._observe(), reward, Tensor(over & [True, False]), Tensor(over & [False, True]), infos

    def _observe(self) -> Any:
        seen = 1000 * np.arange(2) + 100 * self._episode + self._t
        return {"policy": Tensor(np.stack([seen, seen], 1).astype(np.float32))}


class Rows:
    """Stands for an observer of two environments."""

    num_envs = 2

    def __init__(self) -> None:
        self.by_env: list[list[str]] = [[], []]

    def write_row(self, row: Any, kinds: Any, env_mask: Any = None) -> None:
        row = {**row, "observation": row["observation"]["policy"], "action": row["action"][:, 0].astype(int)}
        for env_id in range(2) if env_mask is None else np.flatnonzero(env_mask):
            self.by_env[env_id].append(told_kinds(row, kinds, env_id))


@pytest.mark.parametrize("final", ["final_obs", "final_observation"])
def test_a_simulator_is_recorded_as_environments_that_reset_themselves_at_once(final: str) -> None:
    observer = Rows()
    env = rw.environments.record(gymnasium.wrappers.OrderEnforcing(Simulator(final)), observer)
    assert isinstance(env, gymnasium.Wrapper)
    env.reset(seed=1)
    for number in range(1, 5):
        env.step(Tensor(np.full((2, 1), number, np.float32)))
    env.close()
    assert observer.by_env == [  # FIRST 1, ACTION 2, LAST 4, TERMINAL 8
        ["0 1 1 3", "1 2 2 2", "2 0 0 12", "100 3 1 3", "101 4 2 2", "102 0 0 12"],
        ["1000 1 1 3", "1001 2 2 2", "1002 3 3 2", "1003 0 0 4", "1100 4 1 3", "1101 0 0 4"],
    ]


def test_a_simulator_without_final_observations_is_refused_with_the_lines_to_write() -> None:
    env = rw.environments.record(Simulator(""), Rows())
    env.reset()
    env.step(Tensor(np.zeros((2, 1), np.float32)))
    with pytest.raises(rw.errors.StructureError, match=r"no `final_obs` (?s:.*)observer\(\{.*terminated=terminated"):
        env.step(Tensor(np.zeros((2, 1), np.float32)))


def test_a_simulator_with_final_observations_of_other_environments_only_is_refused() -> None:
    class Partial(Simulator):
        def step(self, action: Any) -> Any:
            *result, infos = super().step(action)
            return *result, {**infos, "_final_obs": Tensor([False, True])} if infos else infos

    env = rw.environments.record(Partial(), Rows())
    env.reset()
    env.step(Tensor(np.zeros((2, 1), np.float32)))
    with pytest.raises(rw.errors.StructureError, match="environment 0: its episode is over"):
        env.step(Tensor(np.zeros((2, 1), np.float32)))


def test_a_simulator_needs_an_observer_of_its_number_of_environments() -> None:
    observer = Rows()
    observer.num_envs = 3
    with pytest.raises(rw.errors.SpecError, match=r"`env` is 2 environments .* Pass `num_envs=2` to it"):
        rw.environments.record(Simulator(), observer)


def test_extras_and_final_extras_have_a_row_per_environment() -> None:
    rows: list[Any] = []
    env = rw.environments.record(
        Simulator(),
        lambda row, env_mask=None: rows.append((row, env_mask)),
        extras=lambda infos: {"value": Tensor(np.array([1, 2], np.float32)), "is_over": np.full(2, bool(infos))},
        final_extras=lambda observation: {"value": Tensor(observation["policy"][:, 0])},
    )
    env.reset()
    for _ in range(2):
        env.step(Tensor(np.zeros((2, 1), np.float32)))
    first, second, (last, env_mask) = rows
    assert [row["extras"]["value"].tolist() for row, _ in (first, second)] == [[1, 2]] * 2
    assert [row["extras"]["is_over"].tolist() for row, _ in (first, second)] == [[False] * 2, [True] * 2]
    assert env_mask.tolist() == [True, False]
    assert last["extras"]["value"][0] == 2
    assert not last["extras"]["is_over"][0]
