"""Rollout data sets as PyTorch tensors, and in a DataLoader with workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_steps import write_transitions

import reverb_writer as rw
from reverb_writer import instinct_rl
from reverb_writer.files import RolloutDataset

torch = pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than this machine has cores
@pytest.mark.parametrize(("num_workers", "context"), [(0, None), (1, "fork"), (3, "fork"), (1, "spawn"), (3, "spawn")])
@pytest.mark.parametrize("num_episodes", [1, 7])
@pytest.mark.parametrize(
    "view_of",
    [
        lambda folder: RolloutDataset(folder, 2, shuffle=True, seed=3).as_torch(),
        lambda folder: instinct_rl.RolloutDataset(folder, 2),
    ],
    ids=["files", "instinct_rl"],
)
def test_workers_together_read_each_trajectory_once(
    tmp_path: Path, num_workers: int, context: str | None, num_episodes: int, view_of: Callable[[Path], Any]
) -> None:
    write_transitions(tmp_path, [2] * num_episodes)
    view = view_of(tmp_path)
    assert isinstance(view, torch.utils.data.IterableDataset)
    workers: Any = {"num_workers": num_workers, "multiprocessing_context": context}
    loader = torch.utils.data.DataLoader(view, batch_size=None, **workers)
    for _ in range(2):  # each epoch begins anew
        seen = [tuple(row) for batch in loader for row in batch.observation[batch.mask].int().tolist()]
        assert sorted(seen) == [(episode, t) for episode in range(num_episodes) for t in range(2)]


def test_all_fields_are_tensors(tmp_path: Path) -> None:
    write_transitions(tmp_path, [2], truncated=(0,))
    batch = RolloutDataset(tmp_path, 2, device="cpu").get_batch(2)
    assert batch.observation.dtype == torch.float32
    assert batch.observation[:, 0].tolist() == [[0, 0], [0, 1]]
    assert batch.mask.tolist() == [[True, False], [True, False]]
    assert batch.privileged_observation is None
    *_, last = RolloutDataset(tmp_path, 1).as_torch("cpu")
    assert last.truncated.tolist() == last.done.tolist() == [True]
    assert last.next_observation.tolist() == [[0, 1]]
    assert type(last).__name__ == "TransitionBatch"


def test_bfloat16_comes_as_tensors(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    with rw.files.RolloutWriter(tmp_path) as writer:
        step = {"observation": np.array(1.5, bfloat16), "action": np.float32(0), "reward": np.float32(0)}
        writer(step, terminated=True, truncated=False)
    batch = RolloutDataset(tmp_path, 1, device="cpu").get_batch()
    assert (batch.observation.dtype, batch.observation.tolist()) == (torch.bfloat16, [1.5])


def test_a_transition_batch_of_instinct_rl_is_tensors_on_the_device(tmp_path: Path) -> None:
    write_transitions(tmp_path, [3])
    dataset = instinct_rl.RolloutDataset(tmp_path, 2, device="cpu")
    assert dataset.all_env_ids.tolist() == torch.arange(2).tolist()
    observation, action, reward, done, infos = dataset.get_transition_batch()
    assert all(isinstance(leaf, torch.Tensor) for leaf in (observation, action, reward, done, infos["time_outs"]))
    dataset.reset(dataset.all_env_ids)
