"""Shuffled transitions of files: each once a loop, in batches of one size, in random order."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_steps import write_transitions

import reverb_writer as rw
from reverb_writer.files import RolloutDataset

LENGTHS = [7, 1, 4, 9, 2, 6, 5, 6]  # 40 transitions


def numbers(batch: Any) -> list[tuple[int, int]]:
    """Return (episode, t) of each transition."""
    return [(int(episode), int(t)) for episode, t in batch.observation]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    write_transitions(tmp_path, LENGTHS, truncated=(3,))
    return tmp_path


@pytest.mark.parametrize(("batch_size", "pool_size"), [(1, 1), (8, 100), (16, 100), (7, 9), (30, 3), (100, 1000)])
def test_each_transition_comes_once_a_loop_in_batches_of_the_size(
    data_dir: Path, batch_size: int, pool_size: int
) -> None:
    every = sorted((episode, t) for episode, length in enumerate(LENGTHS) for t in range(length))
    batches = list(RolloutDataset(data_dir, 1, dataset_loops=2, seed=0).shuffled(batch_size, pool_size=pool_size))
    sizes = [batch_size] * (40 // batch_size) + [40 % batch_size] * bool(40 % batch_size)
    assert [len(batch.done) for batch in batches] == sizes * 2
    found = list(itertools.chain.from_iterable(map(numbers, batches)))
    assert sorted(found[:40]) == sorted(found[40:]) == every
    assert pool_size == 1 or found[:40] != found[40:]
    for batch in batches:  # the fields of a row stay together
        for (episode, t), following, action in zip(
            numbers(batch), batch.next_observation.tolist(), batch.action[:, 0].tolist(), strict=True
        ):
            assert following == [episode, min(t + 1, LENGTHS[episode] - 1)]
            assert action == 10 * t
        ends = [t == LENGTHS[episode] - 1 for episode, t in numbers(batch)]
        assert batch.done.tolist() == ends
        assert batch.is_terminal.tolist() == [
            end and number[0] != 3 for end, number in zip(ends, numbers(batch), strict=True)
        ]
        assert batch.mask.all()


def test_all_orders_of_a_pool_are_equally_likely(tmp_path: Path) -> None:
    write_transitions(tmp_path, [2, 1])
    shuffled = RolloutDataset(tmp_path, 1, dataset_loops=3000, seed=5).shuffled(3)
    counts = collections.Counter(tuple(numbers(batch)) for batch in shuffled)
    assert len(counts) == 6
    # 3000 draws of 6 orders: 500 each, with a standard deviation of 20.4.
    assert all(abs(count - 500) < 6 * 20.4 for count in counts.values())


def test_a_seed_repeats_the_order_and_each_iteration_starts_again(data_dir: Path) -> None:
    def order(**options: Any) -> list[tuple[int, int]]:
        dataset = RolloutDataset(data_dir, 1, shuffle=True, **options)
        shuffled = dataset.shuffled(5, pool_size=10)
        found = [number for batch in shuffled for number in numbers(batch)]
        assert len(found) == 40
        assert options["seed"] is None or found == [number for batch in shuffled for number in numbers(batch)]
        return found

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(seed=None) != order(seed=None)


def test_batches_are_the_callers_and_the_rows_of_the_data_set_are_not_disturbed(data_dir: Path) -> None:
    dataset = RolloutDataset(data_dir, 1)
    first = dataset.get_batch()
    batches = iter(dataset.shuffled(4))
    one = next(batches)
    one.observation[...] = -1
    assert all((batch.observation >= 0).all() for batch in batches)
    assert (first.observation.tolist(), dataset.get_batch().observation.tolist()) == ([[0, 0]], [[0, 1]])


def test_without_a_number_of_loops_it_goes_on_for_ever(data_dir: Path) -> None:
    batches = itertools.islice(RolloutDataset(data_dir, 1, dataset_loops=0).shuffled(40), 5)
    assert [len({*numbers(batch)}) for batch in batches] == [40] * 5


def test_actions_that_are_left_out_and_damaged_files_are_counted(tmp_path: Path) -> None:
    step = {"observation": np.float32(0), "action": np.float32(0), "reward": np.float32(0)}
    with rw.files.RolloutWriter(tmp_path) as writer:
        for t in range(12):
            writer(step, truncated=t % 3 == 2)  # four episodes, each without a final observation
    damaged = rw.files.list_trajectories(tmp_path)[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    shuffled = RolloutDataset(tmp_path, 1).shuffled(4)
    for _ in range(2):  # of the newest iteration
        assert sum(len(batch.action) for batch in shuffled) == 6
        assert shuffled.num_left_out == 3
        assert [*shuffled.skipped] == [damaged.name]


def test_texts_and_nests_are_shuffled_too(tmp_path: Path) -> None:
    with rw.files.RolloutWriter(tmp_path) as writer:
        for t in range(4):
            observation = {"text": f"{t}", "n": np.int64(t)}
            writer({"observation": observation, "action": t, "reward": 0.0}, terminated=t == 3)
    (batch,) = RolloutDataset(tmp_path, 1).shuffled(4)
    assert batch.observation["text"].tolist() == [b"%d" % n for n in batch.observation["n"]]
    assert sorted(batch.observation["n"].tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 0}, "`batch_size` must be >= 1, got 0"),
        ({"batch_size": 1, "pool_size": 0}, "`pool_size` must be >= 1"),
    ],
)
def test_sizes_out_of_range_are_refused(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=text):
        RolloutDataset(tmp_path, 1).shuffled(**arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_of_a_data_loader_share_the_trajectories(data_dir: Path, num_workers: int) -> None:
    torch = pytest.importorskip("torch")
    view = RolloutDataset(data_dir, 1).shuffled(8).as_torch()
    workers: Any = {"num_workers": num_workers} | ({"multiprocessing_context": "spawn"} if num_workers else {})
    loader = torch.utils.data.DataLoader(view, batch_size=None, **workers)
    found = [number for batch in loader for number in numbers(batch)]
    assert sorted(found) == sorted((episode, t) for episode, length in enumerate(LENGTHS) for t in range(length))
    (batch,) = RolloutDataset(data_dir, 1, device="cpu").shuffled(40)
    assert batch.observation.dtype == torch.float32
