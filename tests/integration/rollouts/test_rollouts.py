"""Rollouts filled from a queue of a real server, each step once; and the PPO example, which learns."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading import Place, Serve, fifo
from rollouts import DEVICES, arrays_of, plain
from server_process import StartServer

import reverb_writer as rw
from reverb_writer.rollouts import RolloutStorage

PPO = Path(__file__).parents[3] / "examples" / "ppo.py"
NUM_STEPS = 4  # T


def write(place: Place, num_windows: int) -> None:
    """Write windows of T steps and the one after; rewards are numbers, every fifth step ends an episode."""
    with rw.SequenceObserver(place.address, "a", NUM_STEPS + 1, NUM_STEPS) as observer:
        for number in range(num_windows * NUM_STEPS + 1):
            observer(
                {
                    "observations": np.array([number, -number], np.float32),
                    "actions": np.int64(number % 2),
                    "rewards": np.float32(number),
                    "dones": np.bool_(number % 5 == 4),
                    "values": np.float32(number / 2),
                    "hidden_states": np.full((2, 3), number, np.float32),
                }
            )


@pytest.fixture
def place(serve: Serve) -> Place:
    """A server of its own for each test: what a closed dataset has asked for may take the next test's items."""
    client = serve(fifo("a"))
    return Place(client.address, client)


@pytest.fixture
def dataset(place: Place) -> Iterator[Callable[[int], Any]]:
    """`dataset(batch_size)` reads the table, by `rw.ReplayDataset`."""
    with contextlib.ExitStack() as opened:
        options: Any = {"max_in_flight_batches": 1}
        yield lambda size: opened.enter_context(rw.ReplayDataset(place.address, "a", size, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_windows_become_environments_and_the_step_after_is_returned(
    place: Place, dataset: Callable[[int], Any], device: Any
) -> None:
    arrays_of(device)
    write(place, 6)
    storage = RolloutStorage(6, NUM_STEPS, (2,), None, np.zeros((), np.int64), device=device)
    following = storage.fill_from(dataset(2))
    numbers = np.arange(6) * NUM_STEPS + np.arange(NUM_STEPS)[:, None]
    assert plain(storage.rewards[..., 0]) == plain(numbers)
    assert plain(storage.observations[..., 1]) == plain(-numbers)
    assert plain(storage.actions) == plain(numbers % 2)
    assert plain(storage.dones[..., 0]) == plain(numbers % 5 == 4)
    assert plain(storage.saved_hidden_states[:, :, 1, 2]) == plain(numbers)
    assert following is not None
    assert plain(following.values) == plain(numbers[0] / 2 + NUM_STEPS / 2)
    assert tuple(following.hidden_states.shape) == (2, 6, 3)
    storage.compute_returns(following.values, 0.9, 0.8)
    assert sum(len(batch.obs) for batch in storage.mini_batch_generator(3, 1)) == 24


def test_each_step_is_used_once(place: Place, dataset: Callable[[int], Any]) -> None:
    write(place, 8)
    storage, source = RolloutStorage(4, NUM_STEPS, (2,), None, np.zeros((), np.int64)), dataset(2)
    seen: list[float] = []
    for _ in range(2):
        storage.clear()
        storage.fill_from(source)
        seen += plain(storage.rewards.ravel())
    assert sorted(seen) == [float(number) for number in range(8 * NUM_STEPS)]
    assert place.client.server_info()["a"].current_size == 0


@pytest.mark.timeout(600)
@pytest.mark.only_server("local", "whether it learns does not depend on the server")
def test_ppo_learns_from_many_actor_processes(replay_server: StartServer) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    pytest.importorskip("gymnasium")
    address = replay_server(rw.TableConfig.queue("rollouts", 16), rw.TableConfig.variables("weights")).address
    with rw.Variables(address, "weights") as earlier_run:
        earlier_run.finish()
    line = [sys.executable, str(PPO), "--server", address, "--goal", "100", "--seconds", "500"]
    ran = subprocess.run(line, capture_output=True, check=False, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("learnt\n")


@pytest.mark.timeout(300)
def test_ppo_plays_each_rollout_by_the_weights_that_were_published_last() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("gymnasium")
    act = "import sys; sys.path.insert(0, sys.argv[1]); import ppo; ppo.act(sys.argv[2], 0, 2)"
    shapes = {"policy": [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]}
    shapes["critic"] = [*shapes["policy"][:4], (1, 64), (1,)]
    zeros = {
        f"{network}.{2 * (index // 2)}.{('weight', 'bias')[index % 2]}": np.zeros(shape, np.float32)
        for network, of_layers in shapes.items()
        for index, shape in enumerate(of_layers)
    }
    tables = [rw.TableConfig.queue("rollouts", 16), rw.TableConfig.variables("weights")]
    with (
        rw.LocalServer(tables) as server,
        rw.ReplayDataset(server.address, "rollouts", 2, timeout_s=100) as dataset,
        rw.Variables(server.address, "weights") as weights,
        subprocess.Popen([sys.executable, "-c", act, str(PPO.parent), server.address]) as actor,
    ):
        try:
            for version in range(1, 8):  # the critic's value of every observation
                weights.publish({**zeros, "critic.4.bias": np.full(1, version, np.float32)})
                np.testing.assert_array_equal(next(dataset).data["values"], np.full((2, 65), version))
            weights.finish()
            assert actor.wait(100) == 0
        finally:
            actor.kill()
