"""Batches, slices and transitions as each framework has them. Skipped where it is not installed."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from certificates import OPENSSL, make_identity, server_context
from forwarder import Forwarder
from kinds import contents
from server_process import HostedServer, StartServer

import reverb_writer as rw

pytestmark = contents


WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


@pytest.fixture
def address(replay_server: StartServer) -> str:
    """A table of windows in which y is a linear function of x."""
    server = replay_server(rw.TableConfig("replay"))
    rng = np.random.default_rng(0)
    with rw.TrajectoryObserver(server.address, "replay", 5) as observer:
        for _ in range(100):
            x = rng.normal(size=3).astype(np.float32)
            observer({"x": x, "y": np.float32(x @ WEIGHTS), "name": "step"})
    return server.address


def in_workers(view: Any) -> Any:
    """Return batches of a view that another process samples."""
    loading = pytest.importorskip("torch.utils.data")
    return loading.DataLoader(view, batch_size=None, num_workers=1, multiprocessing_context="spawn", prefetch_factor=1)


def tensorflow() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        return pytest.importorskip("tensorflow")


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_batches_are_arrays_of_the_framework_and_hold_what_was_written(address: str, framework: str) -> None:
    library = tensorflow() if framework == "tensorflow" else pytest.importorskip(framework)
    kind = library.Array if framework == "jax" else library.Tensor
    with rw.ReplayDataset(address, "replay", 16) as dataset:
        if framework == "tensorflow":
            view: Any = dataset.as_tf()
            spec, info_spec = view.element_spec
            assert spec["x"] == library.TensorSpec((None, None, 3), library.float32)
            assert info_spec["keys"] == library.TensorSpec((None,), library.uint64)
        else:
            view = dataset.as_torch("cpu") if framework == "torch" else dataset.as_jax()
        batches = list(itertools.islice(iter(view), 50))  # all are kept: none is overwritten by a later one
    for batch in batches:
        data, keys = (batch[0], batch[1]["keys"]) if framework == "tensorflow" else (batch.data, batch.info.keys)
        assert isinstance(data["x"], kind)
        assert (tuple(data["x"].shape), tuple(keys.shape)) == ((16, 5, 3), (16,))
        assert np.asarray(data["name"])[0][0] == b"step"
        np.testing.assert_allclose(np.asarray(data["x"]) @ WEIGHTS, np.asarray(data["y"]), atol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_view_goes_on_after_an_error(replay_server: StartServer, framework: str) -> None:
    pytest.importorskip(framework)
    server = replay_server(rw.TableConfig("replay"))
    with rw.ReplayDataset(server.address, "replay", 1, timeout_s=0.5) as dataset, rw.Client(server.address) as client:
        view = dataset.as_torch() if framework == "torch" else dataset.as_jax()
        with pytest.raises(rw.errors.ReplayTimeoutError):
            next(view)
        client.insert({"x": np.arange(3)}, {"replay": 1.0})
        dataset.timeout_s = 30.0
        assert np.asarray(next(view).data["x"]).tolist() == [[0, 1, 2]]


@pytest.mark.skipif(OPENSSL is None, reason="the openssl command, which makes the certificates, is missing")
def test_pytorch_workers_bring_the_client_s_certificates_and_token(
    replay_server: StartServer, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("torch")
    server = replay_server(rw.TableConfig("replay"))
    with rw.Client(server.address) as client:
        client.insert([np.arange(3)], {"replay": 1.0})
    gateway = make_identity(tmp_path, "gateway")
    with (
        Forwarder(server.port, tls=server_context(gateway)) as forwarder,
        rw.Client(forwarder.address, tls=rw.TLS(gateway.certificate), token="t0ken") as client,  # noqa: S106  # of this test
        rw.ReplayDataset(client, "replay", 2) as dataset,
    ):
        batch = next(iter(in_workers(dataset.as_torch())))
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


def test_pytorch_info_mask_and_weights_are_tensors_on_the_device(replay_server: StartServer) -> None:
    torch = pytest.importorskip("torch")
    server = replay_server(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    with rw.Client(server.address) as client:
        client.insert([np.arange(2.0)], {"table": 1.0})
        client.insert([np.arange(3.0)], {"table": 3.0})
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
        client.insert([np.arange(2.0)], {"table": 1.0})
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
            client.insert([np.full(2, number)], {name: 1.0})
        datasets = [rw.ReplayDataset(server.address, name, size) for name, size in zip(names, (4, 2), strict=True)]
        with rw.MixedDataset(datasets) as dataset:
            batch = next(iter(dataset.as_torch("cpu")))
            assert batch.info.members.tolist() == [0, 0, 0, 0, 1, 1]
            assert batch.info.importance_weights(0.5).tolist() == [1.0] * 6
            dataset.update_priorities(batch, torch.arange(6.0, requires_grad=True))  # 3 and 5 are the last of each item
            dataset.flush_priorities()
        assert [next(client.sample(name, 1)).info.priority for name in names] == [3.0, 5.0]


def test_pytorch_workers_bring_the_transform_and_mixtures(address: str) -> None:
    pytest.importorskip("torch")
    dataset = rw.ReplayDataset(address, "replay", 4, transform=rw.frame_stack(2, "x"))
    with rw.MixedDataset([dataset]) as mixed:
        batch = next(iter(in_workers(mixed.as_torch())))
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
    tf = tensorflow()
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
    pytest.importorskip("torch")
    with open_slices(sliced) as dataset:
        view = dataset.as_torch()
        assert len(list(dataset)) == 2
    with rw.Client(sliced) as client:
        for row in range(4):
            data = {"row": np.full((3, 3), row, np.float32), "terminated": np.zeros(3, bool)}
            client.insert(data, {"other": 1.0})
    assert [batch.data["row"][:, 0].tolist() for batch in in_workers(view)] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


# Transitions in one call, from windows, slices and mixed datasets.


NUM_STEPS = 12  # of an episode, boundary step included; rewards are 1


def write(address: str, table: str, length: int | None) -> None:
    """Write four episodes: windows of `length` steps, or whole episodes. Observations are numbers, 100 for each."""
    observer: Any = (
        rw.EpisodeObserver(address, table, 100)
        if length is None
        else rw.TrajectoryObserver(address, table, length, end_of_episode="tile")
    )
    with observer:
        for episode in range(4):
            for t in range(NUM_STEPS):
                last = t == NUM_STEPS - 1
                observer(
                    {
                        "observation": {"at": np.float32(100 * episode + t)},
                        "action": np.int32(t),
                        "reward": np.float32(not last),
                        "is_first": np.bool_(t == 0),
                        "is_last": np.bool_(last),
                        "is_terminal": np.bool_(last),
                        "name": f"step {t}",
                    }
                )


@pytest.fixture
def played(replay_server: StartServer) -> str:
    server = replay_server(rw.TableConfig("windows", 1000, rw.Prioritized(1.0)), rw.TableConfig("episodes", 100))
    write(server.address, "windows", 4)
    write(server.address, "episodes", None)
    return server.address


def check(found: Any, n: int, gamma: float) -> None:
    """See that transitions are those over n steps, or to the end of the episode."""
    mask = np.asarray(found.mask)
    at = np.asarray(found.observation["at"])[mask]
    left = NUM_STEPS - 1 - at % 100
    steps = np.minimum(left, n)
    assert (steps >= 1).all()
    np.testing.assert_array_equal(np.asarray(found.next_observation["at"])[mask], at + steps)
    np.testing.assert_allclose(np.asarray(found.reward)[mask], [sum(gamma**k for k in range(int(m))) for m in steps])
    ended = left <= n
    np.testing.assert_allclose(np.asarray(found.discount)[mask], np.where(ended, 0.0, gamma ** (steps - 1)), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(found.action)[mask], at % 100)


@pytest.mark.parametrize(("n", "gamma"), [(1, 0.99), (3, 0.5)])
def test_windows_give_their_first_transitions(played: str, n: int, gamma: float) -> None:
    with rw.ReplayDataset(played, "windows", 64) as dataset:
        view = dataset.transitions(n=n, gamma=gamma)
        found = next(view)
        assert isinstance(found, rw.NStepTransitions)
        assert found.observation["at"].shape == found.reward.shape == found.mask.shape == (64,)
        assert found.extras["name"].shape == (64,)
        check(found, n, gamma)
        # Windows that begin with the boundary step have no transition.
        np.testing.assert_array_equal(found.mask, found.observation["at"] % 100 < NUM_STEPS - 1)
        dataset.update_priorities(found.batch, np.full(64, 2.0))
        dataset.flush_priorities()
        assert view.stats().priority_updates > 0
        assert found.batch.info.importance_weights().shape == (64,)
        again = view.take(30.0)
        assert again is not None
        check(again, n, gamma)
        for one in view:
            check(one, n, gamma)
            break
        with pytest.raises(rw.errors.StructureError, match="overlap"):
            rw.returns.gae(found, np.ones((64, 4)), gamma=0.5, lambda_=0.5)
        with pytest.raises(rw.errors.StructureError, match="`first` is for"):
            found.first()


@pytest.mark.parametrize("with_next", [True, False])
def test_slices_give_the_transitions_of_their_rows(played: str, with_next: bool) -> None:
    with rw.SliceDataset(played, "episodes", 8, 5, with_next=with_next) as dataset:
        found = next(dataset.transitions())
        check(found, 1, 0.99)
        assert len(found.mask) == len(found.batch.markers) - (not with_next)
        dataset.update_priorities(found.batch, np.ones(8))


def test_mixed_datasets_give_transitions_of_each(played: str) -> None:
    with rw.ReplayDataset(played, "windows", 6) as one, rw.ReplayDataset(played, "windows", 2) as other:
        mixed = rw.MixedDataset([one, other])
        found = next(mixed.transitions(n=2, gamma=0.9))
        check(found, 2, 0.9)
        assert found.batch.info.members.tolist() == [0] * 6 + [1] * 2
        mixed.update_priorities(found.batch, np.ones(8))


def test_numbers_out_of_range_are_refused_at_once(played: str) -> None:
    with rw.ReplayDataset(played, "windows", 6) as dataset:
        with pytest.raises(rw.errors.SpecError, match="`n` must be >= 1"):
            dataset.transitions(n=0)
        with pytest.raises(rw.errors.SpecError, match="`gamma`"):
            dataset.transitions(gamma=1.5)


def test_unpickled_view_opens_a_dataset_of_its_own(played: str) -> None:
    with (
        rw.ReplayDataset(played, "windows", 6) as dataset,
        pickle.loads(pickle.dumps(dataset.transitions(2, 0.5))) as view,  # noqa: S301  # our own bytes
    ):
        dataset.close()
        check(next(view), 2, 0.5)


def test_pytorch_gets_tensors(played: str) -> None:
    torch = pytest.importorskip("torch")
    with rw.ReplayDataset(played, "windows", 6) as dataset:
        tensors = dataset.transitions(n=3, gamma=0.5).as_torch("cpu")
        for found in (next(tensors), next(iter(tensors))):
            assert isinstance(found.reward, torch.Tensor)
            check(found, 3, 0.5)
            dataset.update_priorities(found.batch, torch.ones(6))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_get_transitions_of_slices(played: str, framework: str) -> None:
    pytest.importorskip(framework)
    with rw.SliceDataset(played, "episodes", 8, 5, with_next=True) as dataset:
        view = dataset.transitions(n=2, gamma=0.5)
        found = next(view.as_torch() if framework == "torch" else view.as_jax())
        assert type(found.mask).__module__.startswith(framework)
        at = np.asarray(found.observation["at"])[np.asarray(found.mask)]
        np.testing.assert_array_less(at, np.asarray(found.next_observation["at"])[np.asarray(found.mask)])
        assert len(found.mask) == len(found.batch.markers)


def test_tensorflow_gets_pairs(played: str) -> None:
    tensorflow()
    with rw.ReplayDataset(played, "windows", 6) as dataset:
        for fields, info in dataset.transitions(n=3, gamma=0.5).as_tf().take(2):
            assert info["keys"].shape == (6,)
            assert fields["reward"].shape == (6,)
            assert fields["observation"]["at"].shape == (6,)
