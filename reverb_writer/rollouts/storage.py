"""Rollouts of fixed length from environments that step together, for PPO and related algorithms.

    add_transitions ──> columns [T, B, ...] ──> compute_returns ──> minibatches ──> clear
    or fill_from

docs/how-to/on-policy.md has a drawing. Source: instinct_rl's `RolloutStorage`; docs/how-to/from-instinct-rl.md lists
the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.nests import map_present, write_row
from reverb_writer.rollouts import replay_windows, storage_records
from reverb_writer.rollouts.array_nests import Arrays, read_states, row_shapes
from reverb_writer.rollouts.ends import ends_of, statistics
from reverb_writer.rollouts.minibatches import MiniBatches, find
from reverb_writer.transitions.returns import gae, normalize


class RolloutStorage:
    """T steps of B environments, as NumPy arrays or PyTorch tensors [T, B, ...].

    Use: add T transitions, compute returns, iterate over the minibatches, clear. A rollout may have fewer than T rows.
    A call that raises an error has changed nothing. Not thread-safe.

    Attributes:
        num_envs: B.
        num_transitions_per_env: T.
        step: row of the next transition.
        device: device of PyTorch tensors; None for NumPy.
        saved_hidden_states: states before each step, a nest with leaves [T, B, layers, H], or None.
        observations, critic_observations, actions, rewards, dones, truncated, final_values, mask, cuts, values,
            actions_log_prob, mu, sigma, advantages, returns: leaves [T, B, ...]; `storage_records` lists them. Each
            rollout writes them in place; rows that it has not written yet are 0, or have data of the last rollout.

    Example:
        storage = RolloutStorage(num_envs=4096, num_transitions_per_env=24, obs_shape=(48,), critic_obs_shape=None,
                                 actions_shape=(12,), device="cuda:0")
    """

    Transition: type[storage_records.Transition] = storage_records.Transition
    MiniBatch: Any = storage_records.MiniBatch

    _LIKE: ClassVar[Mapping[str, str]] = {}
    """Columns that a subclass adds: the name of a column with the same shape, by name."""
    _ALSO_NEEDED: ClassVar[tuple[str, ...]] = ()

    observations: Any
    critic_observations: Any
    actions: Any
    rewards: Any
    dones: Any
    truncated: Any
    final_values: Any
    mask: Any
    cuts: Any
    values: Any
    actions_log_prob: Any
    mu: Any
    sigma: Any
    advantages: Any
    returns: Any

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: Any,
        critic_obs_shape: Any,
        actions_shape: Any,
        num_rewards: int = 1,
        device: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        """Allocate the columns.

        Args:
            num_envs: B, >= 1.
            num_transitions_per_env: T, number of steps in a rollout, >= 1.
            obs_shape: shape of one environment's observation, an object with `shape` and `dtype`, or a nest of these;
                the default dtype is float32.
            critic_obs_shape: shape of the critic's observation; None or (None,) if the critic reads the observation.
            actions_shape: shape of an action.
            num_rewards: R, number of rewards per step, >= 1.
            device: device of PyTorch tensors, such as "cpu" or "cuda:0"; None for NumPy arrays.
            seed: seed of the order of minibatches; None for a random one.

        Raises:
            SpecError: an argument is invalid, or PyTorch is not installed.
        """
        self.num_envs = integer("num_envs", num_envs, minimum=1)
        self.num_transitions_per_env = integer("num_transitions_per_env", num_transitions_per_env, minimum=1)
        num_rewards = integer("num_rewards", num_rewards, minimum=1)
        self._shapes = storage_records.column_shapes(obs_shape, critic_obs_shape, actions_shape, num_rewards)
        self._shapes |= {name: self._shapes[like] for name, like in self._LIKE.items()}
        self._arrays = Arrays(device)
        self._rng = np.random.default_rng(seed)
        self.device = device
        self.step = 0
        self.saved_hidden_states: Any = None
        self._given: frozenset[str] = frozenset()
        self._written: set[str] = set()  # columns that a row of this or an earlier rollout has set
        self._has_returns = False
        for name, column in self._zeros(self.num_transitions_per_env).items():
            setattr(self, name, column)

    def __repr__(self) -> str:
        size = f"{self.num_transitions_per_env} steps of {self.num_envs} environments"
        return f"<{type(self).__name__} of {size}: {self.step} steps>"

    def add_transitions(self, transition: storage_records.Transition) -> None:
        """Copy `transition`, one step of all environments, into the next row.

        Raises:
            SpecError: the storage is full.
            StructureError: a field is missing, has another structure or shape, or was None in earlier rows.
        """
        self._check_room(1)
        self._append(self._read(transition))

    def fill_from(
        self, dataset: Iterable[Any], fields_fn: Callable[[Any], Mapping[str, Any]] | None = None
    ) -> storage_records.Transition | None:
        """Fill a rollout with windows from a replay table: each window becomes an environment of the rollout.

        The batches taken have B windows together; each step of a queue table is used once. Earlier rows come from
        other actors, so no return and no trajectory continues from them into the windows.

        Args:
            dataset: source of batches, such as an `rw.ReplayDataset`: `batch.data` has leaves [batch size, L, ...]. L
                is T, or T + 1 if the windows include the step after the last row, with observation and values. The
                batch size divides B.
            fields_fn: converts `batch.data` to a dict of fields of `Transition`; None if it already has these names.
                Hidden states are [batch size, L, layers, H]. Windows without `dones` get `dones`, `truncated` and
                `mask` from `batch.kinds`.

        Returns:
            Step T, [B, ...], with the observations and values to bootstrap from; None if L is T.

        Raises:
            IncompleteError: the dataset ended too early. The storage is unchanged, but the samples are consumed.
            SpecError: the storage has no room for T rows.
            StructureError: the windows do not match, or flag an end on a boundary step; samples as for IncompleteError.
        """
        self._check_room(self.num_transitions_per_env)
        steps = replay_windows.read(
            self._arrays, dataset, self.Transition, self.num_envs, self.num_transitions_per_env, fields_fn
        )
        rows = [self._read(step) for step in steps]
        self._end_trajectories()
        for row in rows[: self.num_transitions_per_env]:
            self._append(row)
        self._end_trajectories()
        if len(rows) == self.num_transitions_per_env:
            return None
        if "values" in rows[-1]:
            self._put_final_values(rows[-1]["values"])
        return steps[-1]

    def clear(self) -> None:
        """Begin a new rollout. Columns keep their contents until they are written again."""
        self.step = 0
        self._has_returns = False

    @property
    def num_rows(self) -> int:
        """Number of rows written since `clear()`."""
        return self.step

    def compute_returns(
        self,
        last_values: Any,
        gamma: float,
        lambda_: float,
        *,
        approximate_time_outs: bool = False,
        normalize_advantages: bool = True,
    ) -> None:
        """Estimate advantages by GAE, in the order of time, and returns, which are advantages + values.

        The value after a row is 0 where its episode terminated, and `final_values` where it was truncated. After an
        older window of `fill_from` it is the value of the next step, or else the `last_values` of the next call.

        Args:
            last_values: [B, R], values of the observations after the newest row.
            gamma: the discount, in [0, 1].
            lambda_: the decay of GAE, in [0, 1].
            approximate_time_outs: whether to use a truncated row's own value as the value of its final observation,
                and the value of a window's last row as the value after it if that is unknown.
            normalize_advantages: whether to normalize to mean 0 and standard deviation 1, over all rewards together.

        Raises:
            IncompleteError: there are no rows, or the rows have no values.
            SpecError: a number is out of range, or the value after a time-out or an older window is unknown.
            StructureError: `last_values` has another shape.

        Source: Schulman et al., 2016, (16); see `returns.gae`.
        """
        self._check_rows()
        if "values" not in self._given:
            raise IncompleteError("the transitions of this rollout have no values. Set them before `add_transitions`.")
        last_values = self._arrays.conform("last_values", last_values, self._shapes["values"], self.num_envs)
        rewards, values = self._in_time("rewards"), self._in_time("values")
        ends = ends_of(self._arrays, self._in_time, self._written, last_values, approximate=approximate_time_outs)
        advantages, returns = gae(rewards, values, gamma=gamma, lambda_=lambda_, time_axis=0, **ends)
        self._put_final_values(last_values)
        rows = self._rows_in_time()
        self.advantages[rows] = normalize(advantages, self._real_rows()) if normalize_advantages else advantages
        self.returns[rows] = returns
        self._has_returns = True

    def get_statistics(self) -> tuple[float, float]:
        """Return the mean length of trajectories, including those that the rollout cuts off, and the mean reward.

        Raises:
            IncompleteError: there are no rows.
        """
        self._check_rows()
        return statistics(self._arrays, self._in_time("rewards"), self._ends(), self._real_rows())

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Any]:
        """Yield minibatches of rows [N, ...], copies, in a new order for each epoch; each epoch has each row once.

        Args:
            num_mini_batches: minibatches per epoch, 1 to the number of rows; sizes differ by at most one.
            num_epochs: number of passes over the rows, >= 0.

        Yields:
            `MiniBatch` without hidden states and masks.

        Raises:
            IncompleteError: there are no rows.
            SpecError: a number is out of range.
        """
        real = self._real_rows()
        rows = np.arange(self.num_rows * self.num_envs)
        if real is not None:
            rows = rows[self._arrays.to_numpy(real).reshape(-1)]
        return self._mini_batches(num_mini_batches, num_epochs, len(rows)).shuffled(rows)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, shuffle: bool = False
    ) -> Iterator[Any]:
        """Yield minibatches of whole environments, with the observations split into trajectories and padded.

        Errors: as in `mini_batch_generator`.

        Args:
            num_mini_batches: minibatches per epoch, 1 to B; sizes differ by at most one environment.
            num_epochs: number of passes over the rows, >= 0.
            shuffle: whether to draw the environments of a minibatch at random; False keeps their order.

        Yields:
            `MiniBatch` with observations [T, n, ...] of n trajectories, padded with zeros; `masks` [T, n], True on real
            rows; `hidden_states` [layers, n, H] before the first steps; other fields [T, b, ...] of b environments.
            `unpad_trajectories` converts a network's outputs to [T, b, ...]. Without `shuffle`, leaves are views of the
            storage, or all minibatches share them: do not change them in place.
        """
        batches = self._mini_batches(num_mini_batches, num_epochs, self.num_envs)
        return batches.recurrent(find(self._arrays, self._ends()), shuffle=shuffle)

    def _mini_batches(self, num_parts: int, num_epochs: int, maximum: int) -> MiniBatches:
        self._check_rows()
        num_parts = integer("num_mini_batches", num_parts, minimum=1, maximum=maximum)
        num_epochs = integer("num_epochs", num_epochs, minimum=0)
        return MiniBatches(self._arrays, self.MiniBatch, self._columns(), num_parts, num_epochs, self._rng)

    def _ends(self) -> Any:
        return self._in_time("dones") | self._in_time("cuts")

    def _real_rows(self) -> Any:
        """Return [T, B, 1] flags of rows that are training data, in the order of time; None for all rows."""
        return self._in_time("mask") != 0 if "mask" in self._written else None

    def _zeros(self, num_rows: int) -> dict[str, Any]:
        """Return new rows by column; None for columns that the storage does not have."""
        return dict(self._arrays.columns(self._shapes, (num_rows, self.num_envs)))

    def _read(self, transition: storage_records.Transition) -> dict[str, Any]:
        """Return the checked fields of a transition, by column."""
        row = {}
        for field in fields(self.Transition):
            if field.name == "hidden_states":
                continue
            name, given = storage_records.COLUMN_OF.get(field.name, field.name), getattr(transition, field.name, None)
            shape = self._shapes.get(name)
            if given is not None and shape is not None:
                given = self._arrays.asarray(given) != 0 if name in storage_records.FLAGS else given
                row[name] = self._arrays.conform(field.name, given, shape, self.num_envs)
        expected = [name for name in (*storage_records.NEEDED, *self._ALSO_NEEDED) if self._shapes[name] is not None]
        lacking = [name for name in expected if name not in row]
        if lacking:
            raise StructureError(f"a transition needs {', '.join(expected)}; this one lacks {', '.join(lacking)}.")
        changed = storage_records.POLICY & self._given.symmetric_difference(row)
        if changed and self.num_rows:
            raise StructureError(
                f"all transitions of a rollout must have the same fields: some rows have {', '.join(sorted(changed))}, "
                "others do not. Set them in all rows, or in none."
            )
        row["dones"] = row["dones"] | row.get("truncated", row["dones"])
        if "mask" in row:
            row["dones"] = row["dones"] | (row["mask"] == 0)
        given, saved = getattr(transition, "hidden_states", None), self.saved_hidden_states
        states = read_states(self._arrays, given, self.num_envs, saved)
        return row if states is None else row | {"saved_hidden_states": states}

    def _append(self, row: dict[str, Any]) -> None:
        """Write a row, and advance to the next one."""
        if "saved_hidden_states" in row.keys() - self._shapes:  # the first states have their shapes
            shapes = map_present(lambda leaf: row_shapes("hidden_states", leaf[0]), row["saved_hidden_states"])
            self._shapes["saved_hidden_states"] = shapes
            self.saved_hidden_states = self._arrays.columns(shapes, (self._capacity, self.num_envs))
        for name in storage_records.DEFAULTS.keys() - row:
            getattr(self, name)[self.step] = storage_records.DEFAULTS[name]
        for name, nest in row.items():
            write_row(getattr(self, name), self.step, nest)
        self._given = frozenset(row)
        self._written |= row.keys()
        self._has_returns = False
        self._advance()

    def _advance(self) -> None:
        self.step += 1

    def _end_trajectories(self) -> None:
        """Mark the newest row as the end of a trajectory, because the next rows come from other actors."""
        self.cuts[self._newest] = 1
        self._written.add("cuts")

    def _put_final_values(self, values: Any) -> None:
        """Set the values [B, R] after the newest row, where its episode continues."""
        ended, known = self.dones[self._newest][:, 0] != 0, self.final_values[self._newest]
        self.final_values[self._newest] = self._arrays.where(ended, known, values)

    @property
    def _newest(self) -> int:
        return (self.step - 1) % self._capacity

    @property
    def _capacity(self) -> int:
        return int(self.dones.shape[0])

    def _rows_in_time(self) -> Any:
        """Return the rows in the storage, oldest first: a slice, or indices."""
        return slice(0, self.num_rows)

    def _in_time(self, name: str) -> Any:
        rows = self._rows_in_time()
        return map_present(lambda leaf: leaf[rows], getattr(self, name))

    def _columns(self) -> dict[str, Any]:
        """Return the columns of minibatches by field, oldest row first; None for missing ones."""
        lacking = {"masks"} | (storage_records.POLICY - self._given) | ({"mask"} - self._written)
        lacking |= set() if self._has_returns else {"advantages", "returns"}
        names = {field: storage_records.COLUMN_OF.get(field, field) for field in self.MiniBatch._fields}
        return {
            field: None if name in lacking or getattr(self, name) is None else self._in_time(name)
            for field, name in names.items()
        }

    def _check_room(self, num_rows: int) -> None:
        if self.step + num_rows > self._capacity:
            raise SpecError(
                f"the storage is full: {self.step} rows of {self._capacity}, expected room for {num_rows} more. Call "
                "`clear()` after each rollout, or raise `num_transitions_per_env`."
            )

    def _check_rows(self) -> None:
        if not self.num_rows:
            raise IncompleteError("the storage has no rows yet. Call `add_transitions` first.")
