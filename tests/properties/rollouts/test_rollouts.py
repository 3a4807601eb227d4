"""Rollouts in memory and on disk: each row once, in order, and bit for bit."""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from rollout_steps import write_transitions
from rollouts import add, plain

import reverb_writer as rw
from reverb_writer.files import RolloutDataset, RolloutWriter, StoredTrajectory, list_trajectories
from reverb_writer.rollouts import (
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    split_and_pad_trajectories,
    unpad_trajectories,
)
from reverb_writer.transitions.returns import gae

Floats = npt.NDArray[np.float32]


class Steps(NamedTuple):
    """Rows [T, B], and the numbers that tell them apart."""

    dones: npt.NDArray[np.bool_]
    rewards: Floats
    values: Floats

    @property
    def numbers(self) -> Floats:
        return np.arange(self.dones.size, dtype=np.float32).reshape(self.dones.shape)

    def storage(self, **options: Any) -> RolloutStorage:
        num_rows, num_envs = self.dones.shape
        storage = RolloutStorage(num_envs, num_rows, (1,), None, (1,), **options)
        states = self.numbers[:, None, :, None]  # [T, layers, B, H]
        add(storage, observations=self.numbers, actions=self.numbers, hidden_states=states, **self._asdict())
        return storage


@st.composite
def steps(draw: st.DrawFn, min_rows: int = 1) -> Steps:
    shape = draw(st.integers(min_rows, 9)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    often = draw(st.sampled_from([0.0, 0.3, 1.0]))
    rewards, values = rng.normal(size=(2, *shape)).astype(np.float32)
    return Steps(rng.random(shape) < often, rewards, values)


@given(steps(), st.data())
def test_each_row_is_in_each_epoch_once(of: Steps, data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, of.dones.size))
    epochs = [[*of.storage().mini_batch_generator(num_parts, 1)] for _ in range(2)]
    for epoch in epochs:
        assert len(epoch) == num_parts
        assert max(len(part.obs) for part in epoch) - min(len(part.obs) for part in epoch) <= 1
        found = np.concatenate([part.obs[:, 0] for part in epoch])
        assert sorted(found.tolist()) == of.numbers.ravel().tolist()
        assert all((part.obs == part.actions).all() for part in epoch)


@given(steps(), st.booleans(), st.data())
def test_padded_trajectories_are_whole(of: Steps, shuffle: bool, data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, of.dones.shape[1]))
    found, envs = [], []
    for part in of.storage(seed=5).recurrent_mini_batch_generator(num_parts, 1, shuffle=shuffle):
        assert (part.obs[~part.masks] == 0).all()
        np.testing.assert_array_equal(part.hidden_states[0], part.obs[0])  # those of the first rows
        np.testing.assert_array_equal(unpad_trajectories(part.obs, part.masks), part.actions)
        lengths = part.masks.sum(axis=0)
        assert (part.masks == (np.arange(len(part.masks))[:, None] < lengths)).all()
        found += part.obs[..., 0][part.masks].tolist()
        envs += part.actions[0, :, 0].tolist()
    assert sorted(found) == of.numbers.ravel().tolist()
    assert shuffle or envs == of.numbers[0].tolist()


@given(steps())
def test_splitting_and_putting_together_is_the_identity(of: Steps) -> None:
    padded, masks = split_and_pad_trajectories({"a": of.rewards, "b": of.numbers}, of.dones)
    found = unpad_trajectories(padded, masks)
    np.testing.assert_array_equal(found["a"], of.rewards)
    np.testing.assert_array_equal(found["b"], of.numbers)
    # A column goes on until its environment is done.
    ends = np.cumsum(masks.sum(axis=0)) - 1
    in_order = of.dones.T.ravel().copy()
    in_order[of.dones.shape[0] - 1 :: of.dones.shape[0]] = True
    np.testing.assert_array_equal(np.flatnonzero(in_order), ends)


@given(steps(), st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.2]), st.integers(1, 3), st.data())
def test_a_queue_holds_the_newest_rows_and_their_returns_in_the_order_of_time(
    of: Steps, ratio: float, rollout: int, data: st.DataObject
) -> None:
    num_rows, num_envs = of.dones.shape
    storage = QueueRolloutStorage(num_envs, rollout, (1,), None, (1,), buffer_dilation_ratio=ratio)
    is_short = data.draw(st.booleans())
    stop = 0
    while stop < num_rows:
        length = data.draw(st.integers(1, rollout)) if is_short else rollout
        part = slice(stop, stop := stop + length)
        columns = {name: rows[part] for name, rows in of._asdict().items()}
        storage.clear()
        add(storage, observations=of.numbers[part], hidden_states=of.numbers[part, None, :, None], **columns)
    held = storage.num_rows
    assert min(num_rows, rollout) <= held <= int(ratio * rollout)
    assert is_short or held == min(num_rows, int(ratio * rollout))
    newest = Steps(of.dones[-held:], of.rewards[-held:], of.values[-held:])
    last = np.ones(num_envs, np.float32)
    values = np.concatenate([newest.values, last[None]])
    expected = gae(newest.rewards, values, gamma=0.9, lambda_=0.8, discounts=~newest.dones, time_axis=0)
    storage.compute_returns(last, 0.9, 0.8, normalize_advantages=False)
    before = sorted(zip(plain(storage.observations.ravel()), plain(storage.returns.ravel()), strict=True))
    storage.untie_buffer_loop()
    after = sorted(zip(plain(storage.observations.ravel()), plain(storage.returns.ravel()), strict=True))
    assert before == after
    storage.untie_buffer_loop()  # changes nothing any more
    np.testing.assert_array_equal(storage.values[:held, :, 0], newest.values)
    np.testing.assert_array_equal(storage.saved_hidden_states[:held, :, 0, 0], of.numbers[-held:])
    np.testing.assert_array_equal(storage.observations[:held, :, 0], of.numbers[-held:])
    np.testing.assert_allclose(storage.returns[:held, :, 0], expected.returns, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(storage.advantages[:held, :, 0], expected.advantages, rtol=1e-5, atol=1e-5)


@given(steps())
def test_next_observations_never_cross_the_end_of_an_episode(of: Steps) -> None:
    num_rows, num_envs = of.dones.shape
    storage = SarsaRolloutStorage(num_envs, num_rows, (1,), None, (1,))
    add(storage, observations=of.numbers, next_observations=of.numbers + num_envs, dones=of.dones)
    expected = np.where(of.dones, of.numbers, of.numbers + num_envs)
    np.testing.assert_array_equal(storage.next_observations[..., 0], expected)


DTYPES = st.sampled_from([np.dtype(name) for name in ("bool", "uint8", "int64", "float16", "float32", "complex128")])


def columns(num_steps: int) -> st.SearchStrategy[Any]:
    """Return nests of arrays [num_steps, ...]."""
    shapes = arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=4)
    leaves = st.tuples(DTYPES, shapes).flatmap(lambda of: arrays.arrays(of[0], (num_steps, *of[1])))
    keys = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), max_size=3)
    dicts = partial(st.dictionaries, keys, min_size=1, max_size=3)
    return st.recursive(leaves, lambda inner: dicts(inner) | st.tuples(inner, inner), max_leaves=5)


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


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredTrajectory, Any]:
    """A trajectory in a file, and its steps."""
    folder = tmp_path_factory.mktemp("stored")
    write_transitions(folder, [5])
    (path,) = list_trajectories(folder)
    before = StoredTrajectory(path)
    return before, before.load()


@given(data=st.data())
@settings(max_examples=300)
def test_any_changed_byte_changes_no_step(stored: tuple[StoredTrajectory, Any], data: Any) -> None:
    before, steps = stored
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / before.path.name
        content = bytearray(before.path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        message = ""
        try:
            after = StoredTrajectory(path)
            found, kinds = after.load_rows()
        except rw.errors.FormatError as error:
            message = str(error)
        if message:
            assert path.name in message
        else:  # a byte that means nothing, such as a date in the zip file
            assert after.manifest == before.manifest
            assert kinds.tolist() == [3, 2, 2, 2, 2, 12]
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
        earlier: Any = []
        for turn in range(1000):
            try:
                batch = dataset.get_batch(batch_lengths[turn % len(batch_lengths)])
            except StopIteration:
                break
            assert not batch.observation[~batch.mask].any()
            assert all((mine == as_it_was).all() for mine, as_it_was in earlier)  # batches are the caller's
            earlier.append((batch.observation, batch.observation.copy()))
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
