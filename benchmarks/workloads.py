"""The data of the benchmarks: episodes of 200 steps in TF-Agents' form, and their windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer import Trajectory, WindowSpec
from reverb_writer.steps import FIRST, LAST, MID

EPISODE_LENGTH = 200
_NUM_EPISODES = 2  # a step that an environment gives is still in the cache; with more of them, memory is measured
_FRAME_SIZE = 84


@dataclass(frozen=True)
class Workload:
    """Episodes, and the windows that are cut from them.

    Attributes:
        steps: arrays [episodes, EPISODE_LENGTH, ...]; the last step of an episode is its boundary step.
        sequence_length: steps in a window.
        stride_length: steps from one window's start to the next one's.
    """

    steps: Trajectory
    sequence_length: int = 20
    stride_length: int = 1

    @property
    def step_bytes(self) -> int:
        """Size of a step."""
        return sum(field[0, 0].nbytes for field in self.steps if not isinstance(field, tuple))

    @property
    def num_windows(self) -> int:
        """Windows in an episode."""
        return len(WindowSpec(self.sequence_length, self.stride_length).windows(EPISODE_LENGTH))

    def episodes(self, make_step: Callable[..., Any] = Trajectory) -> list[list[Any]]:
        """Return the steps as an environment gives them: one nest a step, its leaves arrays, scalars 0-d arrays."""
        return [
            [make_step(*(_at(field, (episode, t)) for field in self.steps)) for t in range(EPISODE_LENGTH)]
            for episode in range(_NUM_EPISODES)
        ]

    def vector_steps(self, num_envs: int) -> list[Trajectory]:
        """Return EPISODE_LENGTH steps of `num_envs` environments, leaves [num_envs, ...], whose episodes end in turn.

        Each environment plays one episode over and over, so the steps may be repeated.
        """
        env = np.arange(num_envs)
        at = [(env % _NUM_EPISODES, (t + 3 * env) % EPISODE_LENGTH) for t in range(EPISODE_LENGTH)]
        return [Trajectory(*(_at(field, index) for field in self.steps)) for index in at]


def small_steps() -> Trajectory:
    """Return episodes of six small leaves: four floats of observation, the rest scalars."""
    rng = np.random.default_rng(0)
    return _trajectory(rng.standard_normal((_NUM_EPISODES, EPISODE_LENGTH, 4)).astype(np.float32))


def frame_steps() -> Trajectory:
    """Return episodes whose observations are frames of an Atari game."""
    frames = atari_frames(_NUM_EPISODES * EPISODE_LENGTH)
    return _trajectory(frames.reshape(_NUM_EPISODES, EPISODE_LENGTH, _FRAME_SIZE, _FRAME_SIZE))


def atari_frames(num_frames: int, game: str = "breakout") -> npt.NDArray[np.uint8]:
    """Play a game at random, an action every four frames, and return [num_frames, 84, 84] in grey."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    game_engine = ale_py.ALEInterface()
    game_engine.setInt("random_seed", 0)
    game_engine.loadROM(str(ale_py.roms.get_rom_path(game)))
    rng = np.random.default_rng(0)
    actions = game_engine.getMinimalActionSet()
    height, width = game_engine.getScreenDims()
    shrink_rows, shrink_columns = _area_weights(height), _area_weights(width)
    frames = np.empty((num_frames, _FRAME_SIZE, _FRAME_SIZE), np.uint8)
    for frame in frames:
        if game_engine.game_over():
            game_engine.reset_game()
        action = actions[rng.integers(len(actions))]
        for _ in range(4):
            game_engine.act(action)
        frame[...] = np.rint(shrink_rows @ game_engine.getScreenGrayscale() @ shrink_columns.T)
    return frames


def _trajectory(observation: npt.NDArray[Any]) -> Trajectory:
    shape = (_NUM_EPISODES, EPISODE_LENGTH)
    kinds = np.full(shape, MID, np.int32)
    kinds[:, 0], kinds[:, -1] = FIRST, LAST
    return Trajectory(
        step_type=kinds,
        observation=observation,
        action=np.random.default_rng(1).integers(4, size=shape),
        policy_info=(),
        next_step_type=np.roll(kinds, -1, axis=1),
        reward=np.ones(shape, np.float32),
        discount=np.ones(shape, np.float32),
    )


def _at(field: Any, index: tuple[Any, ...]) -> Any:
    """Return a field of the steps at `index`; the ellipsis keeps a scalar an array."""
    return field if isinstance(field, tuple) else field[(*index, ...)]


def _area_weights(size: int) -> npt.NDArray[np.float32]:
    """Return [84, size]: how much each pixel of a line counts for each pixel of the line shrunk to 84."""
    edges = np.linspace(0, size, _FRAME_SIZE + 1)
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(np.clip(overlap, 0, None) * _FRAME_SIZE / size, np.float32)
