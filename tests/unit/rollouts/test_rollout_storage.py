"""Rollouts of fixed length, with and without a mask: golden values worked by hand, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rollouts import add, arrays_of, plain

import reverb_writer as rw
from reverb_writer.errors import IncompleteError, MissingExtraError, SpecError, StructureError
from reverb_writer.rollouts import RolloutStorage, unpad_trajectories

ONES, HALVES = np.ones((3, 1), np.float32), np.full((3, 1), 0.5, np.float32)
ENDS = np.array([[0], [1], [0]])


def storage_of_three(device: Any = None, **columns: Any) -> tuple[RolloutStorage, Any]:
    """Return an example worked by hand: T = 3, rewards 1, values 0.5, the end of an episode at row 1."""
    make = arrays_of(device)
    storage = RolloutStorage(1, 3, (1,), None, (1,), device=device)
    add(storage, make, **{"rewards": ONES, "values": HALVES, "dones": ENDS, **columns})
    return storage, make


def test_columns_have_the_shapes_of_the_seed(device: Any) -> None:
    storage = RolloutStorage(4, 3, (5,), (6,), (2,), num_rewards=7, device=device)
    shapes = {name: tuple(getattr(storage, name).shape) for name in ("observations", "critic_observations", "mu")}
    assert shapes == {"observations": (3, 4, 5), "critic_observations": (3, 4, 6), "mu": (3, 4, 2)}
    assert all(tuple(getattr(storage, name).shape) == (3, 4, 7) for name in ("rewards", "values", "returns"))
    assert tuple(storage.actions_log_prob.shape) == tuple(storage.dones.shape) == (3, 4, 1)
    assert "uint8" in str(storage.dones.dtype)
    assert storage.saved_hidden_states is None
    assert RolloutStorage(4, 3, (5,), (None,), (2,)).critic_observations is None


def test_returns_stop_where_an_episode_terminates(device: Any) -> None:
    storage, make = storage_of_three(device)
    storage.compute_returns(make([[2.0]]), 0.9, 0.8)
    assert plain(storage.returns[:, 0, 0]) == [1.81, 1.0, 2.8]
    np.testing.assert_allclose(np.asarray(storage.advantages).ravel(), [-0.06656, -0.96506, 1.03162], atol=1e-5)
    storage.compute_returns(make([2.0]), 0.9, 0.8, normalize_advantages=False)
    assert plain(storage.advantages[:, 0, 0]) == [1.31, 0.5, 2.3]


def test_approximation_at_time_outs_is_that_of_the_seed(device: Any) -> None:
    storage, make = storage_of_three(device, truncated=ENDS)
    with pytest.raises(SpecError, match=r"1 values of final observations are not known"):
        storage.compute_returns(make([[2.0]]), 0.9, 0.8)
    storage.compute_returns(make([[2.0]]), 0.9, 0.8, approximate_time_outs=True)
    assert plain(storage.returns[:, 0, 0]) == [2.134, 1.45, 2.8]
    np.testing.assert_allclose(np.asarray(storage.advantages).ravel(), [0.00889, -1.00441, 0.99553], atol=1e-5)


def test_several_rewards_have_returns_of_their_own(device: Any, make: Any) -> None:
    storage = RolloutStorage(2, 2, (1,), None, (1,), num_rewards=2, device=device)
    # Undiscounted, values 0: returns are sums of rewards. Environment 1 ends after row 0.
    rewards = np.array([[[1, 10], [2, 20]], [[3, 30], [4, 40]]], np.float32)
    add(storage, make, rewards=rewards, values=rewards * 0, dones=[[0, 1], [0, 0]])
    storage.compute_returns(make(np.zeros((2, 2), np.float32)), 1.0, 1.0)
    assert plain(storage.returns) == [[[4, 40], [2, 20]], [[3, 30], [4, 40]]]


def test_statistics_are_of_trajectories_cut_off_by_the_end_too_and_change_nothing(device: Any, make: Any) -> None:
    storage = RolloutStorage(2, 4, (1,), None, (1,), device=device)
    dones = np.array([[0, 0], [1, 0], [0, 0], [0, 0]])
    add(storage, make, dones=dones, rewards=np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32))
    assert storage.get_statistics() == pytest.approx(((2 + 2 + 4) / 3, 4.5))
    assert plain(storage.dones[..., 0]) == dones.tolist()


def test_epochs_differ_and_those_of_one_seed_are_the_same_again() -> None:
    def drawn(seed: int) -> list[Any]:
        storage = RolloutStorage(8, 4, (1,), None, (1,), seed=seed)
        add(storage, observations=np.arange(32, dtype=np.float32).reshape(4, 8))
        return [plain(batch.obs) for batch in storage.mini_batch_generator(2, 2)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1)[:2] != drawn(1)[2:]


def test_observations_and_actions_may_be_nests_with_dtypes(device: Any, make: Any) -> None:
    shapes = {"image": np.zeros((2, 2), np.uint8), "speed": (3,)}
    storage = RolloutStorage(1, 2, shapes, {"height": 4}, np.zeros((), np.int64), device=device, seed=0)
    for t in range(2):
        observations = {"image": make(np.full((1, 2, 2), 200 + t, np.uint8)), "speed": make(np.full((1, 3), t))}
        storage.add_transitions(
            storage.Transition(
                observations=observations,
                critic_observations={"height": make(np.full((1, 4), -t))},
                actions=make([t]),
                rewards=make([0.0]),
                dones=make([False]),
            )
        )
    (batch,) = storage.mini_batch_generator(1, 1)
    assert {name: tuple(leaf.shape) for name, leaf in batch.obs.items()} == {"image": (2, 2, 2), "speed": (2, 3)}
    assert ("uint8" in str(batch.obs["image"].dtype), "int64" in str(batch.actions.dtype)) == (True, True)
    numbers = plain(batch.actions)
    assert plain(batch.obs["image"][:, 0, 0]) == [200 + t for t in numbers]
    assert plain(batch.critic_obs["height"][:, 0]) == [-t for t in numbers]


def test_what_transitions_do_not_bring_is_none_and_not_old() -> None:
    storage, _ = storage_of_three()
    storage.compute_returns([2.0], 0.9, 0.8)
    storage.clear()
    add(storage, rewards=ONES)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert (batch.values, batch.advantages, batch.returns, batch.old_mu) == (None, None, None, None)
    with pytest.raises(IncompleteError, match="have no values"):
        storage.compute_returns([2.0], 0.9, 0.8)


def test_a_shorter_rollout_is_taken_as_far_as_it_goes() -> None:
    storage = RolloutStorage(1, 9, (1,), None, (1,))
    add(storage, rewards=ONES, values=HALVES, dones=ENDS)
    storage.compute_returns([2.0], 0.9, 0.8)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert sorted(plain(batch.returns[:, 0])) == [1.0, 1.81, 2.8]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("observations", np.zeros((3, 1)), r"`observations`: float64 \(3, 1\), expected float32 \(2, 1\)"),
        ("observations", {"a": np.zeros((2, 1))}, r"`observations`: .* an array without a nest; unexpected: `a`"),
        ("rewards", np.zeros(3), r"`rewards`: float64 \(3,\), expected float32 \(2, 1\)"),
        ("actions", np.zeros((2, 1)), r"`actions`: float64 \(2, 1\), expected int64 \(2, 1\)"),
        ("dones", None, r"a transition needs .*; this one lacks dones"),
        ("values", None, r"all transitions of a rollout must have the same fields: some rows have values"),
        ("hidden_states", np.zeros((1, 3, 5)), r"`hidden_states` must be \[layers, 2, ...\], got \(1, 3, 5\)"),
    ],
)
def test_a_transition_that_does_not_fit_is_refused_and_changes_nothing(field: str, value: Any, message: str) -> None:
    storage = RolloutStorage(2, 3, (1,), None, np.zeros(1, np.int64))
    good = {"observations": np.ones((2, 1)), "actions": np.ones((2, 1), int), "dones": [0, 0]}
    good |= dict.fromkeys(("rewards", "values"), np.ones(2))
    storage.add_transitions(storage.Transition(**good))
    with pytest.raises(StructureError, match=message):
        storage.add_transitions(storage.Transition(**{**good, field: value}))
    assert storage.step == 1
    assert not storage.observations[1].any()
    storage.add_transitions(storage.Transition(**good))
    assert storage.get_statistics() == (2.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 0}, "`num_envs` must be >= 1, got 0."),
        ({"num_rewards": 1.5}, "`num_rewards` must be an integer"),
        ({"obs_shape": 1.5}, "`obs_shape` must be a shape, such as"),
        ({"obs_shape": {"a": "b"}}, "`obs_shape/a` must be a shape"),
    ],
)
def test_arguments_that_can_never_work_are_named(arguments: dict[str, Any], message: str) -> None:
    good = {"num_envs": 1, "num_transitions_per_env": 1, "obs_shape": 1, "critic_obs_shape": None, "actions_shape": 1}
    with pytest.raises(SpecError, match=message):
        RolloutStorage(**{**good, **arguments})


def test_device_that_pytorch_does_not_know_or_pytorch_that_is_missing_is_named() -> None:
    with pytest.raises((SpecError, MissingExtraError), match=r"`device`.*('nowhere'|reverb-writer\[torch\])"):
        RolloutStorage(1, 1, 1, None, 1, device="nowhere")


def test_what_needs_rows_says_so_at_once() -> None:
    storage = RolloutStorage(2, 3, (1,), None, (1,))
    for call in (
        lambda: storage.compute_returns([0.0, 0.0], 0.9, 0.8),
        lambda: storage.mini_batch_generator(1),
        lambda: storage.recurrent_mini_batch_generator(1),
        storage.get_statistics,
    ):
        with pytest.raises(IncompleteError, match="the storage has no rows yet"):
            call()
    add(storage, rewards=ONES[:1] * [1, 1])
    with pytest.raises(SpecError, match=r"`num_mini_batches` must be <= 2, got 3."):
        storage.mini_batch_generator(3)
    with pytest.raises(SpecError, match=r"`num_epochs` must be >= 0, got -1."):
        storage.recurrent_mini_batch_generator(1, -1)


def test_gradients_do_not_get_into_the_storage() -> None:
    make = arrays_of("cpu")
    storage = RolloutStorage(1, 1, (1,), None, (1,), device="cpu")
    transition = storage.Transition(make([[1.0]]), None, make([[1.0]]), make([1.0]), make([False]))
    transition.values = make([[0.5]]).requires_grad_()
    storage.add_transitions(transition)
    assert not storage.values.requires_grad


def test_returns_of_a_lone_element_are_there(device: Any, make: Any) -> None:
    storage = RolloutStorage(1, 1, (1,), None, (1,), device=device)
    add(storage, make, rewards=np.ones((1, 1), np.float32), values=np.full((1, 1), 3, np.float32))
    storage.compute_returns(make([4.0]), 0.5, 1.0)
    assert (plain(storage.returns), plain(storage.advantages)) == ([[[3.0]]], [[[0.0]]])


def test_what_pytorch_has_no_arrays_of_is_refused_by_name() -> None:
    arrays_of("cpu")
    with pytest.raises(SpecError, match=r"PyTorch has no arrays of object. Pass `device=None`"):
        RolloutStorage(1, 1, np.zeros(1, object), None, (1,), device="cpu")
    storage = RolloutStorage(1, 1, (1,), None, (1,), device="cpu")
    with pytest.raises(StructureError, match="PyTorch has no such arrays; `device=None` makes NumPy ones"):
        add(storage, observations=np.full((1, 1, 1), b"go", object))
    assert storage.num_rows == 0


def test_bfloat16_stays_what_it_is(device: Any) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    storage = RolloutStorage(1, 1, np.zeros(1, bfloat16), None, (1,), device=device)
    nothing = np.zeros((1, 1), np.float32)
    storage.add_transitions(storage.Transition(np.full((1, 1), 1.5, bfloat16), None, nothing, nothing, nothing))
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert (str(batch.obs.dtype).removeprefix("torch."), batch.obs.tolist()) == ("bfloat16", [[[1.5]]])


def test_padding_of_strings_is_empty_strings() -> None:
    storage = RolloutStorage(1, 2, np.zeros(1, object), None, (1,))
    names = np.array([b"go", b"stop"], object)[:, None, None]
    nothing = np.zeros((1, 1), np.float32)
    for name, done in zip(names, (1, 0), strict=True):
        storage.add_transitions(storage.Transition(name, None, nothing, nothing, nothing + done))
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert batch.obs[..., 0].tolist() == [[b"go", b"stop"], [b"", b""]]


# A mask: rows that are no training data.


@pytest.fixture
def storage(device: Any) -> RolloutStorage:
    """Two environments, five rows.

    Environment 0: the action of row 1 terminates its episode, and row 2 only resets it. Environment 1: row 3 is the
    boundary step of an episode that was truncated, and row 4 padding.
    """
    made = RolloutStorage(2, 5, 1, None, 1, device=device, seed=0)
    for t in range(5):
        transition = made.Transition(
            observations=np.array([[t], [10 + t]], np.float32),
            actions=np.zeros((2, 1), np.float32),
            rewards=np.array([t + 1.0, 100.0]),
            dones=np.array([t == 1, False]),
            values=np.array([10.0 * t, 2.0]),
            mask=np.array([t != 2, t < 3]),
        )
        made.add_transitions(transition)
    return made


def numbers(array: Any) -> list[Any]:
    found: list[Any] = np.asarray(array)[..., 0].T.tolist()
    return found


def test_advantages_neither_use_masked_rows_nor_have_them(storage: RolloutStorage) -> None:
    storage.compute_returns(np.array([50.0, 7.0]), gamma=0.5, lambda_=1.0, normalize_advantages=False)
    first, second = numbers(storage.returns)
    # Row 1 terminates: 2. Row 0: 1 + 0.5 * 2. Row 4: 5 + 0.5 * 50, and row 3: 4 + 0.5 * 30.
    assert [first[t] for t in (0, 1, 3, 4)] == [2.0, 2.0, 19.0, 30.0]
    # Row 2 is followed by the value of the boundary step, 2: 100 + 0.5 * 2 = 101, then 100 + 101 / 2, and so on.
    assert second[:3] == [175.25, 150.5, 101.0]
    storage.compute_returns(np.array([50.0, 7.0]), gamma=0.5, lambda_=1.0)
    advantages = np.asarray(storage.advantages)[..., 0]
    real = np.array([[1, 1], [1, 1], [0, 1], [1, 0], [1, 0]], bool)
    assert (advantages[~real] == 0).all()
    np.testing.assert_allclose([advantages[real].mean(), advantages[real].std(ddof=1)], [0, 1], atol=1e-6)


def test_minibatches_of_rows_have_real_rows_only(storage: RolloutStorage) -> None:
    seen = np.concatenate([np.asarray(batch.obs)[:, 0] for batch in storage.mini_batch_generator(3, num_epochs=1)])
    assert sorted(seen.tolist()) == [0, 1, 3, 4, 10, 11, 12]
    assert all(batch.is_real is None for batch in storage.mini_batch_generator(1, num_epochs=1))
    with pytest.raises(rw.errors.SpecError, match="`num_mini_batches` must be <= 7"):
        storage.mini_batch_generator(8)


def test_minibatches_of_environments_bring_the_mask(storage: RolloutStorage) -> None:
    (batch,) = storage.recurrent_mini_batch_generator(1, num_epochs=1)
    assert numbers(batch.is_real) == [[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]
    is_real = np.asarray(batch.is_real)[..., 0] != 0
    observations = np.asarray(unpad_trajectories(batch.obs, batch.masks))[..., 0]
    assert sorted(observations[is_real].tolist()) == [0, 1, 3, 4, 10, 11, 12]
    # The row after a reset begins a trajectory.
    assert {0.0, 3.0, 10.0} <= set(np.asarray(batch.obs)[0, :, 0].tolist())


def test_statistics_are_of_real_rows(storage: RolloutStorage) -> None:
    """Trajectories of 2 and 2 rows, and of 3: 7 rows in 3; rewards 1, 2, 4, 5 and three times 100."""
    assert storage.get_statistics() == pytest.approx((7 / 3, 312 / 7))
