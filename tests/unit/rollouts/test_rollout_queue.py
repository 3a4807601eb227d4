"""Queues: trajectories, windows and cuts in the order of time. docs/how-to/on-policy.md has where rows go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollouts import add, arrays_of, plain

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.rollouts import QueueRolloutStorage


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


def test_a_queue_that_has_not_grown_needs_its_clear() -> None:
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,), buffer_dilation_ratio=2.0)
    add(storage, rewards=np.ones((2, 1)))
    with pytest.raises(SpecError, match="the storage is full: 2 rows of 2"):
        add(storage, rewards=np.ones((1, 1)))
    with pytest.raises(SpecError, match=r"`buffer_dilation_ratio` must be >= 1, got 0.5"):
        QueueRolloutStorage(1, 2, (1,), None, (1,), buffer_dilation_ratio=0.5)


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
        storage.fill_from([window(number, 2)])
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


@pytest.mark.parametrize("flag", ["dones", "truncated"])
@pytest.mark.parametrize("boundary", [{"is_last": [[0, 0, 1]]}, {"step_type": [[0, 1, 2]]}])
def test_an_end_that_is_flagged_on_the_boundary_step_is_refused(flag: str, boundary: dict[str, Any]) -> None:
    storage = QueueRolloutStorage(1, 2, (1,), None, (1,))
    batch = window(8, 3)
    fields = {**batch.data, flag: np.array([[0, 0, 1]])}
    batch.data |= {name: np.array(column) for name, column in boundary.items()}
    with pytest.raises(StructureError, match=f"`{flag}` is set on 1 boundary steps, .* one row before"):
        storage.fill_from([batch], lambda _: fields)
    assert storage.num_rows == 0
