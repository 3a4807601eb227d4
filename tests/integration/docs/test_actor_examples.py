"""Each example of an actor plays a real environment, and its steps come to the server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import client_by_socket
from reading import Serve, fifo, read

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, TERMINAL, has

pytestmark = client_by_socket

ACTORS = Path(__file__).parents[3] / "examples" / "actors"
STEP = ["action", "observation", "reward"]

pytest.importorskip("gymnasium")


@pytest.fixture
def client(serve: Serve) -> rw.Client:
    return serve(fifo("replay"))


def run(client: rw.Client, script: str, *arguments: object, steps: int = 300) -> list[rw.Sample]:
    """Run an actor, and return the items that it says it has written."""
    command = [sys.executable, str(ACTORS / script), "--server", client.address, "--steps", str(steps), "--seed", "0"]
    package = {"PYTHONPATH": str(Path(rw.__file__).parents[1])}  # also where it is not installed
    with tempfile.TemporaryDirectory() as folder:  # MuJoCo leaves a log where it runs
        ran = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, **package},
            capture_output=True,
            check=False,
            text=True,
            timeout=100,
        )
    assert ran.returncode == 0, ran.stderr
    items = read(client, "replay")
    assert len(items) == int(re.findall(r"(\d+) items$", ran.stdout)[0])
    return items


def columns(items: Sequence[rw.Sample], names: Sequence[str]) -> dict[str, Any]:
    return {name: np.stack([item.data[index] for item in items]) for index, name in enumerate(names)}


def kinds_of(items: Sequence[rw.Sample]) -> Any:
    return np.stack([np.asarray(item.kinds) for item in items])


@pytest.mark.parametrize(
    ("env", "package", "shape", "dtype"),
    [
        ("CartPole-v1", "gymnasium", (4,), np.float32),
        ("ALE/Breakout-v5", "ale_py", (210, 160), np.uint8),
        ("HalfCheetah-v5", "mujoco", (17,), np.float64),
    ],
)
def test_an_environment_of_gymnasium_is_recorded(
    client: rw.Client, env: str, package: str, shape: tuple[int, ...], dtype: Any
) -> None:
    pytest.importorskip(package)
    items = run(client, "gymnasium_actor.py", "--env", env)
    windows, is_last = columns(items, STEP), has(kinds_of(items), LAST)
    assert windows["observation"].dtype == dtype
    assert windows["observation"].shape[1:] == (16, *shape)
    assert is_last.any()  # at least that of the episode that the actor left
    assert not is_last[:, :-1].any()  # an episode ends where its last window does
    assert {*np.unique(kinds_of(items)).tolist()} <= {FIRST | ACTION, ACTION, LAST, LAST | TERMINAL}
    observations = windows["observation"].reshape(-1, *shape)
    assert len({observation.tobytes() for observation in observations}) > 20


def test_a_vector_environment_is_recorded(client: rw.Client) -> None:
    items = run(client, "vector_actor.py", steps=800)
    kinds = kinds_of(items)
    assert columns(items, STEP)["observation"].shape[1:] == (16, 4)
    assert has(kinds[:, 0], FIRST).sum() >= 8
    assert has(kinds, LAST).sum() >= 8
    assert has(kinds, TERMINAL).any()


def test_episodes_of_a_dm_env_environment_are_recorded(client: rw.Client) -> None:
    pytest.importorskip("dm_env")
    items = run(client, "dm_env_actor.py", steps=45)
    episodes = columns(items, ["action", "discount", "extras", "observation", "reward"])
    assert episodes["observation"].shape == (5, 10, 10, 5)
    assert (kinds_of(items)[:, -1] == LAST | TERMINAL).all()
    assert np.abs(episodes["reward"][:, -2]).tolist() == [1] * 5
    np.testing.assert_allclose(episodes["extras"][:, :-1], -np.log(3))


def test_rollouts_of_an_accumulator_are_recorded(client: rw.Client) -> None:
    items = run(client, "accumulator_actor.py")
    names = ["final", "episodes", "return", "action", "done", "observation", "reward"]
    rollouts = columns(items, names)
    assert rollouts["observation"].shape == (4, 64, 4)
    assert rollouts["return"].tolist() == [64] * 4
    np.testing.assert_array_equal(rollouts["done"].sum(axis=1), rollouts["episodes"])
    # The observation after a rollout is the first of the next.
    np.testing.assert_array_equal(rollouts["final"][:-1, 0], rollouts["observation"][1:, 0])
