"""Batches, slices and the rows after them, as each framework has them. Skipped where it is not installed."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from certificates import OPENSSL, make_identity, server_context
from forwarder import Forwarder
from kinds import contents
from reading import spec
from server_process import HostedServer, StartServer

import reverb_writer as rw

pytestmark = contents


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


def test_next_of_the_view_for_pytorch(address: str) -> None:
    torch = pytest.importorskip("torch")
    with rw.ReplayDataset(address, "replay", 4) as dataset:
        tensors = dataset.as_torch("cpu")
        first, second = next(tensors), next(tensors)
        assert isinstance(first.data["x"], torch.Tensor)
        assert first.info.received_at <= second.info.received_at
        assert dataset.stats().batches == 2


def test_pytorch_data_loader_workers_sample_by_themselves(address: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    with rw.ReplayDataset(address, "replay", 4) as dataset:
        loader = data.DataLoader(
            dataset.as_torch(), batch_size=None, num_workers=2, multiprocessing_context="spawn", prefetch_factor=1
        )
        batches = [batch for _, batch in zip(range(6), loader, strict=False)]
    for batch in batches:
        np.testing.assert_allclose(batch.data["x"].numpy() @ WEIGHTS, batch.data["y"].numpy(), atol=1e-5)


@pytest.mark.skipif(OPENSSL is None, reason="the openssl command, which makes the certificates, is missing")
def test_pytorch_workers_bring_the_client_s_certificates_and_token(
    replay_server: StartServer, tmp_path: pathlib.Path
) -> None:
    data = pytest.importorskip("torch.utils.data")
    server = replay_server(rw.TableConfig("replay"))
    with rw.Client(server.address) as client:
        client.insert({"x": np.arange(3)}, {"replay": 1.0})
    gateway = make_identity(tmp_path, "gateway")
    with (
        Forwarder(server.port, tls=server_context(gateway)) as forwarder,
        rw.Client(forwarder.address, tls=rw.TLS(gateway.certificate), token="t0ken") as client,  # noqa: S106  # of this test
        rw.ReplayDataset(client, "replay", 2) as dataset,
    ):
        loader = data.DataLoader(
            dataset.as_torch(), batch_size=None, num_workers=1, multiprocessing_context="spawn", prefetch_factor=1
        )
        batch = next(iter(loader))
    assert batch.data[0].tolist() == [[0, 1, 2]] * 2


def test_pytorch_without_cuda_says_so_at_once(address: str) -> None:
    torch = pytest.importorskip("torch")
    with rw.ReplayDataset(address, "replay", 2) as dataset:
        if torch.cuda.is_available():
            batch = next(iter(dataset.as_torch("cuda")))
            assert batch.data["x"].device.type == "cuda"
        else:
            with pytest.raises(rw.errors.SpecError, match="finds no CUDA device"):
                dataset.as_torch("cuda")


def test_jax_learns(address: str) -> None:
    jax = pytest.importorskip("jax")

    @jax.jit  # type: ignore[untyped-decorator]  # not installed where mypy runs
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


def test_pytorch_info_mask_and_weights_are_tensors_on_the_device(replay_server: StartServer) -> None:
    torch = pytest.importorskip("torch")
    server = replay_server(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    with rw.Client(server.address) as client:
        client.insert({"x": np.arange(2.0)}, {"table": 1.0})
        client.insert({"x": np.arange(3.0)}, {"table": 3.0})
    with rw.ReplayDataset(server.address, "table", 16, collate="pad", max_in_flight_batches=1) as dataset:
        batch = next(iter(dataset.as_torch("cpu")))
        info = batch.info
        assert info.keys.dtype == torch.int64
        assert info.probabilities.dtype == info.priorities.dtype == torch.float32
        assert info.mask.dtype == torch.bool
        lengths = info.lengths.tolist()
        # Two items of priorities 1 and 3: probabilities 1/4 and 3/4, weights 2 * 1/4 and 2 * 3/4 to the power of -1.
        expected = torch.tensor([2.0 if length == 2 else 2 / 3 for length in lengths])
        torch.testing.assert_close(info.importance_weights(1.0), expected / expected.max())
        assert info.mask.sum(1).tolist() == lengths
        # A loss stays float32, and priorities may have gradients.
        errors = (batch.data[0].sum(1).float() * torch.ones(16, requires_grad=True)) * info.importance_weights(0.5)
        assert errors.dtype == torch.float32
        dataset.update_priorities(batch, errors * 0 + info.lengths)
        dataset.flush_priorities()
    with rw.Client(server.address) as client:
        samples = list(client.sample("table", 64))
    seen = set(lengths)
    assert {(len(s.data[0]), s.info.priority) for s in samples if len(s.data[0]) in seen} <= {(2, 2.0), (3, 3.0)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_priorities_are_tensors_of_any_dtype_with_gradients(replay_server: StartServer, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    server = replay_server(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    with rw.Client(server.address) as client:
        client.insert({"x": np.arange(2.0)}, {"table": 1.0})
        with rw.ReplayDataset(server.address, "table", 4, max_in_flight_batches=1) as dataset:
            batch = next(dataset)
            priorities = torch.full((4,), 2.5, dtype=getattr(torch, dtype), requires_grad=True) * 2
            for keys in (batch, batch.info, batch.info.keys, torch.from_numpy(batch.info.keys.view(np.int64))):
                dataset.update_priorities(keys, priorities)
            with pytest.raises(rw.errors.SpecError, match=r"has shape \(3,\), expected \(4,\)"):
                dataset.update_priorities(batch, priorities[:3])
            dataset.flush_priorities()
        assert next(client.sample("table", 1)).info.priority == 5.0


def test_pytorch_gets_mixed_batches_with_their_members_and_routes_priorities(replay_server: StartServer) -> None:
    torch = pytest.importorskip("torch")
    names = ("online", "offline")
    server = replay_server(*(rw.TableConfig(name, 100, rw.Prioritized(1.0)) for name in names))
    with rw.Client(server.address) as client:
        for number, name in enumerate(names):
            client.insert({"x": np.full(2, number)}, {name: 1.0})
        datasets = [rw.ReplayDataset(server.address, name, size) for name, size in zip(names, (4, 2), strict=True)]
        with rw.MixedDataset(datasets) as dataset:
            batch = next(iter(dataset.as_torch("cpu")))
            assert batch.info.members.tolist() == [0, 0, 0, 0, 1, 1]
            assert batch.info.importance_weights(0.5).tolist() == [1.0] * 6
            dataset.update_priorities(batch, torch.arange(6.0, requires_grad=True))  # 3 and 5 are the last of each item
            dataset.flush_priorities()
        assert [next(client.sample(name, 1)).info.priority for name in names] == [3.0, 5.0]


def test_pytorch_workers_bring_the_transform_and_mixtures(address: str) -> None:
    data = pytest.importorskip("torch.utils.data")
    dataset = rw.ReplayDataset(address, "replay", 4, transform=rw.frame_stack(2, "x"))
    with rw.MixedDataset([dataset]) as mixed:
        loader = data.DataLoader(
            mixed.as_torch(), batch_size=None, num_workers=1, multiprocessing_context="spawn", prefetch_factor=1
        )
        batch = next(iter(loader))
    assert batch.data["x"].shape == (4, 5, 2, 3)
    np.testing.assert_allclose(batch.data["x"].numpy()[:, :, 1] @ WEIGHTS, batch.data["y"].numpy(), atol=1e-5)


def test_transform_may_make_tensors_itself(address: str) -> None:
    torch = pytest.importorskip("torch")

    def decode(batch: rw.Batch) -> rw.Batch:
        return dataclasses.replace(batch, data={**batch.data, "x": torch.from_numpy(batch.data["x"]).half()})

    with rw.ReplayDataset(address, "replay", 4, transform=decode) as dataset:
        batch = next(iter(dataset.as_torch("cpu")))
    assert batch.data["x"].dtype == torch.float16


MARKERS = ("is_init", "done", "terminated", "truncated", "cut_by_sampler", "mask")


@pytest.fixture
def sliced(replay_server: Callable[..., HostedServer]) -> str:
    """Two queues of the same episodes: rows 0 and 1, 2 to 4, 5 to 8, the last of each terminated."""
    names = ["numpy", "other"]
    server = replay_server(*(rw.TableConfig(name, 100, sampler="fifo", max_times_sampled=1) for name in names))
    with rw.EpisodeObserver(server.address, names, 10) as observer:
        for row in range(9):
            last = row in (1, 4, 8)
            observer({"row": np.full(3, row, np.float32), "terminated": last}, end_of_episode=last)
    return server.address


def open_slices(sliced: str, table: str = "other", *, with_next: bool = False) -> rw.SliceDataset:
    return rw.SliceDataset(sliced, table, 2, 3, short="pad", seed=0, single_pass=True, with_next=with_next)


def open_all(address: str, *, with_next: bool) -> tuple[list[rw.Batch], rw.SliceDataset]:
    """Return the batches of one queue as NumPy has them, and a dataset of the other one."""
    with open_slices(address, "numpy", with_next=with_next) as dataset:
        expected = list(dataset)
    assert [len(batch.markers) for batch in expected] == [6, 3]
    if with_next:  # rows 5 to 7 or 6 to 8 are drawn of the last episode, so row 8 is next either way
        assert [batch.next["row"].tolist() for batch in expected] == [[[1] * 3, [4] * 3], [[8] * 3]]
    return expected, open_slices(address, with_next=with_next)


@pytest.mark.parametrize("with_next", [False, True])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_slices_and_their_markers(sliced: str, framework: str, with_next: bool) -> None:
    library = pytest.importorskip(framework)
    expected, dataset = open_all(sliced, with_next=with_next)
    kind = library.Tensor if framework == "torch" else library.Array
    with dataset:
        found = list(dataset.as_torch("cpu") if framework == "torch" else dataset.as_jax())
        dataset.update_priorities(found[0], np.ones(2))
    for mine, wanted in zip(found, expected, strict=True):
        pairs = [(mine.data["row"], wanted.data["row"])]
        pairs += [(getattr(mine.markers, name), getattr(wanted.markers, name)) for name in (*MARKERS, "traj_ids")]
        pairs += [(mine.next["row"], wanted.next["row"])] if with_next else []
        for one, other in pairs:
            assert isinstance(one, kind)
            np.testing.assert_array_equal(np.asarray(one), other)
        assert np.shape(mine.markers.traj_ids) == (3 * len(wanted.info.keys),)
        assert isinstance(mine.info.keys, kind if framework == "torch" else np.ndarray)


@pytest.mark.parametrize("with_next", [False, True])
def test_tensorflow_gets_the_data_their_markers_and_what_follows(sliced: str, with_next: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        tf = pytest.importorskip("tensorflow")
    expected, dataset = open_all(sliced, with_next=with_next)
    with dataset:
        batches = dataset.as_tf()
        spec, numbers_spec, *_ = batches.element_spec
        assert spec["row"] == tf.TensorSpec((None, 3), tf.float32)
        assert numbers_spec["is_init"] == tf.TensorSpec((None,), tf.bool)
        found = list(batches)
    for (data, numbers, *after), wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(data["row"], wanted.data["row"])
        for name in (*MARKERS, "traj_ids"):
            np.testing.assert_array_equal(numbers[name], getattr(wanted.markers, name))
        np.testing.assert_array_equal(numbers["priorities"], wanted.info.priorities)
        assert len(after) == with_next
        for nest in after:
            np.testing.assert_array_equal(nest["row"], wanted.next["row"])


def test_pytorch_data_loader_workers_sample_slices_by_themselves(sliced: str) -> None:
    loading = pytest.importorskip("torch.utils.data")
    with open_slices(sliced) as dataset:
        view = dataset.as_torch()
        assert len(list(dataset)) == 2
    with rw.Client(sliced) as client:
        for row in range(4):
            data = {"row": np.full((3, 3), row, np.float32), "terminated": np.zeros(3, bool)}
            client.insert(data, {"other": 1.0}, spec={"row": spec((3,), np.float32), "terminated": spec((), bool)})
    loader = loading.DataLoader(view, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert [batch.data["row"][:, 0].tolist() for batch in loader] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]
