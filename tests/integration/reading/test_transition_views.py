"""`dataset.transitions()`: transitions in one call, from windows, slices and mixed datasets, for each framework."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from kinds import contents
from server_process import StartServer

import reverb_writer as rw

pytestmark = contents


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
def address(replay_server: StartServer) -> str:
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
def test_windows_give_their_first_transitions(address: str, n: int, gamma: float) -> None:
    with rw.ReplayDataset(address, "windows", 64) as dataset:
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
            rw.returns.gae(found, np.ones((64, 4)), gamma=0.5, lam=0.5)
        with pytest.raises(rw.errors.StructureError, match="`first` is for"):
            found.first()


@pytest.mark.parametrize("with_next", [True, False])
def test_slices_give_the_transitions_of_their_rows(address: str, with_next: bool) -> None:
    with rw.SliceDataset(address, "episodes", 8, 5, with_next=with_next) as dataset:
        found = next(dataset.transitions())
        check(found, 1, 0.99)
        assert len(found.mask) == len(found.batch.markers) - (not with_next)
        dataset.update_priorities(found.batch, np.ones(8))


def test_mixed_datasets_give_transitions_of_each(address: str) -> None:
    with rw.ReplayDataset(address, "windows", 6) as one, rw.ReplayDataset(address, "windows", 2) as other:
        mixed = rw.MixedDataset([one, other])
        found = next(mixed.transitions(n=2, gamma=0.9))
        check(found, 2, 0.9)
        assert found.batch.info.members.tolist() == [0] * 6 + [1] * 2
        mixed.update_priorities(found.batch, np.ones(8))


def test_numbers_out_of_range_are_refused_at_once(address: str) -> None:
    with rw.ReplayDataset(address, "windows", 6) as dataset:
        with pytest.raises(rw.errors.SpecError, match="`n` must be >= 1"):
            dataset.transitions(n=0)
        with pytest.raises(rw.errors.SpecError, match="`gamma`"):
            dataset.transitions(gamma=1.5)


def test_unpickled_view_opens_a_dataset_of_its_own(address: str) -> None:
    with (
        rw.ReplayDataset(address, "windows", 6) as dataset,
        pickle.loads(pickle.dumps(dataset.transitions(2, 0.5))) as view,  # noqa: S301  # our own bytes
    ):
        dataset.close()
        check(next(view), 2, 0.5)


def test_pytorch_gets_tensors(address: str) -> None:
    torch = pytest.importorskip("torch")
    with rw.ReplayDataset(address, "windows", 6) as dataset:
        tensors = dataset.transitions(n=3, gamma=0.5).as_torch("cpu")
        for found in (next(tensors), next(iter(tensors))):
            assert isinstance(found.reward, torch.Tensor)
            check(found, 3, 0.5)
            dataset.update_priorities(found.batch, torch.ones(6))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_frameworks_get_transitions_of_slices(address: str, framework: str) -> None:
    pytest.importorskip(framework)
    with rw.SliceDataset(address, "episodes", 8, 5, with_next=True) as dataset:
        view = dataset.transitions(n=2, gamma=0.5)
        found = next(view.as_torch() if framework == "torch" else view.as_jax())
        assert type(found.mask).__module__.startswith(framework)
        at = np.asarray(found.observation["at"])[np.asarray(found.mask)]
        np.testing.assert_array_less(at, np.asarray(found.next_observation["at"])[np.asarray(found.mask)])
        assert len(found.mask) == len(found.batch.markers)


def test_tensorflow_gets_pairs(address: str) -> None:
    pytest.importorskip("tensorflow")
    with rw.ReplayDataset(address, "windows", 6) as dataset:
        for fields, info in dataset.transitions(n=3, gamma=0.5).as_tf().take(2):
            assert info["keys"].shape == (6,)
            assert fields["reward"].shape == (6,)
            assert fields["observation"]["at"].shape == (6,)
