"""Batches, slices and transitions as each framework has them. Skipped where it is not installed."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from certificates import OPENSSL, make_identity, server_context
from forwarder import Forwarder
from kinds import contents
from numbered import insert_numbers
from reading import Serve
from server_process import StartServer

import reverb_writer as rw
from reverb_writer import rows

pytestmark = contents


WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


@pytest.fixture
def linear(serve: Serve) -> rw.Client:
    """A table of windows in which y is a linear function of x."""
    client = serve(rw.TableConfig("replay"))
    rng = np.random.default_rng(0)
    with rw.TrajectoryObserver(client, "replay", 5) as observer:
        for _ in range(100):
            x = rng.normal(size=3).astype(np.float32)
            observer({"x": x, "y": np.float32(x @ WEIGHTS), "name": "step"})
    return client


def in_workers(view: Any) -> Any:
    """Return batches of a view that another process samples."""
    loading = pytest.importorskip("torch.utils.data")
    return loading.DataLoader(view, batch_size=None, num_workers=1, multiprocessing_context="spawn", prefetch_factor=1)


def tensorflow() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        return pytest.importorskip("tensorflow")


@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
def test_batches_are_arrays_of_the_framework_and_hold_what_was_written(linear: rw.Client, framework: str) -> None:
    library = tensorflow() if framework == "tensorflow" else pytest.importorskip(framework)
    kind = library.Array if framework == "jax" else library.Tensor
    with rw.ReplayDataset(linear, "replay", 16) as dataset:
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
def test_a_view_goes_on_after_an_error(serve: Serve, framework: str) -> None:
    pytest.importorskip(framework)
    client = serve(rw.TableConfig("replay"))
    with rw.ReplayDataset(client, "replay", 1, timeout_s=0.5) as dataset:
        view = dataset.as_torch() if framework == "torch" else dataset.as_jax()
        with pytest.raises(rw.errors.ReplayTimeoutError):
            next(view)
        client.insert({"x": np.arange(3, dtype=np.int32)}, {"replay": 1.0})
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


def test_jax_says_which_leaves_lose_bits(serve: Serve) -> None:
    jax = pytest.importorskip("jax")
    client = serve(rw.TableConfig("replay"))
    leaves = {"a": np.zeros(2, np.float32), "wide": {"b": np.array([2**40, 1]), "c": np.zeros(2)}}
    client.insert(leaves, {"replay": 1.0})
    with rw.ReplayDataset(client, "replay", 2) as dataset:
        with pytest.warns(
            UserWarning, match="32 bits of the numbers of `wide/b` int64, `wide/c` float64.*jax_enable_x64"
        ):
            assert next(dataset.as_jax()).data["wide"]["b"].dtype == np.int32
        jax.config.update("jax_enable_x64", True)
        try:
            assert next(dataset.as_jax()).data["wide"]["b"].tolist() == [[2**40, 1]] * 2  # and there is no warning
        finally:
            jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("place", ["observation", "extras"])
def test_strings_stay_arrays_among_tensors_and_go_through_all_functions(serve: Serve, place: str) -> None:
    torch = pytest.importorskip("torch")
    client = serve(rw.TableConfig("windows"), rw.TableConfig("episodes"))
    with (
        rw.TrajectoryObserver(client, "windows", 4) as windows,
        rw.EpisodeObserver(client, "episodes", 50) as episodes,
    ):
        for t in range(8):
            step: dict[str, Any] = {"observation": {"x": np.float32(t)}, "action": np.float32(t), "extras": {}}
            step[place]["text"] = f"go to {t}"
            step |= {"reward": np.float32(t < 7), "is_first": t == 0, "is_last": t == 7, "terminated": t == 7}
            windows(step)
            episodes(step)

    def texts(found: Any) -> Any:
        return found.observation["text"] if place == "observation" else found.extras["text"]

    def expected(found: Any) -> list[bytes]:
        return [f"go to {int(x)}".encode() for x in found.observation["x"].ravel()]

    with rw.ReplayDataset(client, "windows", 16) as dataset, rw.SliceDataset(client, "episodes", 4, 3) as slices:
        batch = next(dataset.as_torch())
        found = rw.to_transitions(batch)
        assert texts(found).shape == (16, 3)
        assert texts(found).ravel().tolist() == expected(found)
        first = next(dataset.transitions(2, 0.9).as_torch())
        assert texts(first).shape == (16,)
        assert texts(first).tolist() == expected(first)
        warm, trained = rw.burn_in(batch, 1)
        assert (warm.data[place]["text"].shape, trained.data[place]["text"].shape) == ((16, 1), (16, 3))
        assert rw.returns.gae(batch, torch.zeros(16, 4), gamma=0.9, lambda_=0.9).advantages.shape == (16, 3)
        of_slices = rw.to_transitions(next(slices.as_torch()))
        assert texts(of_slices).tolist() == expected(of_slices)


def test_pytorch_without_cuda_says_so_at_once(linear: rw.Client) -> None:
    torch = pytest.importorskip("torch")
    with rw.ReplayDataset(linear, "replay", 2) as dataset:
        if torch.cuda.is_available():
            batch = next(iter(dataset.as_torch("cuda")))
            assert batch.data["x"].device.type == "cuda"
        else:
            with pytest.raises(rw.errors.SpecError, match="finds no CUDA device"):
                dataset.as_torch("cuda")


def test_pytorch_mask_info_and_weights_are_tensors_on_the_device(serve: Serve) -> None:
    torch = pytest.importorskip("torch")
    client = serve(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    client.insert([np.arange(2.0)], {"table": 1.0})
    client.insert([np.arange(3.0)], {"table": 3.0})
    with rw.ReplayDataset(client, "table", 16, collate="pad", max_in_flight_batches=1) as dataset:
        batch = next(iter(dataset.as_torch("cpu")))
        info = batch.info
        assert info.keys.dtype == torch.int64
        assert info.probabilities.dtype == info.priorities.dtype == torch.float32
        assert batch.mask.dtype == torch.bool
        lengths = info.lengths.tolist()
        # Two items of priorities 1 and 3: probabilities 1/4 and 3/4, weights 2 * 1/4 and 2 * 3/4 to the power of -1.
        expected = torch.tensor([2.0 if length == 2 else 2 / 3 for length in lengths])
        torch.testing.assert_close(info.importance_weights(1.0), expected / expected.max())
        assert batch.mask.sum(1).tolist() == lengths
        # A loss stays float32, and priorities may have gradients.
        errors = (batch.data[0].sum(1).float() * torch.ones(16, requires_grad=True)) * info.importance_weights(0.5)
        assert errors.dtype == torch.float32
        dataset.update_priorities(batch, errors * 0 + info.lengths)
        dataset.flush_priorities()
    found = {(len(sample.data[0]), sample.info.priority) for sample in client.sample("table", 64)}
    assert {pair for pair in found if pair[0] in set(lengths)} <= {(2, 2.0), (3, 3.0)}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_priorities_are_tensors_of_any_dtype_with_gradients(serve: Serve, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    client = serve(rw.TableConfig("table", 100, sampler=rw.Prioritized(1.0)))
    client.insert([np.arange(2.0)], {"table": 1.0})
    with rw.ReplayDataset(client, "table", 4, max_in_flight_batches=1) as dataset:
        batch = next(dataset)
        priorities = torch.full((4,), 2.5, dtype=getattr(torch, dtype), requires_grad=True) * 2
        for keys in (batch, batch.info, batch.info.keys, torch.from_numpy(batch.info.keys.view(np.int64))):
            dataset.update_priorities(keys, priorities)
        with pytest.raises(rw.errors.SpecError, match=r"has shape \(3,\), expected \(4,\)"):
            dataset.update_priorities(batch, priorities[:3])
        dataset.flush_priorities()
    assert next(client.sample("table", 1)).info.priority == 5.0


def test_pytorch_gets_mixed_batches_with_their_members_and_routes_priorities(serve: Serve) -> None:
    torch = pytest.importorskip("torch")
    names = ("online", "offline")
    client = serve(*(rw.TableConfig(name, 100, rw.Prioritized(1.0)) for name in names))
    for number, name in enumerate(names):
        client.insert([np.full(2, number)], {name: 1.0})
    datasets = [rw.ReplayDataset(client, name, size) for name, size in zip(names, (4, 2), strict=True)]
    with rw.MixedDataset(datasets) as dataset:
        batch = next(iter(dataset.as_torch("cpu")))
        assert batch.info.members.tolist() == [0, 0, 0, 0, 1, 1]
        assert batch.info.importance_weights(0.5).tolist() == [1.0] * 6
        dataset.update_priorities(batch, torch.arange(6.0, requires_grad=True))  # 3 and 5 are the last of each item
        dataset.flush_priorities()
    assert [next(client.sample(name, 1)).info.priority for name in names] == [3.0, 5.0]


def test_pytorch_workers_bring_the_transform_and_mixtures(linear: rw.Client) -> None:
    pytest.importorskip("torch")
    dataset = rw.ReplayDataset(linear.address, "replay", 4, transform=rw.frame_stack(2, "x"))
    with rw.MixedDataset([dataset]) as mixed:
        batch = next(iter(in_workers(mixed.as_torch())))
    assert batch.data["x"].shape == (4, 5, 2, 3)
    np.testing.assert_allclose(batch.data["x"].numpy()[:, :, 1] @ WEIGHTS, batch.data["y"].numpy(), atol=1e-5)


def test_transform_may_make_tensors_itself(linear: rw.Client) -> None:
    torch = pytest.importorskip("torch")

    def decode(batch: rw.Batch) -> rw.Batch:
        return dataclasses.replace(batch, data={**batch.data, "x": torch.from_numpy(batch.data["x"]).half()})

    with rw.ReplayDataset(linear, "replay", 4, transform=decode) as dataset:
        batch = next(iter(dataset.as_torch("cpu")))
    assert batch.data["x"].dtype == torch.float16


KINDS = ("kinds", "is_first", "is_last", "is_terminal", "mask")
SLICES = ("starts", "mask", "first_rows", "lengths", "trajectories", "cut_by_sampler", "probabilities", "next_rows")


@pytest.fixture
def sliced(serve: Serve) -> rw.Client:
    """Two queues of the same episodes: rows 0 and 1, 2 to 4, 5 to 8, the last of each terminated."""
    names = ["numpy", "other"]
    client = serve(*(rw.TableConfig(name, 100, sampler="fifo", max_times_sampled=1) for name in names))
    with rw.EpisodeObserver(client, names, 10) as observer:
        for row in range(9):
            kind = rows.LAST | rows.TERMINAL if row in (1, 4, 8) else rows.ACTION
            observer.write_row({"row": np.full(3, row, np.float32)}, kind | rows.FIRST * (row in (0, 2, 5)))
    return client


def open_slices(client: rw.Client, table: str, *, with_next: bool = False) -> rw.SliceDataset:
    options: Any = {"short": "pad", "seed": 0, "single_pass": True, "with_next": with_next}
    return rw.SliceDataset(client.address, table, 2, 3, **options)


def slices_in_numpy(client: rw.Client, *, with_next: bool) -> list[rw.Batch]:
    """Return the batches of one queue as NumPy has them."""
    with open_slices(client, "numpy", with_next=with_next) as dataset:
        expected = list(dataset)
    assert [len(batch.kinds) for batch in expected] == [6, 3]
    assert expected[0].kinds.tolist() == [3, 12, 16, 3, 2, 12]
    if with_next:  # rows 5 to 7 or 6 to 8 are drawn of the last episode, so row 8 is next either way
        assert [batch.next["row"].tolist() for batch in expected] == [[[1] * 3, [4] * 3], [[8] * 3]]
    return expected


@pytest.mark.parametrize("with_next", [False, True])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_slices_and_their_kinds(sliced: rw.Client, framework: str, with_next: bool) -> None:
    library = pytest.importorskip(framework)
    expected = slices_in_numpy(sliced, with_next=with_next)
    kind = library.Tensor if framework == "torch" else library.Array
    with open_slices(sliced, "other", with_next=with_next) as dataset:
        found = list(dataset.as_torch("cpu") if framework == "torch" else dataset.as_jax())
        dataset.update_priorities(found[0], np.ones(2))
    for mine, wanted in zip(found, expected, strict=True):
        pairs = [(mine.data["row"], wanted.data["row"])]
        pairs += [(getattr(mine, name), getattr(wanted, name)) for name in KINDS]
        pairs += [(getattr(mine.slices, name), getattr(wanted.slices, name)) for name in (*SLICES, "last_rows")]
        pairs += [(mine.next["row"], wanted.next["row"]), (mine.next_kinds, wanted.next_kinds)] if with_next else []
        for one, other in pairs:
            assert isinstance(one, kind)
            np.testing.assert_array_equal(np.asarray(one), other)
        assert isinstance(mine.info.keys, kind if framework == "torch" else np.ndarray)


@pytest.mark.parametrize("with_next", [False, True])
def test_tensorflow_gets_the_data_their_kinds_and_what_follows(sliced: rw.Client, with_next: bool) -> None:
    tf = tensorflow()
    expected = slices_in_numpy(sliced, with_next=with_next)
    with open_slices(sliced, "other", with_next=with_next) as dataset:
        batches = dataset.as_tf()
        spec, numbers_spec, *_ = batches.element_spec
        assert spec["row"] == tf.TensorSpec((None, 3), tf.float32)
        assert numbers_spec["kinds"] == tf.TensorSpec((None,), tf.uint8)
        assert numbers_spec["slices"]["starts"] == tf.TensorSpec((None,), tf.bool)
        found = list(batches)
    for (data, numbers, *after), wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(data["row"], wanted.data["row"])
        np.testing.assert_array_equal(numbers["kinds"], wanted.kinds)
        for name in SLICES:
            np.testing.assert_array_equal(numbers["slices"][name], getattr(wanted.slices, name))
        assert ("next_kinds" in numbers) == with_next
        np.testing.assert_array_equal(numbers["priorities"], wanted.info.priorities)
        assert len(after) == with_next
        for nest in after:
            np.testing.assert_array_equal(nest["row"], wanted.next["row"])


def test_tensorflow_iterates_again_over_the_items_of_each_beginning(serve: Serve) -> None:
    tensorflow()
    client = serve(rw.TableConfig.queue("queue", 100))
    with rw.ReplayDataset(client, "queue", 2, single_pass=True) as dataset:
        with pytest.raises(rw.errors.IncompleteError, match="learns the structure of the batches from the first one"):
            dataset.as_tf()
        insert_numbers(client.address, "queue", range(3))
        pairs = dataset.as_tf()
        passes = [[data[0].numpy()[:, 0].tolist() for data, _ in pairs]]
        for numbers in (range(3, 6), range(0), range(6, 7)):
            insert_numbers(client.address, "queue", numbers)
            passes.append([data[0].numpy()[:, 0].tolist() for data, _ in pairs])
    assert passes == [[[0, 1], [2]], [[3, 4], [5]], [], [[6]]]


def test_pytorch_data_loader_workers_sample_slices_by_themselves(sliced: rw.Client) -> None:
    pytest.importorskip("torch")
    with open_slices(sliced, "other") as dataset:
        view = dataset.as_torch()
        assert len(list(dataset)) == 2
    for row in range(4):
        data = {"row": np.full((3, 3), row, np.float32)}
        sliced.insert(data, {"other": 1.0})
    assert [batch.data["row"][:, 0].tolist() for batch in in_workers(view)] == [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]


# Transitions in one call, from windows, slices and mixed datasets.


NUM_STEPS = 12  # of an episode, boundary step included; rewards are 1


@pytest.fixture
def played(serve: Serve) -> rw.Client:
    """Four episodes, as windows of four steps and as whole ones. Observations are numbers, 100 for each episode."""
    tables = rw.TableConfig("windows", 1000, rw.Prioritized(1.0)), rw.TableConfig("uniform", 1000)
    client = serve(*tables, rw.TableConfig("episodes", 100))
    with (
        rw.TrajectoryObserver(client, ["windows", "uniform"], 4, end_of_episode="tile") as windows,
        rw.EpisodeObserver(client, "episodes", 100) as episodes,
    ):
        for number in range(4 * NUM_STEPS):
            episode, t = divmod(number, NUM_STEPS)
            last = t == NUM_STEPS - 1
            step = {
                "observation": {"at": np.float32(100 * episode + t)},
                "action": np.int32(t),
                "reward": np.float32(not last),
                "is_first": np.bool_(t == 0),
                "is_last": np.bool_(last),
                "is_terminal": np.bool_(last),
                "name": f"step {t}",
            }
            windows(step)
            episodes(step)
    return client


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


@pytest.mark.parametrize(("table", "n", "gamma"), [("uniform", 1, 0.99), ("windows", 3, 0.5)])
def test_windows_give_a_transition_each(played: rw.Client, table: str, n: int, gamma: float) -> None:
    with rw.ReplayDataset(played.address, table, 64) as dataset:
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
        again = view.poll(30.0)
        assert again is not None
        check(again, n, gamma)
        check(next(iter(view)), n, gamma)
        with pytest.raises(rw.errors.StructureError, match="overlap"):
            rw.returns.gae(found, np.ones((64, 4)), gamma=0.5, lambda_=0.5)
        with pytest.raises(rw.errors.StructureError, match="`first` is for"):
            found.first()
        with pytest.warns(UserWarning, match="windows of 4 rows give transitions over at most 3 steps, not 4"):
            next(dataset.transitions(n=4))
        with pytest.raises(rw.errors.SpecError, match="`n` must be >= 1"):
            dataset.transitions(n=0)
        with pytest.raises(rw.errors.SpecError, match="`gamma`"):
            dataset.transitions(gamma=1.5)
        with pickle.loads(pickle.dumps(view)) as copied:  # noqa: S301  # our own bytes
            dataset.close()
            check(next(copied), n, gamma)


@pytest.mark.parametrize("with_next", [True, False])
def test_slices_give_the_transitions_of_their_rows(played: rw.Client, with_next: bool) -> None:
    with rw.SliceDataset(played, "episodes", 8, 5, with_next=with_next) as dataset:
        found = next(dataset.transitions())
        check(found, 1, 0.99)
        assert len(found.mask) == len(found.batch.slices.rows) - (not with_next)
        dataset.update_priorities(found.batch, np.ones(8))


def test_mixed_datasets_give_transitions_of_each(played: rw.Client) -> None:
    with rw.ReplayDataset(played, "windows", 6) as one, rw.ReplayDataset(played, "windows", 2) as other:
        mixed = rw.MixedDataset([one, other])
        found = next(mixed.transitions(n=3, gamma=0.9))
        check(found, 3, 0.9)
        with pytest.raises(rw.errors.SpecError, match="a priority belongs to a window"):
            next(mixed.transitions(n=2))
        assert found.batch.info.members.tolist() == [0] * 6 + [1] * 2
        mixed.update_priorities(found.batch, np.ones(8))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_get_transitions_of_windows_and_slices(played: rw.Client, framework: str) -> None:
    pytest.importorskip(framework)
    with rw.ReplayDataset(played, "windows", 6) as dataset, rw.SliceDataset(played, "episodes", 8, 5) as slices:
        for each, n in ((dataset, 3), (slices, 1)):
            view = each.transitions(n=n, gamma=0.5)
            arrays = view.as_torch("cpu") if framework == "torch" else view.as_jax()
            for found in (next(arrays), next(iter(arrays))):
                assert type(found.mask).__module__.startswith(framework)
                check(found, n, 0.5)
                assert type(found.batch.info.keys).__module__.startswith("torch" if framework == "torch" else "numpy")
                arrays.update_priorities(found, np.ones(len(found.batch.info)))
                assert arrays.poll(30.0) is not None
            arrays.flush_priorities()
            assert arrays.stats().priority_updates == each.stats().priority_updates > 0
            assert arrays.stats().failed_priority_updates == 0


def test_tensorflow_gets_pairs(played: rw.Client) -> None:
    tensorflow()
    with rw.ReplayDataset(played, "windows", 6) as dataset:
        for fields, info in dataset.transitions(n=3, gamma=0.5).as_tf().take(2):
            assert info["keys"].shape == fields["reward"].shape == fields["observation"]["at"].shape == (6,)
