"""Labels, next observations, the ring of states, recurrent minibatches and queues: examples worked by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollouts import add, arrays_of, plain

from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.rollouts import (
    ActionLabelRollout,
    QueueRolloutStorage,
    RolloutStorage,
    SarsaRolloutStorage,
    split_and_pad_trajectories,
    unpad_trajectories,
)
from reverb_writer.rollouts.replay_buffer import ReplayBuffer
from reverb_writer.slices.batch import Batch

COUNT = np.arange(3, dtype=np.float32).reshape(3, 1, 1)


def test_labels_go_with_their_rows_and_are_the_last_field(device: Any, make: Any) -> None:
    storage = ActionLabelRollout(1, 2, (1,), None, (1,), device=device, buffer_dilation_ratio=1.5)
    for number in (0, 2):
        storage.clear()
        numbers = np.arange(number, number + 2, dtype=np.float32).reshape(2, 1, 1)
        add(storage, make, observations=numbers, action_labels=numbers * 10)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert storage.MiniBatch._fields[-1] == "action_labels"
    assert sorted(plain(batch.obs[:, 0])) == [1, 2, 3]
    assert plain(batch.action_labels) == plain(batch.obs * 10)
    (recurrent,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(recurrent.action_labels[:, 0, 0]) == [10, 20, 30]
    with pytest.raises(StructureError, match="this one lacks action_labels"):
        add(storage, make, observations=COUNT)


def test_what_finds_no_room_is_not_written_and_no_batch_is_taken_for_it() -> None:
    with pytest.raises(SpecError, match=r"`buffer_dilation_ratio` must be >= 1, got 0.5"):
        ActionLabelRollout(1, 2, (1,), None, (1,), buffer_dilation_ratio=0.5)
    storage = ActionLabelRollout(1, 2, (1,), None, (1,), buffer_dilation_ratio=2.0)
    add(storage, action_labels=COUNT[:2] + 1)
    with pytest.raises(SpecError, match="the storage is full: 2 rows of 2"):
        add(storage, action_labels=COUNT[:1] + 9)  # a queue grows at its `clear`
    assert plain(storage.action_labels[:, 0, 0]) == [1, 2]
    taken = iter([None])
    with pytest.raises(SpecError, match="the storage is full: 2 rows of 2, expected room for 2 more"):
        storage.fill_from(taken)
    assert next(taken, "gone") is None


@pytest.mark.parametrize(("final", "expected"), [(None, [1, 1, 3]), (COUNT * 0 + 9, [1, 9, 3])])
def test_what_follows_the_end_of_an_episode_is_of_that_episode(
    device: Any, make: Any, final: Any, expected: list[float]
) -> None:
    # Row 2 is the first one after the reset: the next observation of row 1 is never that.
    storage = SarsaRolloutStorage(1, 3, (1,), (1,), (1,), device=device)
    dones = np.array([[0], [1], [0]])
    finals = {} if final is None else {"final_observations": final, "final_critic_observations": -final}
    critic = {"critic_observations": -COUNT, "next_critic_observations": -COUNT - 1}
    add(storage, make, observations=COUNT, next_observations=COUNT + 1, dones=dones, **critic, **finals)
    (batch,) = storage.mini_batch_generator(1, 1)
    rows = np.argsort(np.asarray(batch.obs[:, 0]))
    assert plain(batch.next_obs[rows, 0]) == expected
    assert plain(batch.next_critic_obs[rows, 0]) == [-x for x in expected]
    (padded,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(padded.next_obs[..., 0].T) == [[*expected[:2], 0], [3, 0, 0]]


def test_the_newest_row_needs_its_next_observation() -> None:
    storage = SarsaRolloutStorage(1, 3, (1,), None, (1,))
    add(storage, observations=COUNT[:2])
    with pytest.raises(IncompleteError, match="the newest transition needs `next_observations`"):
        storage.mini_batch_generator(1)
    add(storage, observations=COUNT[2:], next_observations=COUNT[2:] + 1)
    (batch,) = storage.mini_batch_generator(1, 1)
    assert sorted(plain(batch.next_obs[:, 0])) == [1, 2, 3]
    storage = SarsaRolloutStorage(1, 1, (1,), (1,), (1,))
    add(storage, observations=COUNT[:1], critic_observations=COUNT[:1], next_observations=COUNT[:1] + 1)
    with pytest.raises(IncompleteError, match="the newest transition needs `next_observations`"):  # the critic's
        storage.mini_batch_generator(1)


def test_a_newest_row_needs_no_next_observation_only_where_all_episodes_end(device: Any, make: Any) -> None:
    storage = SarsaRolloutStorage(2, 1, (1,), None, (1,), device=device)
    finals = np.array([[[7.0], [8.0]]], np.float32)
    add(storage, make, observations=finals * 0, dones=np.ones((1, 2)), final_observations=finals)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(batch.next_obs) == plain(finals)
    assert batch.next_critic_obs is batch.next_obs
    assert storage.MiniBatch._fields[-2:] == ("next_obs", "next_critic_obs")
    storage.clear()
    add(storage, make, observations=finals * 0, dones=np.array([[1, 0]]), final_observations=finals)
    with pytest.raises(IncompleteError, match="the newest transition needs `next_observations`"):
        storage.mini_batch_generator(1)


def test_new_states_take_the_place_of_the_oldest(device: Any, make: Any) -> None:
    buffer = ReplayBuffer(1, 5, device)
    stop = 0
    for count, expected in (
        (3, [0, 1, 2, 0, 0]),
        (3, [5, 1, 2, 3, 4]),
        (4, [5, 6, 7, 8, 9]),
        (6, [15, 11, 12, 13, 14]),  # instinct_rl's buffer refuses as many
        (12, [25, 26, 27, 23, 24]),
    ):
        states = make(np.arange(stop, stop := stop + count, dtype=np.float32)[:, None])
        buffer.insert(states, states + 0.5)
        assert (plain(buffer.states[:, 0]), buffer.step, buffer.num_samples) == (expected, stop % 5, min(stop, 5))
    assert plain(buffer.next_states - buffer.states) == [[0.5]] * 5


def test_states_are_sampled_with_what_followed_them_and_only_such_as_there_are(device: Any, make: Any) -> None:
    buffer = ReplayBuffer({"a": (2,), "b": ()}, 100, device, seed=0)
    states = {"a": make(np.arange(6.0).reshape(3, 2) + 1), "b": make(np.array([7.0, 8, 9]))}
    buffer.insert(states, {name: -leaf for name, leaf in states.items()})
    drawn = [*buffer.feed_forward_generator(5, 40)]
    assert [tuple(now["a"].shape) for now, _ in drawn] == [(40, 2)] * 5
    for now, following in drawn:
        assert plain(following["a"]) == plain(-now["a"])
        assert {*plain(now["b"])} == {7.0, 8.0, 9.0}


def test_what_a_ring_cannot_do_is_refused_before_anything_changes() -> None:
    buffer = ReplayBuffer(2, 4)
    with pytest.raises(IncompleteError, match="the buffer is empty"):
        buffer.feed_forward_generator(1, 1)
    for states, next_states in ((np.ones((3, 2)), np.ones((2, 2))), (np.ones((3, 1)), np.ones((3, 2))), (1.0, 1.0)):
        with pytest.raises(StructureError):
            buffer.insert(states, next_states)
    assert (buffer.num_samples, buffer.states.any()) == (0, False)
    with pytest.raises(SpecError, match=r"`buffer_size` must be >= 1, got 0."):
        ReplayBuffer(2, 0)


T, F = True, False


def test_gradients_go_through_padding_and_back() -> None:
    make = arrays_of("cpu")
    rows = make(np.arange(6.0).reshape(3, 2)).requires_grad_()
    padded, masks = split_and_pad_trajectories(rows, make(np.array([[0, 1], [0, 0], [0, 0]])))
    (unpad_trajectories(padded, masks) ** 2).sum().backward()
    assert plain(rows.grad) == plain(2 * rows.detach())


def test_rows_that_are_not_those_of_dones_are_refused() -> None:
    with pytest.raises(StructureError, match=r"shape \(2, 1\), expected rows \(3, 1\), as `dones`"):
        split_and_pad_trajectories(np.zeros((2, 1)), np.zeros((3, 1)))
    with pytest.raises(StructureError, match=r"with a multiple of T real rows, .* \(2, 2\) with 3 real rows"):
        unpad_trajectories(np.zeros((2, 2)), [[T, T], [T, F]])


def recurrent_storage(device: Any, num_envs: int = 2, layers: int = 2) -> tuple[RolloutStorage, Any]:
    """Return the example of A.4: actions are 10 b + t, observations 1 more, the states of layer l 100 (l + 1) more."""
    make = arrays_of(device)
    storage = RolloutStorage(num_envs, 4, (1,), None, (1,), device=device, seed=0)
    numbers = np.arange(4, dtype=np.float32)[:, None] + 10 * np.arange(num_envs, dtype=np.float32)
    dones = np.zeros((4, num_envs), bool)
    dones[1, 0] = dones[3, 1] = True
    states = numbers[:, None, :, None] + 100 * np.arange(1, layers + 1, dtype=np.float32)[:, None, None]
    add(storage, make, observations=numbers + 1, actions=numbers, dones=dones, hidden_states=states)
    return storage, make


def test_recurrent_minibatches_are_those_of_the_seed(device: Any) -> None:
    storage, _ = recurrent_storage(device)
    first, second = storage.recurrent_mini_batch_generator(2, 1)
    assert plain(first.obs[..., 0].T) == [[1, 2, 0, 0], [3, 4, 0, 0]]
    assert plain(first.masks.T) == [[T, T, F, F], [T, T, F, F]]
    assert first.is_real is None
    assert plain(first.hidden_states[..., 0]) == [[100, 102], [200, 202]]
    assert plain(first.actions[:, :, 0].T) == [[0, 1, 2, 3]]
    assert plain(second.obs[..., 0].T) == [[11, 12, 13, 14]]
    assert plain(second.masks.T) == [[T, T, T, T]]
    assert plain(second.hidden_states[..., 0]) == [[110], [210]]
    assert tuple(second.actions.shape) == (4, 1, 1)
    assert plain(unpad_trajectories(first.obs, first.masks)[..., 0].T) == [[1, 2, 3, 4]]


def test_each_environment_is_in_each_epoch_once_and_in_another_order_if_shuffled(device: Any) -> None:
    storage, _ = recurrent_storage(device, num_envs=5)
    batches = [*storage.recurrent_mini_batch_generator(2, 6, shuffle=True)]
    assert [batch.actions.shape[1] for batch in batches] == [3, 2] * 6
    order = [[x for batch in batches[i : i + 2] for x in plain(batch.actions[0, :, 0])] for i in range(0, 12, 2)]
    assert [sorted(epoch) for epoch in order] == [[0, 10, 20, 30, 40]] * 6
    assert len({tuple(epoch) for epoch in order}) > 1


def test_a_network_without_memory_beside_one_that_has_it_stays_none(device: Any, make: Any) -> None:
    storage = QueueRolloutStorage(3, 2, (1,), None, (1,), device=device, buffer_dilation_ratio=2)
    states = np.arange(24, dtype=np.float32).reshape(4, 1, 3, 2)  # [T, layers, B, H]
    zeros = make(np.zeros((3, 1), np.float32))
    for t, state in enumerate(states):
        if t == 2:
            storage.clear()  # grows
        storage.add_transitions(storage.Transition(zeros, None, zeros, zeros, zeros, hidden_states=(make(state), None)))
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    actor, critic = batch.hidden_states
    assert (plain(actor), critic) == (plain(states[0]), None)
    both = (make(states[0]), make(states[0]))
    with pytest.raises(StructureError, match=r"`hidden_states` are .*, expected .*, as in earlier steps"):
        storage.add_transitions(storage.Transition(zeros, None, zeros, zeros, zeros, hidden_states=both))
    none = storage.Transition(zeros, None, zeros, zeros, zeros, hidden_states=(None, None))
    storage.add_transitions(none)
    assert plain(storage.saved_hidden_states[0][0]) == plain(np.moveaxis(states[0], 0, 1) * 0)  # [B, layers, H]


def test_hidden_states_are_nests_and_zero_where_a_step_has_none(device: Any, make: Any) -> None:
    storage = RolloutStorage(1, 3, (1,), None, (1,), device=device)
    lstm = (make(np.full((2, 1, 3), 7.0)), make(np.full((2, 1, 3), 8.0)))
    for states, done in ((None, True), (lstm, True), ((None, None), False)):
        row = make([[0.0]]), None, make([[0.0]]), make([0.0]), make([done])
        storage.add_transitions(storage.Transition(*row, hidden_states=states))
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert [tuple(leaf.shape) for leaf in batch.hidden_states] == [(2, 3, 3), (2, 3, 3)]
    assert [plain(leaf[0, :, 0]) for leaf in batch.hidden_states] == [[0, 7, 0], [0, 8, 0]]
    storage.clear()
    storage.add_transitions(storage.Transition(make([[0.0]]), None, make([[0.0]]), make([0.0]), make([0])))
    assert plain(storage.saved_hidden_states[0][0, 0, 0]) == [0, 0, 0]
    gru = storage.Transition(make([[0.0]]), None, make([[0.0]]), make([0.0]), make([0]), hidden_states=lstm[0])
    with pytest.raises(StructureError, match=r"`hidden_states` are .*, expected .*, as in earlier steps"):
        storage.add_transitions(gru)


def test_a_recurrent_network_of_pytorch_takes_them_as_they_are() -> None:
    storage, _ = recurrent_storage("cpu", num_envs=3, layers=1)
    torch = pytest.importorskip("torch")
    network = torch.nn.GRU(1, 1)
    for batch in storage.recurrent_mini_batch_generator(2, 1):
        outputs, _ = network(batch.obs, batch.hidden_states)
        assert unpad_trajectories(outputs, batch.masks).shape == batch.actions.shape


# Queues: trajectories, windows and cuts in the order of time. docs/how-to/on-policy.md has where rows go.


def queue_of_six(device: Any, **columns: Any) -> tuple[QueueRolloutStorage, Any]:
    """Return a queue of 6 rows that has seen 8, by rollouts of 4: in it are rows 2 to 7, the newest at row 1."""
    make = arrays_of(device)
    num_rewards = columns["rewards"].shape[-1]
    storage = QueueRolloutStorage(2, 4, (1,), None, (1,), num_rewards, device, buffer_dilation_ratio=1.5)
    for part in (slice(0, 4), slice(4, 8)):
        storage.clear()
        add(storage, make, **{name: column[part] for name, column in columns.items()})
    return storage, make


def test_trajectories_are_cut_where_they_end_and_not_where_the_queue_wraps(device: Any) -> None:
    numbers = np.arange(16, dtype=np.float32).reshape(8, 2, 1)
    dones = np.zeros((8, 2), bool)
    dones[3, 0] = True
    storage, _ = queue_of_six(device, rewards=numbers, observations=numbers, dones=dones)
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(batch.obs[..., 0].T) == [[4, 6, 0, 0, 0, 0], [8, 10, 12, 14, 0, 0], [5, 7, 9, 11, 13, 15]]
    (mixed,) = storage.mini_batch_generator(1, 1)
    assert sorted(plain(mixed.obs[:, 0])) == [float(x) for x in range(4, 16)]


def window(number: float, length: int, **columns: Any) -> Any:
    """Return what a dataset yields: a batch of one window, rewards 0 and all else the number, but for some columns."""
    values = np.full((1, length), number, np.float32)
    data = {"observations": values[..., None], "actions": values[..., None], "rewards": values * 0, "values": values}
    return SimpleNamespace(data={**data, "dones": np.zeros((1, length), bool), **columns})


def filled(device: Any, *windows: Any) -> QueueRolloutStorage:
    """Return a queue of two rows a window."""
    arrays_of(device)
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,), device=device, buffer_dilation_ratio=float(len(windows)))
    for each in windows:
        storage.clear()
        storage.fill_from([each])
    return storage


@pytest.mark.parametrize(
    ("older", "returns"),
    [
        (window(0, 3), [0, 0]),  # would be 6.25 and 12.5, were it joined to the next actor's window
        (window(8, 3), [2, 4]),  # goes on with the step after it
        (window(8, 3, dones=np.array([[0, 1, 0]])), [0, 0]),  # ends with its episode
    ],
)
def test_an_older_window_goes_on_with_its_own_next_step(device: Any, older: Any, returns: list[float]) -> None:
    storage = filled(device, older, window(100, 3))
    storage.compute_returns(np.full((1, 1), 100, np.float32), 0.5, 1.0)
    assert plain(storage.returns[:, 0, 0]) == [*returns, 25, 50]
    assert np.asarray(storage.dones).sum() == older.data["dones"].sum()  # nothing else has ended


def test_an_older_window_of_t_steps_goes_on_with_the_last_values_that_it_was_given(device: Any) -> None:
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,), device=device, buffer_dilation_ratio=2)
    for number, last_value in ((8, 16), (100, 100)):
        storage.clear()
        assert storage.fill_from([window(number, 2)]) is None
        storage.compute_returns(np.full((1, 1), last_value, np.float32), 0.5, 1.0)
    assert plain(storage.returns[:, 0, 0]) == [4, 8, 25, 50]


def test_an_older_window_of_which_nobody_knows_what_follows_is_named() -> None:
    storage = filled(None, window(8, 2), window(100, 2))
    with pytest.raises(SpecError, match=r"1 values of final observations are not known, .* or a window ends"):
        storage.compute_returns([[100.0]], 0.5, 1.0)
    storage.compute_returns([[100.0]], 0.5, 1.0, approximate_time_outs=True)
    assert plain(storage.returns[:, 0, 0]) == [2, 4, 25, 50]


def test_what_was_added_before_a_window_does_not_go_on_into_it() -> None:
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,), buffer_dilation_ratio=3)
    add(storage, rewards=np.zeros((2, 1)), values=np.zeros((2, 1)))
    storage.compute_returns([[16.0]], 0.5, 1.0)
    storage.clear()
    storage.fill_from([window(100, 3)])
    storage.clear()
    add(storage, rewards=np.zeros((2, 1)), values=np.zeros((2, 1)))
    storage.compute_returns([[0.0]], 0.5, 1.0)
    assert plain(storage.returns[:, 0, 0]) == [4, 8, 25, 50, 0, 0]


def test_minibatches_of_trajectories_span_no_two_windows(device: Any) -> None:
    storage = filled(device, window(1, 3), window(2, 3), window(3, 3))
    (batch,) = storage.recurrent_mini_batch_generator(1, 1)
    assert plain(batch.obs[:2, :, 0].T) == [[1, 1], [2, 2], [3, 3]]
    assert plain(batch.masks.sum(0)) == [2, 2, 2]
    assert storage.get_statistics()[0] == 2


def test_cuts_wrap_with_their_rows() -> None:
    storage = filled(None, window(0, 3), window(100, 3))
    for number in (8, 32, 64):
        storage.clear()
        storage.fill_from([window(number, 3)])
    storage.untie_buffer_loop()
    storage.compute_returns([[64.0]], 0.5, 1.0)
    assert plain(storage.returns[:, 0, 0]) == [8, 16, 16, 32]
    storage.clear()
    add(storage, rewards=np.zeros((2, 1)), values=np.zeros((2, 1)))  # in the place of two that were cut
    add(storage, rewards=np.zeros((2, 1)), values=np.zeros((2, 1)))
    storage.compute_returns([[64.0]], 0.5, 1.0)
    assert plain(storage.returns[:, 0, 0]) == [4, 8, 16, 32]


@pytest.mark.parametrize(
    ("num_rows", "num_envs", "fields_fn", "error", "message"),
    [
        (7, 2, None, StructureError, "windows must have 7 steps, or 8 with the one after the last"),
        (2, 1, None, StructureError, "got a batch of 2 windows, expected at most 1"),
        (2, 4, None, IncompleteError, "the dataset has ended: got 2 windows, expected 4"),
        (2, 2, lambda data: {"reward": data["rewards"]}, StructureError, "fields of `Transition`, .*; got reward"),
    ],
)
def test_windows_that_do_not_fit_are_refused_and_change_nothing(
    num_rows: int, num_envs: int, fields_fn: Any, error: type[Exception], message: str
) -> None:
    storage = RolloutStorage(num_envs, num_rows, (1,), None, (1,))
    two = SimpleNamespace(data={name: np.repeat(column, 2, axis=0) for name, column in window(8, 3).data.items()})
    with pytest.raises(error, match=message):
        storage.fill_from([two], fields_fn)
    assert storage.num_rows == 0


def test_next_observations_come_from_the_windows_and_other_names_are_translated() -> None:
    sarsa, labelled = SarsaRolloutStorage(1, 3, (1,), None, (1,)), ActionLabelRollout(1, 3, (1,), None, (1,))
    numbers = np.arange(4.0)[None, :, None]
    sarsa.fill_from([window(0, 4, observations=numbers, dones=np.array([[0, 1, 0, 0]]))])
    assert plain(sarsa.next_observations[:, 0, 0]) == [
        1,
        1,
        3,
    ]  # what follows the end of an episode is not the next row
    labelled.fill_from([window(7, 4)], lambda data: {**data, "action_labels": data["observations"] + 1})
    assert plain(labelled.action_labels[:, 0, 0]) == [8, 8, 8]


@pytest.mark.parametrize("flag", ["dones", "truncated"])
@pytest.mark.parametrize("boundary", [{"is_last": [[0, 0, 1]]}, {"step_type": [[0, 1, 2]]}])
def test_an_end_that_is_flagged_on_the_boundary_step_is_refused(flag: str, boundary: dict[str, Any]) -> None:
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,))
    batch = window(8, 3)
    fields = {**batch.data, flag: np.array([[0, 0, 1]])}
    batch.data |= {name: np.array(column) for name, column in boundary.items()}
    with pytest.raises(StructureError, match=f"`{flag}` is set on 1 boundary rows, .* one row before"):
        storage.fill_from([batch], lambda _: fields)
    assert storage.num_rows == 0


# The kinds of a window's rows show its ends.


def rows_of(kinds: list[int], **columns: Any) -> Batch:
    """Return a batch of one window whose rows have these kinds, without fields of ends, with values 1, 2, 3, ..."""
    numbers = np.arange(1.0, len(kinds) + 1)[None]
    data = {
        "observations": numbers[..., None],
        "actions": numbers[..., None],
        "rewards": numbers * 0,
        "values": numbers,
    }
    return Batch({**data, **columns}, None, row_kinds=np.array([kinds], np.uint8))


@pytest.mark.parametrize(
    ("kinds", "dones", "truncated", "mask"),
    [
        ([2, 2, 2, 2], [0, 0, 0], [0, 0, 0], [1, 1, 1]),
        ([3, 14, 3, 2], [0, 1, 0], [0, 0, 0], [1, 1, 1]),  # terminated
        ([3, 6, 3, 2], [0, 1, 0], [0, 1, 0], [1, 1, 1]),  # truncated, without a final observation
        ([3, 2, 12, 3], [0, 1, 1], [0, 0, 0], [1, 1, 0]),  # a boundary row is no training data
        ([3, 2, 4, 3], [0, 1, 1], [0, 1, 0], [1, 1, 0]),
        ([2, 2, 3, 2], [0, 1, 0], [0, 1, 0], [1, 1, 1]),  # cut, because another episode begins
        ([2, 2, 2, 12], [0, 0, 1], [0, 0, 0], [1, 1, 1]),  # the step after the last row shows it
        ([3, 12, 16, 16], [1, 1, 1], [0, 0, 0], [1, 0, 0]),
    ],
)
def test_ends_of_windows_come_from_the_kinds_of_their_rows(
    device: Any, kinds: list[int], dones: list[int], truncated: list[int], mask: list[int]
) -> None:
    storage = RolloutStorage(1, 3, (1,), None, (1,), device=device)
    storage.fill_from([rows_of(kinds)])
    flags = [np.asarray(column)[:3, 0, 0].tolist() for column in (storage.dones, storage.truncated, storage.mask)]
    assert flags == [dones, truncated, mask]


def test_fields_of_the_windows_come_before_the_kinds() -> None:
    storage = RolloutStorage(1, 3, (1,), None, (1,))
    storage.fill_from([rows_of([3, 6, 3, 2], dones=np.array([[0, 1, 0, 0]]))])  # `dones` alone: the episode terminated
    assert (storage.dones[:, 0, 0].tolist(), storage.truncated[:, 0, 0].tolist()) == ([0, 1, 0], [0, 0, 0])


def test_returns_of_recorded_windows_stop_at_a_terminal_state_and_need_the_value_after_a_truncation() -> None:
    storage = RolloutStorage(1, 3, (1,), None, (1,))
    following = storage.fill_from([rows_of([3, 2, 12, 3])])
    assert following is not None
    storage.compute_returns(following.values, 0.5, 1.0)
    assert storage.returns[:2, 0, 0].tolist() == [0, 0]  # rewards are 0
    storage.clear()
    final = np.array([[np.nan, 8, np.nan, np.nan]])
    storage.fill_from([rows_of([3, 2, 4, 3], final_values=final)])
    storage.compute_returns([[9.0]], 0.5, 1.0)
    assert storage.returns[:2, 0, 0].tolist() == [2, 4]
    storage.clear()
    storage.fill_from([rows_of([3, 2, 4, 3])])
    with pytest.raises(SpecError, match="1 values of final observations are not known"):
        storage.compute_returns([[9.0]], 0.5, 1.0)
