"""RolloutDataset: transitions of trajectories on disk, each as often as was asked for."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree
from rollout_steps import tf_agents_steps, transition, write_transitions

import reverb_writer as rw
from reverb_writer.files import RolloutDataset, RolloutFileBase, RolloutWriter, list_trajectories
from reverb_writer.files.transition_fields import Cursor, TransitionBatch


def delivered(batches: Any) -> list[tuple[int, int]]:
    """Return (episode, t) of all transitions that are there, batch by batch, environment by environment."""
    return [
        (int(episode), int(t))
        for batch in batches
        for (episode, t), real in zip(batch.observation.reshape(-1, 2), batch.mask.reshape(-1), strict=True)
        if real
    ]


def test_one_environment_steps_through_one_trajectory_after_the_other(tmp_path: Path) -> None:
    write_transitions(tmp_path, [3, 2], truncated=(1,))
    batches = list(RolloutDataset(tmp_path, 1))
    assert delivered(batches) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [bool(batch.done[0]) for batch in batches] == [False, False, True, False, True]
    assert [bool(batch.truncated[0]) for batch in batches] == [False, False, False, False, True]
    assert [bool(batch.is_first[0]) for batch in batches] == [True, False, False, True, False]
    assert [batch.action.tolist() for batch in batches[:3]] == [[[0]], [[10]], [[20]]]
    assert [float(batch.reward[0]) for batch in batches[3:]] == pytest.approx([1, 1.1])


@pytest.mark.parametrize("prefix", ["", "privileged_"])
def test_next_observation_that_was_stored_is_delivered(tmp_path: Path, prefix: str) -> None:
    with RolloutWriter(tmp_path) as writer:
        for t in range(3):
            step = {**transition(0, t), "privileged_observation": np.float32(t)}
            shape = () if prefix else (2,)
            writer({**step, f"next_{prefix}observation": np.full(shape, 10 + t, np.float32)}, terminated=t == 2)
    batch = RolloutDataset(tmp_path, 1).get_batch(3)
    stored, other = batch.next_observation[:, 0, 0], batch.next_privileged_observation[:, 0]
    if prefix:
        stored, other = other, batch.next_observation[:, 0, 1]
    assert stored.tolist() == [10, 11, 12]
    assert other.tolist() == [1, 2, 2 if prefix else 0]  # the last one is of the boundary row, and not used


def test_interrupt_at_any_instruction_leaves_a_cursor_that_delivers_the_rest() -> None:
    def fill(interrupt_at: int) -> tuple[bool, list[int]]:
        batch, rows = TransitionBatch(*[None] * 10), np.zeros((4, 1), np.int64)
        flags = np.zeros(4, bool)
        cursor = Cursor(batch._replace(reward=np.arange(1, 5), done=flags, is_first=flags), 0)
        targets = tree.flatten(batch._replace(reward=rows))
        num_events, tracer = 0, sys.gettrace()

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal num_events
            frame.f_trace_opcodes = True
            num_events += frame.f_code is Cursor.fill.__code__ and event == "opcode"
            if num_events > interrupt_at:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        with contextlib.suppress(KeyboardInterrupt):
            cursor.fill(targets, 0, 0, 3)
        sys.settrace(tracer)
        is_interrupted, start = num_events > interrupt_at, 4 - cursor.num_left
        assert cursor.fill(targets, start, 0, 4) == 4 - start
        return is_interrupted, rows[:, 0].tolist()

    fill(1000)  # CPython 3.12 traces no instruction the first time
    number = 0
    while fill(number) == (True, [1, 2, 3, 4]):
        number += 1
    assert number > 20
    assert fill(number) == (False, [1, 2, 3, 4])


def test_next_observation_is_that_of_the_observation(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for t in range(3):
            other = {"state": np.float32(t), "next_observation": np.float32(9)}
            writer({**transition(0, t), **other}, terminated=t == 2)
    said = r"`next_observation` is float32 \[4\], expected float32 \[4, 2\]"
    with pytest.raises(rw.errors.StructureError, match=said):
        next(iter(RolloutDataset(tmp_path, 1)))
    batch = RolloutDataset(tmp_path, 1, fields={"observation": "state"}).get_batch(3)
    assert batch.next_observation[:, 0].tolist() == [1, 2, 0]
    named = {"observation": "state", "next_observation": "next_observation"}
    batch = RolloutDataset(tmp_path, 1, fields=named).get_batch(3)
    assert batch.next_observation[:, 0].tolist() == [9, 9, 9]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_boundary_step_is_the_last_next_observation(tmp_path: Path, length: int) -> None:
    with RolloutWriter(tmp_path) as writer:
        for step in [*tf_agents_steps(0, 3), *tf_agents_steps(1, 2, terminal=False)]:
            writer(step)
    dataset = RolloutDataset(tmp_path, 1)
    batches = [dataset.get_batch(length) for _ in range(0, 5, length)]
    columns = zip(*batches, strict=True)
    batch = TransitionBatch(*(None if parts[0] is None else np.concatenate(parts)[:5] for parts in columns))
    assert batch.observation[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    assert batch.next_observation[:, 0].tolist() == [[0, 1], [0, 2], [0, 3], [1, 1], [1, 2]]
    assert batch.reward[:, 0].tolist() == [1, 2, 3, 1, 2]
    assert batch.done[:, 0].tolist() == [False, False, True, False, True]
    assert batch.truncated[:, 0].tolist() == [False, False, False, False, True]


def test_recorded_dones_and_timeouts_are_delivered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RolloutWriter(tmp_path)
    obs = np.arange(4, dtype=np.float32)
    steps = {"obs": obs, "actions": np.zeros((4, 1)), "rewards": np.ones((4, 1), np.float32)}
    writer.save({**steps, "dones": np.array([0, 1, 0, 1]), "timeouts": np.array([0, 1, 0, 0], bool)})
    writer.save({**steps, "dones": np.array([0, 0, 0, 0]), "timeouts": np.zeros(4, bool)})
    dataset = RolloutDataset(tmp_path, 1)
    batch = dataset.get_batch(6)
    assert batch.observation[:, 0].tolist() == [0, 2, 3, 0, 1, 2]  # nobody knows the observation after 1, and after 3
    assert batch.next_observation[:, 0].tolist() == [1, 3, 3, 1, 2, 3]
    assert batch.done[:, 0].tolist() == [True, False, True, False, False, True]
    assert batch.truncated[:, 0].tolist() == [True, False, False, False, False, True]
    assert batch.is_first[:, 0].tolist() == [True, True, False, True, False, False]
    assert batch.reward.shape == (6, 1)
    assert dataset.num_left_out == 2
    assert [record.getMessage().count("no row holds the observation after it") for record in caplog.records] == [1]


def test_less_than_one_loop_is_for_ever(tmp_path: Path) -> None:
    write_transitions(tmp_path, [2, 1])
    found = delivered(itertools.islice(RolloutDataset(tmp_path, 1, 0), 9))
    assert found == [(0, 0), (0, 1), (1, 0)] * 3
    many = RolloutDataset(tmp_path, 5, dataset_loops=-1)
    assert all(batch.mask.all() for batch in itertools.islice(many, 20))


def test_same_seed_same_batches(tmp_path: Path) -> None:
    write_transitions(tmp_path, [2] * 20)
    orders = [delivered(RolloutDataset(tmp_path, 2, 3, True, start_range=(0, 2), seed=seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    dataset = RolloutDataset(tmp_path, 2, 1, True, seed=1)
    assert delivered(dataset) == delivered(dataset)  # iter() begins anew


def test_each_loop_has_another_order(tmp_path: Path) -> None:
    write_transitions(tmp_path, [1] * 30)
    found = delivered(RolloutDataset(tmp_path, 1, 2, True, seed=0))
    assert sorted(found[:30]) == sorted(found[30:])
    assert found[:30] != found[30:] != sorted(found[30:])


def test_first_step_is_drawn_from_the_range_and_zero_if_the_trajectory_is_short(tmp_path: Path) -> None:
    write_transitions(tmp_path, [10, 3])
    starts: dict[int, set[int]] = {0: set(), 1: set()}
    for batch in itertools.islice(RolloutDataset(tmp_path, 1, 0, start_range=[4, 7], seed=0), 400):
        if batch.is_first[0]:
            starts[int(batch.observation[0, 0])].add(int(batch.observation[0, 1]))
    assert starts == {0: {4, 5, 6}, 1: {0}}


def test_newest_trajectories_of_several_directories_are_the_newest_of_all(tmp_path: Path) -> None:
    write_transitions(tmp_path / "old", [1])
    write_transitions(tmp_path / "new", [1, 2])
    directories: list[str | Path] = [tmp_path / "new", str(tmp_path / "old")]
    assert delivered(RolloutDataset(directories, 1, keep_latest=1)) == [(1, 0), (1, 1)]
    assert delivered(RolloutDataset(directories, 1, keep_latest=2)) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("num_envs", "env_ids", "expected"),
    [
        (1, [0], [[(0, 0)], [(1, 0)], [(2, 0)]]),
        (2, [1, 1], [[(0, 0), (1, 0)], [(0, 1), (2, 0)], [(0, 2), (3, 0)]]),
        (2, [0, 1], [[(0, 0), (1, 0)], [(2, 0), (3, 0)], [(4, 0), (5, 0)]]),
    ],
)
def test_reset_of_given_environments_gives_them_their_next_trajectory(
    tmp_path: Path, num_envs: int, env_ids: list[int], expected: list[list[tuple[int, int]]]
) -> None:
    write_transitions(tmp_path, [5] * 6)
    dataset = RolloutDataset(tmp_path, num_envs)
    for number, batch in enumerate(expected):
        if number:
            dataset.reset(env_ids)
        assert delivered([dataset.get_batch()]) == batch
    dataset.reset()
    assert delivered([dataset.get_batch()]) == expected[0]
    with pytest.raises(rw.errors.SpecError, match=f"`env_ids` must be <= {num_envs - 1}"):
        dataset.reset([num_envs])


def test_some_environments_step_alone(tmp_path: Path) -> None:
    write_transitions(tmp_path, [5, 5])
    dataset = RolloutDataset(tmp_path, 2)
    dataset.reset()
    assert delivered([dataset.fill_transition(dataset.get_buffer(2), [1])]) == [(1, 0), (1, 1)]
    assert delivered([dataset.get_batch()]) == [(0, 0), (1, 2)]


def test_nested_observations_come_as_they_are(tmp_path: Path) -> None:
    RolloutWriter(tmp_path).save(
        {
            "observation": {"height": np.ones((2, 2, 1)), "speed": np.array([3.0, 4.0])},
            "critic_observations": np.full((2, 3), 9.0),
            "action": np.zeros(2),
            "reward": np.zeros(2),
        }
    )
    nested = RolloutDataset(tmp_path, 1).get_batch()
    assert nested.observation["speed"].tolist() == [3]
    assert nested.next_observation["speed"].tolist() == [4]
    assert nested.privileged_observation.tolist() == nested.next_privileged_observation.tolist() == [[9, 9, 9]]


def test_what_the_environment_ended_at_its_limit_is_no_timeout(tmp_path: Path) -> None:
    step = {"observation": np.zeros((1, 2)), "action": np.ones(1), "reward": np.ones(1)}
    RolloutWriter(tmp_path).save(step, terminated=True, truncated=True)
    batch = RolloutDataset(tmp_path, 1).get_batch()
    assert (batch.done.tolist(), batch.truncated.tolist()) == ([True], [False])


def test_fields_of_other_names_are_named_by_the_caller(tmp_path: Path) -> None:
    RolloutWriter(tmp_path).save({"state": np.zeros((2, 2)), "u": np.ones(2), "r": np.ones(2)})
    with pytest.raises(rw.errors.StructureError, match="steps have r, state, u, but no `observation`"):
        RolloutDataset(tmp_path, 1).get_batch()
    names = {"observation": "state", "action": "u", "reward": "r"}
    assert RolloutDataset(tmp_path, 1, fields=names).get_batch().action.tolist() == [1]


def test_damaged_trajectory_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_transitions(tmp_path, [4, 4, 4])
    damaged = list_trajectories(tmp_path)[1]
    last = np.float32(30).tobytes()  # its last action: no step of it must come
    damaged.write_bytes(damaged.read_bytes().replace(last, bytes(4)))
    (tmp_path / "trajectory_0.npz").touch()  # half-written by somebody else
    dataset = RolloutDataset(tmp_path, 1, 2)
    with caplog.at_level(logging.WARNING):
        found = delivered(dataset)
    assert found == [(episode, t) for episode in (0, 2) for t in range(4)] * 2
    assert set(dataset.skipped) == {damaged.name, "trajectory_0.npz"}
    damaged.unlink()
    assert delivered(dataset) == found
    assert damaged.name in dataset.skipped  # what was left out once stays named
    assert [damaged.name in record.getMessage() for record in caplog.records] == [False, True]


def test_nothing_but_damaged_trajectories_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "trajectory_1.npz").touch()
    with pytest.raises(rw.errors.FormatError, match="none of 1 trajectories can be read"):
        RolloutDataset(tmp_path, 1, 0).get_batch()


def test_too_few_trajectories_are_waited_for_and_then_an_error(tmp_path: Path) -> None:
    with pytest.raises(rw.errors.ReplayTimeoutError, match=r"0 complete trajectories after 0.0 s, expected 1"):
        RolloutDataset(tmp_path / "nowhere", 1, wait_timeout_s=0).get_batch()
    write_transitions(tmp_path, [1])
    dataset = RolloutDataset(tmp_path, 1, keep_latest=2, wait_timeout_s=60)
    writing = threading.Timer(0.05, write_transitions, (tmp_path, [2]))
    writing.start()
    assert delivered(dataset) == [(0, 0), (0, 0), (0, 1)]
    writing.join()


def test_new_trajectories_are_seen_when_a_loop_begins(tmp_path: Path) -> None:
    write_transitions(tmp_path, [1])
    dataset = RolloutDataset(tmp_path, 1, 0)
    assert delivered([dataset.get_batch(2)]) == [(0, 0), (0, 0)]
    write_transitions(tmp_path, [2])
    assert delivered([dataset.get_batch(4)]) == [(0, 0), (0, 0), (0, 0), (0, 1)]


def test_trajectory_of_another_structure_is_an_error_by_name(tmp_path: Path) -> None:
    write_transitions(tmp_path, [1])
    steps = {"observation": np.zeros((1, 3), np.float32), "action": np.zeros((1, 1)), "reward": np.zeros(1)}
    path = RolloutWriter(tmp_path).save(steps)
    with pytest.raises(rw.errors.StructureError, match=f"trajectory `{path.name}` has"):
        list(RolloutDataset(tmp_path, 1))


def test_shards_part_the_trajectories(tmp_path: Path) -> None:
    write_transitions(tmp_path, [2] * 5)
    found = []
    for index in range(3):
        dataset = RolloutDataset(tmp_path, 2, shuffle=True)
        dataset.shard(index, 3)
        found += delivered(dataset)
    assert sorted(found) == [(episode, t) for episode in range(5) for t in range(2)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_envs": 0}, "`num_envs` must be >= 1, got 0"),
        ({"start_range": (2, 2)}, r"`start_range\[1\]` must be >= 3, got 2"),
        ({"start_range": (1,)}, r"must be \(low, high\)"),
        ({"keep_latest": -1}, "`keep_latest` must be >= 0"),
        ({"wait_timeout_s": -1}, "`wait_timeout_s` must be >= 0 seconds"),
        ({"fields": {"state": "x"}}, "`fields` has state, expected some of observation"),
        ({}, "`num_transitions_per_env` must be >= 1"),
    ],
)
def test_argument_that_cannot_work_is_refused(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(rw.errors.SpecError, match=text):
        RolloutDataset(tmp_path, **{"num_envs": 1, **arguments}).get_batch(0)


class Counter(RolloutFileBase):
    """Environments that count, each up to 2; the smallest source of trajectories there is."""

    def reset_all(self) -> None:
        self.at = np.zeros(self.num_envs, int)

    def refresh_handlers(self, env_ids: Sequence[int]) -> None:
        self.at[env_ids] = 0

    def get_buffer(self, num_transitions_per_env: int | None = None) -> Any:
        return {"at": np.zeros((num_transitions_per_env or 1, self.num_envs)[num_transitions_per_env is None :], int)}

    def fill_transition(self, buffer: Any, env_ids: Sequence[int] | None = None) -> Any:
        chosen = self.all_env_ids if env_ids is None else env_ids
        for row in np.atleast_2d(buffer["at"]):
            if self.at[chosen].max() > 2:
                raise StopIteration
            row[chosen] = self.at[chosen]
            self.at[chosen] += 1
        return buffer


def test_other_sources_of_trajectories_are_four_methods(tmp_path: Path) -> None:
    counter = Counter(tmp_path, 2)
    assert [batch["at"].tolist() for batch in counter] == [[0, 0], [1, 1], [2, 2]]
    counter.reset()
    assert counter.get_batch(2)["at"].tolist() == [[0, 0], [1, 1]]
    counter.reset([1])
    assert counter.get_batch()["at"].tolist() == [2, 0]
    with pytest.raises(NotImplementedError):
        RolloutFileBase(tmp_path, 1).get_batch()


@pytest.mark.parametrize("device", [None, "cpu"])
def test_masked_rows_of_strings_are_empty_strings(tmp_path: Path, device: Any) -> None:
    """They come as lists beside tensors."""
    if device:
        pytest.importorskip("torch")
    with RolloutWriter(tmp_path) as writer:
        for t, name in enumerate((b"go", b"stop")):
            step = {"observation": np.array(name, object), "action": np.float32(t), "reward": np.float32(t)}
            writer(step, terminated=t == 1, truncated=False)
    batch = RolloutDataset(tmp_path, 2, device=device).get_batch(2)
    assert [list(row) for row in batch.observation] == [[b"go", b""], [b"stop", b""]]
    assert batch.action[:, 0].tolist() == [0, 1]
