"""Small environments whose observations say where and when they were made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import reverb_writer as rw

END = {"terminated": (True, False), "truncated": (False, True), "both": (True, True)}


class Counting(gymnasium.Env[Any, Any]):
    """Episode e, step t is observed as 100 * e + t + offset; it ends as, and after as many steps as, it is told.

    Its observations are all one array, unless told not to: Gymnasium itself loses terminal observations of such an
    environment when a vector environment resets it in the same step.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(1000)

    def __init__(self, episodes: Sequence[tuple[int, str]], offset: int = 0, *, reuse: bool = True) -> None:
        self._episodes, self._offset, self._reuse = episodes, offset, reuse
        self._episode, self._t = -1, 0
        self._buffer = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._episode, self._t = self._episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # whatever is done
        length, end = self._episodes[self._episode % len(self._episodes)]
        self._t += 1
        terminated, truncated = END[end] if self._t == length else (False, False)
        return self._observe(), float(self._t), terminated, truncated, {}

    def _observe(self) -> Any:
        self._buffer[:] = self._offset + 100 * self._episode + self._t
        return self._buffer if self._reuse else self._buffer.copy()


class Sampling(gymnasium.Env[Any, Any]):
    """Observes samples of a space, whatever is done; an episode has three steps."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.observed: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._t = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ARG002  # whatever is done
        self._t += 1
        return self._observe(), 0.5, self._t == 3, False, {}

    def _observe(self) -> Any:
        self.observed.append(self.observation_space.sample())
        return self.observed[-1]


def refusing(observer: Callable[..., None], *refused: int) -> Callable[..., None]:
    """Return an observer that refuses the calls of these numbers, counted from 1, and passes on the others."""
    calls = itertools.count(1)

    def observe(step: Any, **options: Any) -> None:
        if next(calls) in refused:
            raise rw.errors.ReplayTimeoutError("full")
        observer(step, **options)

    return observe


def counting(episodes: Sequence[tuple[int, str]], offset: int = 0) -> Callable[[], Counting]:
    """Return what makes a `Counting`, for vector environments."""
    return lambda: Counting(episodes, offset, reuse=False)


def told(step: dict[str, Any], env: int | None = None) -> str:
    """Spell a step: observation, action, reward, discount, then `F`irst, `L`ast, `t`erminated, t`r`uncated."""
    values = step if env is None else {key: value[env] for key, value in step.items()}
    observation = np.unique(values["observation"])
    assert len(observation) == 1
    flags = zip("FLtr", ("is_first", "is_last", "terminated", "truncated"), strict=True)
    marks = "".join(letter for letter, name in flags if values[name])
    return f"{observation[0]:g} {values['action']} {values['reward']:g} {values['discount']:g} {marks}".strip()


def told_kinds(row: dict[str, Any], kinds: Any, env: int | None = None) -> str:
    """Spell a row: observation, action, reward and kind."""
    values = row if env is None else {key: value[env] for key, value in row.items() if key != "extras"}
    (observation,) = np.unique(values["observation"])
    return f"{observation:g} {values['action']} {values['reward']:g} {kinds if env is None else kinds[env]}"


class Rows:
    """Stands for an observer of one environment: keeps rows with kinds, spelled out, and as they came."""

    num_envs = None

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def write_row(self, row: dict[str, Any], kinds: int, env_mask: Any = None) -> None:
        assert (type(kinds), env_mask) == (int, None)
        self.told.append(told_kinds(row, kinds))
        self.rows.append(row)
