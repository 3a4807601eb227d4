"""Contiguous batches as each framework has them. Skipped where it is not installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kinds import contents
from reading import spec
from server_process import HostedServer

import reverb_writer as rw

pytestmark = contents

MARKERS = ("is_init", "done", "terminated", "truncated", "cut_by_sampler", "mask")


@pytest.fixture
def address(replay_server: Callable[..., HostedServer]) -> str:
    """Two queues of the same episodes: rows 0 and 1, 2 to 4, 5 to 8, the last of each terminated."""
    names = ["numpy", "other"]
    server = replay_server(*(rw.TableConfig(name, 100, sampler="fifo", max_times_sampled=1) for name in names))
    with rw.EpisodeObserver(server.address, names, 10) as observer:
        for row in range(9):
            last = row in (1, 4, 8)
            observer({"row": np.full(3, row, np.float32), "terminated": last}, end_of_episode=last)
    return server.address


def open_dataset(address: str, table: str = "other", *, with_next: bool = False) -> rw.SliceDataset:
    return rw.SliceDataset(address, table, 2, 3, short="pad", seed=0, single_pass=True, with_next=with_next)


def expected_batches(address: str) -> list[rw.Batch]:
    with open_dataset(address, "numpy") as dataset:
        return list(dataset)


def assert_same(found: rw.Batch, expected: rw.Batch, kind: type) -> None:
    assert isinstance(found.data["row"], kind)
    np.testing.assert_array_equal(np.asarray(found.data["row"]), expected.data["row"])
    for name in (*MARKERS, "traj_ids"):
        assert isinstance(getattr(found.markers, name), kind)
        np.testing.assert_array_equal(np.asarray(getattr(found.markers, name)), getattr(expected.markers, name))
    for batch in (found, expected):
        assert np.shape(batch.markers.traj_ids) == (3 * len(found.info.keys),)
    assert isinstance(found.info.keys, kind if kind.__module__ == "torch" else np.ndarray)


def test_pytorch_gets_the_data_and_its_markers_as_tensors(address: str) -> None:
    torch = pytest.importorskip("torch")
    expected = expected_batches(address)
    assert [len(batch.markers) for batch in expected] == [6, 3]
    with open_dataset(address) as dataset:
        found = list(dataset.as_torch("cpu"))
        dataset.update_priorities(found[0], np.ones(2))
    for mine, wanted in zip(found, expected, strict=True):
        assert_same(mine, wanted, torch.Tensor)


def test_pytorch_data_loader_workers_sample_by_themselves(address: str) -> None:
    loading = pytest.importorskip("torch.utils.data")
    with open_dataset(address) as dataset:
        view = dataset.as_torch()
        assert len(list(dataset)) == 2
    with rw.Client(address) as client:
        for row in range(4):
            data = {"row": np.full((3, 3), row, np.float32), "terminated": np.zeros(3, bool)}
            client.insert(data, {"other": 1.0}, spec={"row": spec((3,), np.float32), "terminated": spec((), bool)})
    loader = loading.DataLoader(view, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [batch.data["row"][:, 0].tolist() for batch in loader] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


def test_jax_gets_the_data_and_its_markers_as_arrays(address: str) -> None:
    jax = pytest.importorskip("jax")
    expected = expected_batches(address)
    with open_dataset(address) as dataset:
        found = list(dataset.as_jax())
    for mine, wanted in zip(found, expected, strict=True):
        assert_same(mine, wanted, jax.Array)


def test_tensorflow_gets_pairs_of_the_data_and_its_markers(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        tf = pytest.importorskip("tensorflow")
    expected = expected_batches(address)
    with open_dataset(address) as dataset:
        batches = dataset.as_tf()
        spec, numbers_spec = batches.element_spec
        assert spec["row"] == tf.TensorSpec((None, 3), tf.float32)
        assert numbers_spec["is_init"] == tf.TensorSpec((None,), tf.bool)
        found = list(batches)
    for (data, numbers), wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(data["row"], wanted.data["row"])
        for name in (*MARKERS, "traj_ids"):
            np.testing.assert_array_equal(numbers[name], getattr(wanted.markers, name))
        np.testing.assert_array_equal(numbers["priorities"], wanted.info.priorities)


def next_rows_of(address: str) -> list[Any]:
    """Return `next` of each batch; rows 5 to 7 or 6 to 8 are drawn of the last episode, so row 8 is next either way."""
    with open_dataset(address, "numpy", with_next=True) as dataset:
        found = [batch.next["row"] for batch in dataset]
    assert [rows.tolist() for rows in found] == [[[1] * 3, [4] * 3], [[8] * 3]]
    return found


def test_pytorch_gets_the_row_after_each_slice(address: str) -> None:
    torch = pytest.importorskip("torch")
    with open_dataset(address, with_next=True) as dataset:
        found = [batch.next["row"] for batch in dataset.as_torch()]
    for rows, expected in zip(found, next_rows_of(address), strict=True):
        assert isinstance(rows, torch.Tensor)
        np.testing.assert_array_equal(rows.numpy(), expected)


def test_tensorflow_gets_the_row_after_each_slice_as_third(address: str) -> None:
    pytest.importorskip("tensorflow")
    with open_dataset(address, with_next=True) as dataset:
        found = [after["row"].numpy() for _, _, after in dataset.as_tf()]
    for rows, expected in zip(found, next_rows_of(address), strict=True):
        np.testing.assert_array_equal(rows, expected)
