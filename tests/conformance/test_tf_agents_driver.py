"""TF-Agents' own driver calls our observers by their own names, as they are: nothing stands between."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tree
from tf_agents.drivers import py_driver
from tf_agents.environments import test_envs
from tf_agents.policies import random_py_policy

import reverb_writer as rw

from .serve import Table, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "actors" / "tf_agents_actor.py"


def drive(observers: list[Any], *, steps_per_episode: int, max_steps: int) -> None:
    environment = test_envs.CountingEnv(steps_per_episode)
    policy = random_py_policy.RandomPyPolicy(environment.time_step_spec(), environment.action_spec(), seed=0)
    py_driver.PyDriver(environment, policy, observers, max_steps=max_steps).run(environment.reset())
    environment.close()


def windows(peer: Any, table: str) -> list[rw.Trajectory]:
    """Read a queue with dm-reverb's client."""
    example = rw.Trajectory(0, 0, 0, (), 0, 0, 0)
    num_items = peer.server_info(timeout=60)[table].current_size
    samples = peer.sample(table, num_items, emit_timesteps=False) if num_items else ()
    return [tree.unflatten_as(example, sample.data) for sample in samples]


def test_a_driver_feeds_observers_of_every_kind(peer: Any, address: str) -> None:
    with ExitStack() as stack:
        trajectories = stack.enter_context(rw.TrajectoryObserver(address, "ours", 3, 3, end_of_episode="cover"))
        episodes = stack.enter_context(rw.EpisodeObserver(peer, "ours_too", max_sequence_length=9))
        spanning = stack.enter_context(rw.SequenceObserver(address, "theirs", 5, 5))
        drive([trajectories, episodes, spanning], steps_per_episode=3, max_steps=6)
    # Episodes of three steps: counts 0 to 3 and 10 to 13, the last of which is the boundary step. The driver stops as
    # soon as it has seen six steps, before the boundary step of the second episode.
    assert [window.observation.tolist() for window in windows(peer, "ours")] == [[0, 1, 2], [3, 0, 0], [10, 11, 12]]
    assert [window.observation.tolist() for window in windows(peer, "ours_too")] == [[0, 1, 2, 3]]
    assert [window.observation.tolist() for window in windows(peer, "theirs")] == [[0, 1, 2, 3, 10]]


def test_the_example_of_a_driver_writes_its_items() -> None:
    with serving([Table("replay")]) as address, rw.Client(address, timeout_s=60) as client:
        command = [sys.executable, str(EXAMPLE), "--server", address, "--steps", "50", "--seed", "0"]
        ran = subprocess.run(command, capture_output=True, check=False, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        steps, episodes, items = map(int, re.findall(r"\d+", ran.stdout.splitlines()[-1]))
        assert steps >= 50
        # In windows of two steps, each step but an episode's last begins one.
        assert items == client.server_info()["replay"].current_size
        assert steps - episodes - 1 <= items <= steps - episodes
