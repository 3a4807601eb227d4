"""The one-line migration: our observers where TF-Agents' were: its drivers, environments, readers, and names."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reverb
import tensorflow as tf
import tree
from reading import fifo
from server_process import StartServer
from tf_agents.drivers import py_driver
from tf_agents.environments import suite_gym, test_envs
from tf_agents.policies import random_py_policy
from tf_agents.replay_buffers import reverb_replay_buffer
from tf_agents.replay_buffers import reverb_utils as theirs
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import policy_step, trajectory

import reverb_writer as rw
from reverb_writer import tf_agents as ours
from reverb_writer.tables.table_dicts import table_from_dict

from .trajectories import EPISODES, MODES, OBSERVERS, SIDES, TRAJECTORIES, Steps, assert_same, play, read, take

EXAMPLE = Path(__file__).parents[2] / "examples" / "actors" / "tf_agents_actor.py"


def facts(client: Any, table: str) -> list[Any]:
    """Read a queue: dtype, shape and bytes of each leaf of each item."""
    return [
        (sample.info.priority, [(leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in sample.data])
        for sample in read(client, table)
    ]


def drive(environment: Any, observers: list[Any], *, max_steps: int) -> None:
    policy = random_py_policy.RandomPyPolicy(environment.time_step_spec(), environment.action_spec(), seed=0)
    driver = py_driver.PyDriver(environment, policy, observers, max_steps=max_steps)
    driver.run(environment.reset())
    for observer in observers:
        observer.flush()
    environment.close()


# A driver calls our observers by their own names, too: nothing stands between.


def test_a_driver_feeds_observers_of_every_kind(peer: Any, address: str) -> None:
    with ExitStack() as stack:
        trajectories = stack.enter_context(rw.TrajectoryObserver(address, "ours", 3, 3, end_of_episode="cover"))
        episodes = stack.enter_context(rw.EpisodeObserver(peer, "ours_too", max_sequence_length=9))
        spanning = stack.enter_context(rw.SequenceObserver(address, "theirs", 5, 5))
        drive(test_envs.CountingEnv(3), [trajectories, episodes, spanning], max_steps=6)
    # Episodes of three steps: counts 0 to 3 and 10 to 13, the last of which is the boundary step. The driver stops as
    # soon as it has seen six steps, before the boundary step of the second episode.
    for table, expected in (
        ("ours", [[0, 1, 2], [3, 0, 0], [10, 11, 12]]),
        ("ours_too", [[0, 1, 2, 3]]),
        ("theirs", [[0, 1, 2, 3, 10]]),
    ):
        assert [sample.data[1].tolist() for sample in read(peer, table)] == expected


def test_the_example_of_a_driver_writes_its_items(start_reverb: StartServer) -> None:
    server = start_reverb(fifo("replay"))
    command = [sys.executable, str(EXAMPLE), "--server", server.address, "--steps", "50", "--seed", "0"]
    ran = subprocess.run(command, capture_output=True, check=False, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    steps, episodes, items = map(int, re.findall(r"\d+", ran.stdout.splitlines()[-1]))
    assert steps >= 50
    # In windows of two steps, each step but an episode's last begins one.
    with rw.Client(server.address) as client:
        assert items == client.server_info()["replay"].current_size
    assert steps - episodes - 1 <= items <= steps - episodes


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "nested observations": lambda: test_envs.NestedCountingEnv(7),
    "nested actions": lambda: test_envs.NestedCountingEnv(7, nested_action=True),
    "tuples": lambda: test_envs.EpisodeCountingEnv(7),
    "CartPole": lambda: suite_gym.load("CartPole-v1"),
}


@pytest.mark.parametrize(
    ("kind", "arguments"), [*((TRAJECTORIES, (5, 3, 1, *flags)) for flags in MODES.values()), (EPISODES, (501,))]
)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_real_environments_give_the_same_items(peer: Any, name: str, kind: str, arguments: tuple[Any, ...]) -> None:
    with ExitStack() as stack:
        observers = [
            stack.enter_context(closing(getattr(module, kind)(peer, table, *arguments))) for module, table in SIDES
        ]
        drive(ENVIRONMENTS[name](), observers, max_steps=200)
    items = facts(peer, "theirs")
    assert items
    assert facts(peer, "ours") == items


# Readers


@pytest.fixture(scope="module")
def signature() -> Any:
    """A table signature as TF-Agents' tutorials make it: the spec of a step, with a leading dimension for time."""
    environment = suite_gym.load("CartPole-v1")
    spec = trajectory.from_transition(
        environment.time_step_spec(), policy_step.PolicyStep(environment.action_spec()), environment.time_step_spec()
    )
    return tensor_spec.from_spec(spec)


@pytest.fixture(scope="module")
def signed(signature: Any, start_reverb: StartServer) -> str:
    """The address of a server with a table that has the signature."""
    table = rw.TableConfig("signed", sampler="fifo", signature=tensor_spec.add_outer_dim(signature))
    return start_reverb(table).address


def test_tf_agents_replay_buffer_reads_our_items(signed: str, signature: Any) -> None:
    client = reverb.Client(signed)
    client.reset("signed")
    with closing(ours.ReverbAddTrajectoryObserver(client, "signed", 2, 1)) as observer:
        drive(suite_gym.load("CartPole-v1"), [observer], max_steps=50)
    replay = reverb_replay_buffer.ReverbReplayBuffer(
        signature, table_name="signed", sequence_length=2, server_address=signed, local_server=None
    )
    dataset = replay.as_dataset(sample_batch_size=4, num_steps=2)
    batch, info = next(iter(dataset))
    assert batch.observation.shape == (4, 2, 4)
    assert info.key.shape == (4, 2)
    assert np.all(batch.next_step_type[:, 0] == batch.step_type[:, 1])


@pytest.mark.parametrize(
    "in_toml",
    [{}, {"sequence_length": 2, "signature": ["int32", "float32[4]", "int64", "int32", "float32", "float32"]}],
    ids=["no signature", "an array of leaves"],
)
def test_tf_agents_replay_buffer_reads_a_table_of_toml(
    in_toml: dict[str, Any], signature: Any, start_reverb: StartServer
) -> None:
    address = start_reverb(table_from_dict("replay", in_toml)).address
    for module in (theirs, ours):
        with closing(module.ReverbAddTrajectoryObserver(reverb.Client(address), "replay", 2, 1)) as observer:
            drive(suite_gym.load("CartPole-v1"), [observer], max_steps=50)
    replay = reverb_replay_buffer.ReverbReplayBuffer(
        signature, table_name="replay", sequence_length=2, server_address=address, local_server=None
    )
    batch, _ = next(iter(replay.as_dataset(sample_batch_size=64, num_steps=2)))
    assert np.all(batch.next_step_type[:, 0] == batch.step_type[:, 1])


# What our classes are to their callers


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_signature_is_the_one_that_tf_agents_tells(signed: str, name: str) -> None:
    client = reverb.Client(signed)
    with (
        closing(getattr(theirs, name)(client, "signed", 3)) as other,
        closing(getattr(ours, name)(client, ["signed"], 3)) as observer,
    ):
        assert observer.py_client is client
        assert observer.get_table_signature() == other.get_table_signature()
        expected = [
            (tuple(spec.shape), spec.dtype.as_numpy_dtype) for spec in tf.nest.flatten(other.get_table_signature())
        ]
    with rw.Client(signed) as our_client:
        for given in (our_client, signed):  # without TensorFlow the leaves are of another type
            with closing(getattr(ours, name)(given, "signed", 3)) as observer:
                assert observer.py_client is given
                found = observer.get_table_signature()
                assert found._fields == trajectory.Trajectory._fields
                assert [(spec.shape, spec.dtype) for spec in tree.flatten(found)] == expected


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_closed_observer_refuses_in_the_same_words_until_it_is_opened(peer: Any, name: str) -> None:
    for module, table in SIDES:
        steps = Steps()
        observer = getattr(module, name)(peer, table, 3)
        observer.close()
        observer.close()
        for call in (observer.flush, lambda: observer(steps.episode(1)[0])):  # noqa: B023  # called in this iteration
            with pytest.raises(ValueError, match=r"Could not obtain writer from py_client\."):
                call()
        observer.open()
        observer.reset(write_cached_steps=False)  # TF-Agents' own remembers the refused step
        play(observer, steps.episode(3))
        observer.close()
        observer.reset(write_cached_steps=False)  # opens it, too
        play(observer, steps.episode(3))
        observer.close()
    items = take(peer, "theirs")
    assert len(items) == 2
    assert_same(take(peer, "ours"), items)


# Flattened trajectories, which TF-Agents' documentation promises and its code does not take


@pytest.mark.parametrize("flat", [list, tuple])
def test_a_flattened_trajectory_has_the_structure_of_the_first_step(peer: Any, flat: Callable[[Any], Any]) -> None:
    script = Steps().episode(6) + Steps().episode(2)
    with closing(theirs.ReverbAddTrajectoryObserver(peer, "theirs", 3, 1, 1, True, True)) as observer:
        play(observer, script)
    with closing(ours.ReverbAddTrajectoryObserver(peer, "ours", 3, 1, 1, True, True)) as observer:
        first, *rest = (flat(tf.nest.flatten(step)) for step in script)
        with pytest.raises(TypeError, match="Pass a `Trajectory` first, or give the table a signature"):
            observer(first)
        observer(script[0])
        with pytest.raises(TypeError, match="of 4 leaves, expected 13: step_type, observation/camera, "):
            observer(rest[0][:4])
        play(observer, rest)
    assert_same(take(peer, "ours"), take(peer, "theirs"))


@pytest.mark.parametrize("as_client", [reverb.Client, rw.Client, str])
def test_a_flattened_trajectory_has_the_structure_of_the_signature(
    signed: str, as_client: Callable[[str], Any]
) -> None:
    client = reverb.Client(signed)
    client.reset("signed")
    with closing(ours.ReverbAddTrajectoryObserver(as_client(signed), "signed", 3)) as observer:
        for number, (kind, following) in enumerate([(0, 1), (1, 2), (2, 0)]):
            observation = np.full(4, number, np.float32)
            observer([np.int32(kind), observation, np.int64(0), np.int32(following), np.float32(1), np.float32(1)])
    (sample,) = client.sample("signed", 1, emit_timesteps=False, unpack_as_table_signature=True)
    assert sample.data.step_type.tolist() == [0, 1, 2]
    assert sample.data.observation[:, 0].tolist() == [0, 1, 2]
