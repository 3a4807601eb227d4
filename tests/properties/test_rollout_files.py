"""Any steps come back from disk as they were; any damage is found."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rollout_steps import write_transitions

import reverb_writer as rw
from reverb_writer.files import RolloutDataset, RolloutWriter, StoredTrajectory, list_trajectories

DTYPES = st.sampled_from([np.dtype(name) for name in ("bool", "uint8", "int64", "float16", "float32", "complex128")])


def columns(num_steps: int) -> st.SearchStrategy[Any]:
    """Return nests of arrays [num_steps, ...]."""
    shapes = arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)
    leaves = st.tuples(DTYPES, shapes).flatmap(lambda of: arrays.arrays(of[0], (num_steps, *of[1])))
    keys = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=3)
    return st.recursive(
        leaves,
        lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3) | st.tuples(inner, inner),
        max_leaves=5,
    )


@given(st.integers(1, 9).flatmap(columns))
@settings(max_examples=60)
def test_steps_come_back_bit_for_bit(steps: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_steps = len(tree.flatten(steps)[0])
        with RolloutWriter(folder) as writer:
            for t in range(num_steps):
                writer(tree.map_structure(lambda leaf, t=t: leaf[t], steps), end_of_episode=t == num_steps - 1)
        (path,) = list_trajectories(folder)
        found = StoredTrajectory(path).load()
        tree.assert_same_structure(found, steps)
        for ours, theirs in zip(tree.flatten(found), tree.flatten(steps), strict=True):
            assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            assert ours.flags.writeable


@given(st.data())
@settings(max_examples=300)
def test_any_changed_byte_changes_no_step(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_transitions(Path(folder), [5])
        (path,) = list_trajectories(folder)
        before = StoredTrajectory(path)
        steps = before.load()
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        message = ""
        try:
            after = StoredTrajectory(path)
            found = after.load()
        except rw.errors.FormatError as error:
            message = str(error)
        if message:
            assert path.name in message
        else:  # a byte that means nothing, such as a date in the zip file
            assert after.manifest == before.manifest
            tree.map_structure(np.testing.assert_array_equal, found, steps)


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    num_envs=st.integers(1, 7),
    batch_lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    loops=st.integers(1, 3),
    shuffle=st.booleans(),
)
@settings(max_examples=60)
def test_every_transition_comes_once_a_loop_in_order(
    lengths: list[int], num_envs: int, batch_lengths: list[int], loops: int, shuffle: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_transitions(Path(folder), lengths)
        dataset = RolloutDataset(folder, num_envs, loops, shuffle=shuffle)
        delivered: list[list[tuple[int, int]]] = [[] for _ in range(num_envs)]
        for turn in range(1000):
            try:
                batch = dataset.get_batch(batch_lengths[turn % len(batch_lengths)])
            except StopIteration:
                break
            for env, of_env in enumerate(delivered):
                real = batch.mask[:, env]
                rows = batch.observation[real, env].astype(int).tolist()
                following = batch.next_observation[real, env].astype(int).tolist()
                for (episode, t), after, done in zip(rows, following, batch.done[real, env], strict=True):
                    assert after == [episode, min(t + 1, lengths[episode] - 1)]
                    assert done == (t == lengths[episode] - 1)
                    assert not of_env or of_env[-1][1] == lengths[of_env[-1][0]] - 1 or of_env[-1] == (episode, t - 1)
                    of_env.append((episode, t))
        every = [(episode, t) for episode, n in enumerate(lengths) for t in range(n)]
        assert sorted(itertools.chain(*delivered)) == sorted(every * loops)
        assert dataset.num_dataset_looped == loops


def test_memory_is_bounded_by_the_longest_trajectory(tmp_path: Path) -> None:
    import tracemalloc

    with RolloutWriter(tmp_path) as writer:
        for t in range(1600):  # 16 MB of noise in a hundred trajectories
            rng = np.random.default_rng(t)
            step = {"observation": rng.integers(256, size=10_000, dtype=np.uint8), "action": 0, "reward": 0.0}
            writer(step, terminated=t % 16 == 15)
    tracemalloc.start()
    try:
        assert sum(int(batch.mask[0]) for batch in RolloutDataset(tmp_path, 1)) == 1600
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
