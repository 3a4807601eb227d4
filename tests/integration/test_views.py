"""A few steps of training with each framework, on batches of a real server. Skipped where it is not installed."""

from __future__ import annotations

import pathlib
import runpy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from server_process import HostedServer

import reverb_writer as rw

StartServer = Callable[..., HostedServer]

WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


@pytest.fixture
def address(replay_server: StartServer) -> str:
    """A table of windows in which y is a linear function of x, to be learnt."""
    server = replay_server(rw.TableConfig("replay"))
    rng = np.random.default_rng(0)
    with rw.TrajectoryObserver(server.address, "replay", 5) as observer:
        for _ in range(100):
            x = rng.normal(size=3).astype(np.float32)
            observer({"x": x, "y": np.float32(x @ WEIGHTS), "name": "step"})
    return server.address


def test_pytorch_learns(address: str) -> None:
    torch = pytest.importorskip("torch")
    weights = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.2)
    with rw.ReplayDataset(address, "replay", 16) as dataset:
        for _, batch in zip(range(50), dataset.as_torch("cpu"), strict=False):
            assert batch.data["x"].shape == (16, 5, 3)
            assert batch.data["name"][0][0] == b"step"
            loss = ((batch.data["x"] @ weights - batch.data["y"]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    np.testing.assert_allclose(weights.detach().numpy(), WEIGHTS, atol=1e-2)


def test_pytorch_data_loader_workers_sample_by_themselves(address: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    with rw.ReplayDataset(address, "replay", 4) as dataset:
        loader = data.DataLoader(
            dataset.as_torch(), batch_size=None, num_workers=2, multiprocessing_context="spawn", prefetch_factor=1
        )
        batches = [batch for _, batch in zip(range(6), loader, strict=False)]
    for batch in batches:
        np.testing.assert_allclose(batch.data["x"].numpy() @ WEIGHTS, batch.data["y"].numpy(), atol=1e-5)


def test_jax_learns(address: str) -> None:
    jax = pytest.importorskip("jax")

    @jax.jit
    def update(weights: Any, x: Any, y: Any) -> Any:
        return weights - 0.2 * jax.grad(lambda w: ((x @ w - y) ** 2).mean())(weights)

    weights = jax.numpy.zeros(3)
    with rw.ReplayDataset(address, "replay", 16) as dataset:
        for _, batch in zip(range(50), dataset.as_jax(), strict=False):
            assert isinstance(batch.data["x"], jax.Array)
            weights = update(weights, batch.data["x"], batch.data["y"])
    np.testing.assert_allclose(weights, WEIGHTS, atol=1e-2)


def test_tensorflow_learns(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        tf = pytest.importorskip("tensorflow")
    weights = tf.Variable(tf.zeros(3))
    with rw.ReplayDataset(address, "replay", 16) as dataset:
        batches = dataset.as_tf()
        spec, info_spec = batches.element_spec
        assert spec["x"] == tf.TensorSpec((None, None, 3), tf.float32)
        assert info_spec["keys"] == tf.TensorSpec((None,), tf.uint64)
        for data, info in batches.take(50):
            assert info["keys"].shape == (16,)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.linalg.matvec(data["x"], weights) - data["y"]) ** 2)
            weights.assign_sub(0.2 * tape.gradient(loss, weights))
    np.testing.assert_allclose(weights.numpy(), WEIGHTS, atol=1e-2)


def test_prioritized_q_learning_finds_the_way(replay_server: StartServer) -> None:
    pytest.importorskip("torch")
    path = pathlib.Path(__file__).parents[2] / "examples" / "prioritized_torch.py"
    example = runpy.run_path(str(path))
    server = replay_server(rw.TableConfig("replay", 5000, sampler=rw.Prioritized(0.6)))
    example["act"](server.address, 200)
    values = example["learn"](server.address, 500)
    assert values[:-1].argmax(axis=1).tolist() == [1] * 7
    # The step into the end is worth 1.
    assert abs(values[6, 1] - 1.0) < 0.1
