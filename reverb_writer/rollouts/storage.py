"""Rollouts of fixed length of environments that step together, and what PPO and its kin make of them.

    add_transitions ──> columns [T, B, ...] ──> compute_returns ──> minibatches ──> clear
    or fill_from

`docs/rollouts.md` draws it. Source: instinct_rl's `RolloutStorage`; docs/compatibility.md lists the differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from reverb_writer.arguments import integer
from reverb_writer.errors import IncompleteError, SpecError, StructureError
from reverb_writer.nests import map_present, write_row
from reverb_writer.returns import gae, normalize
from reverb_writer.rollouts import hidden_states, replay_windows, storage_records
from reverb_writer.rollouts.arrays import Arrays
from reverb_writer.rollouts.ends import ends_of
from reverb_writer.rollouts.minibatches import MiniBatches
from reverb_writer.rollouts.trajectory_padding import find
from reverb_writer.slices import Trajectories

__all__ = ["RolloutStorage"]

_NEEDED = ("observations", "critic_observations", "actions", "rewards", "dones")
"""What transitions must bring."""

_NO_END = {"truncated": 0, "final_values": math.nan, "cuts": 0}
"""What rows hold whose transitions do not bring these."""

_POLICY = {"values", "actions_log_prob", "mu", "sigma"}
"""What may lack, but then in all rows of a rollout."""


class RolloutStorage:
    """Rows [T, B, ...] of B environments, T steps each, on NumPy arrays or PyTorch tensors.

    Use: add T transitions, compute returns, go through the minibatches, clear. A rollout that is shorter is taken as
    far as it goes. A call that raises has changed nothing. Not thread-safe.

    Attributes:
        num_envs: B.
        num_transitions_per_env: T.
        step: the row that the next transition goes to.
        device: None for NumPy.
        saved_hidden_states: None, or a nest, leaves [T, layers, B, H], of the states before each step.
        observations, critic_observations, actions, rewards, dones, truncated, final_values, cuts, values,
            actions_log_prob, mu, sigma, advantages, returns: leaves [T, B, ...] as `transitions` lists them; written in
            place by the next rollout. Rows that have not been written since then are 0, or old.

    Example:
        storage = RolloutStorage(num_envs=4096, num_transitions_per_env=24, obs_shape=(48,), critic_obs_shape=None,
                                 actions_shape=(12,), device="cuda:0")
    """

    Transition: type[storage_records.Transition] = storage_records.Transition
    MiniBatch: Any = storage_records.MiniBatch

    _LIKE: ClassVar[Mapping[str, str]] = {}
    """Columns that a subclass adds, and those that they look like."""
    _ALSO_NEEDED: ClassVar[tuple[str, ...]] = ()

    observations: Any
    critic_observations: Any
    actions: Any
    rewards: Any
    dones: Any
    truncated: Any
    final_values: Any
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
        """Allocate.

        Args:
            num_envs: B, >= 1.
            num_transitions_per_env: T, steps in a rollout, >= 1.
            obs_shape: of one environment's observation: a shape, something with `shape` and `dtype`, or a nest of them.
                float32 where no dtype is told.
            critic_obs_shape: likewise, of what the critic sees; None or (None,) if that is the same.
            actions_shape: likewise, of an action.
            num_rewards: R, >= 1.
            device: None for NumPy arrays, else the device of PyTorch tensors, such as "cpu" or "cuda:0".
            seed: of the order of minibatches; None for another one each time.

        Raises:
            SpecError: an argument can never work, or PyTorch is not installed.
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
        self._has_returns = False
        for name, column in self._zeros(self.num_transitions_per_env).items():
            setattr(self, name, column)

    # ---------------------------------------------------------------------------------------------- writing

    def add_transitions(self, transition: storage_records.Transition) -> None:
        """Copy one step of all environments into the next row.

        Raises:
            SpecError: the storage is full.
            StructureError: a field lacks, has another structure or shape, or was not there in the rows before.
        """
        self._check_room(1)
        self._append(self._read(transition))

    def fill_from(
        self, dataset: Iterable[Any], fields_fn: Callable[[Any], Mapping[str, Any]] | None = None
    ) -> storage_records.Transition | None:
        """Fill a rollout with windows from a replay table: each becomes an environment of the rollout.

        Takes as many batches as make B windows, and no more: from a queue table each step is used once. What was there
        before is of other actors: no return and no trajectory goes on from it into the windows.

        Args:
            dataset: yields batches, `batch.data` a nest with leaves [batch size, L, ...]; an `rw.ReplayDataset`. L is
                T, or T + 1 if each window ends with the step after the last one, which is the first of the next one.
                The batch size divides B.
            fields_fn: turns `batch.data` into a dict of fields of `Transition`; None if they have those names already.
                Of hidden states the leaves are [batch size, L, layers, H].

        Returns:
            Step T, [B, ...], with the observations and values to bootstrap from; None if L is T.

        Raises:
            IncompleteError: the dataset has ended before. Nothing changed here, but what came is taken from the table.
            SpecError: there is no room for T rows.
            StructureError: the windows do not fit, or flag an end on a boundary step. As for IncompleteError.
        """
        self._check_room(self.num_transitions_per_env)
        steps = replay_windows.read(
            self._arrays, dataset, self.Transition, self.num_envs, self.num_transitions_per_env, fields_fn
        )
        rows = [self._read(step) for step in steps]
        self._cut()
        for row in rows[: self.num_transitions_per_env]:
            self._append(row)
        self._cut()
        if len(rows) == self.num_transitions_per_env:
            return None
        if "values" in rows[-1]:
            self._put_final_values(rows[-1]["values"])
        return steps[-1]

    def clear(self) -> None:
        """Begin a new rollout. Columns keep their contents until they are written again."""
        self.step = 0
        self._has_returns = False

    # ---------------------------------------------------------------------------------------------- reading

    @property
    def num_rows(self) -> int:
        """Rows that have been written since `clear()`."""
        return self.step

    def compute_returns(
        self,
        last_values: Any,
        gamma: float,
        lam: float,
        *,
        approximate_time_outs: bool = False,
        normalize_advantages: bool = True,
    ) -> None:
        """Estimate advantages by GAE, in the order of time, and returns, which are advantages + values.

        Where an episode terminated, nothing follows; where it was truncated, `final_values`; where an older window of
        `fill_from` ends, the values of the step after it, or else the `last_values` of the call that came after it.

        Args:
            last_values: [B, R], of the observations after the newest row.
            gamma: the discount, in [0, 1].
            lam: in [0, 1].
            approximate_time_outs: take the values of truncated rows themselves for those of their final observations;
                and those of last rows of windows if what follows is not known.
            normalize_advantages: to mean 0 and standard deviation 1, over all rewards together.

        Raises:
            IncompleteError: there are no rows, or no values with them.
            SpecError: a number out of range, or a time-out or an older window of which nobody knows what follows.
            StructureError: `last_values` have another shape.

        Source: Schulman et al., 2016, (16); see `returns.gae`.
        """
        self._check_rows("values")
        last_values = self._arrays.conform("last_values", last_values, self.values, (self.num_envs,))
        rewards, values = self._in_time("rewards"), self._in_time("values")
        ends = ends_of(self._arrays, self._in_time, approximate=approximate_time_outs)
        advantages, returns = gae(rewards, values, last_values, gamma=gamma, lam=lam, **ends)
        self._put_final_values(last_values)
        rows = self._rows_in_time()
        self.advantages[rows] = normalize(advantages) if normalize_advantages else advantages
        self.returns[rows] = returns
        self._has_returns = True

    def get_statistics(self) -> tuple[float, float]:
        """Return the mean length of trajectories, those that the rollout cuts off included, and the mean reward.

        Raises:
            IncompleteError: there are no rows.
        """
        self._check_rows()
        return float(self._trajectories().lengths.mean()), float(self._in_time("rewards").mean())

    def mini_batch_generator(self, num_mini_batches: int, num_epochs: int = 8) -> Iterator[Any]:
        """Yield minibatches of rows [N, ...], copies, shuffled anew for each epoch; each row is in each epoch once.

        Args:
            num_mini_batches: of an epoch, 1 to the number of rows; they differ in size by one at most.
            num_epochs: times to go through the rows, >= 0.

        Yields:
            `MiniBatch` without hidden states and masks.

        Raises:
            IncompleteError: there are no rows.
            SpecError: a number out of range.
        """
        num_rows = self.num_rows * self.num_envs
        return self._mini_batches(num_mini_batches, num_epochs, num_rows, shuffle=True).shuffled(num_rows)

    def recurrent_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, shuffle: bool = False
    ) -> Iterator[Any]:
        """Yield minibatches of whole environments, of which the observations are split into trajectories and padded.

        Args:
            num_mini_batches: of an epoch, 1 to B; they differ by one environment at most.
            num_epochs: times to go through the rows, >= 0.
            shuffle: draw the environments of a minibatch anew for each epoch; False for their order.

        Yields:
            `MiniBatch` with observations [T, n, ...] of n trajectories, zeros behind them; `masks` [T, n], True on real
            rows; `hidden_states` [layers, n, H] before the first step of each; the rest [T, b, ...] of b environments.
            `unpad_trajectories` brings what a network makes of the observations to [T, b, ...]. Without `shuffle`,
            leaves are views of the storage or of what all minibatches share: do not change them in place.

        Raises:
            IncompleteError: there are no rows.
            SpecError: a number out of range.
        """
        batches = self._mini_batches(num_mini_batches, num_epochs, self.num_envs, shuffle=shuffle)
        return batches.recurrent(self._trajectories())

    def contiguous_mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, *, shuffle: bool = False
    ) -> Iterator[storage_records.ContiguousMiniBatch]:
        """Yield minibatches of whole environments as trajectories end to end, without padding.

        Arguments and errors as for `recurrent_mini_batch_generator`.

        Yields:
            `ContiguousMiniBatch`: leaves [N, ...], copies, `is_init` [N] and `lengths` [n].
        """
        batches = self._mini_batches(num_mini_batches, num_epochs, self.num_envs, shuffle=shuffle)
        return batches.contiguous(self._trajectories())

    def _mini_batches(self, num_parts: int, num_epochs: int, maximum: int, *, shuffle: bool) -> MiniBatches:
        self._check_rows()
        num_parts = integer("num_mini_batches", num_parts, minimum=1, maximum=maximum)
        num_epochs = integer("num_epochs", num_epochs, minimum=0)
        rng = self._rng if shuffle else None
        return MiniBatches(self._arrays, self.MiniBatch, self._columns(), num_parts, num_epochs, rng)

    def _trajectories(self) -> Trajectories:
        return find(self._arrays, self._in_time("dones") | self._in_time("cuts"))

    # ------------------------------------------------------------------------------------------------ parts

    def _zeros(self, num_rows: int) -> dict[str, Any]:
        """Return new rows of all columns; None of those that there are not."""
        return dict(self._arrays.zeros(self._shapes, (num_rows, self.num_envs)))

    def _read(self, transition: storage_records.Transition) -> dict[str, Any]:
        """Return a row of each column that the transition brings, checked."""
        row = {}
        for field in fields(self.Transition):
            name, given = storage_records.COLUMN_OF.get(field.name, field.name), getattr(transition, field.name, None)
            column = getattr(self, name, None)
            if given is not None and column is not None and name in self._shapes:
                given = self._arrays.asarray(given) != 0 if name in ("dones", "truncated") else given
                row[name] = self._arrays.conform(field.name, given, column, (self.num_envs,))
        expected = [name for name in (*_NEEDED, *self._ALSO_NEEDED) if self._shapes[name] is not None]
        lacking = [name for name in expected if name not in row]
        if lacking:
            raise StructureError(f"a transition needs {', '.join(expected)}; this one lacks {', '.join(lacking)}.")
        changed = _POLICY & self._given.symmetric_difference(row)
        if changed and self.num_rows:
            raise StructureError(
                f"all transitions of a rollout bring the same fields: {', '.join(sorted(changed))} came in some rows, "
                "and in others not."
            )
        row["dones"] = row["dones"] | row.get("truncated", row["dones"])
        states, saved = getattr(transition, "hidden_states", None), self.saved_hidden_states
        row["saved_hidden_states"] = hidden_states.read(self._arrays, states, self.num_envs, saved)
        return row

    def _append(self, row: dict[str, Any]) -> None:
        """Write a row, and go on to the next one."""
        states = row.pop("saved_hidden_states")
        if states is not None and self.saved_hidden_states is None:
            self.saved_hidden_states = hidden_states.zeros(self._arrays, states, self._capacity)
        for name in _NO_END.keys() - row:
            getattr(self, name)[self.step] = _NO_END[name]
        for name, nest in row.items():
            write_row(getattr(self, name), self.step, nest)
        if self.saved_hidden_states is not None:
            hidden_states.write(self.saved_hidden_states, self.step, states)
        self._given = frozenset(row)
        self._has_returns = False
        self._advance()

    def _advance(self) -> None:
        self.step += 1

    def _cut(self) -> None:
        """Let nothing follow the newest row, if there is one: what is written next is of other actors."""
        self.cuts[self._newest] = int(self.num_rows > 0)

    def _put_final_values(self, values: Any) -> None:
        """Keep what the newest row goes on with, [B, R], where its episode goes on."""
        ended, known = self.dones[self._newest][:, 0] != 0, self.final_values[self._newest]
        self.final_values[self._newest] = self._arrays.where(ended, known, values)

    @property
    def _newest(self) -> int:
        return (self.step - 1) % self._capacity

    @property
    def _capacity(self) -> int:
        return int(self.dones.shape[0])

    def _rows_in_time(self) -> Any:
        """Return which rows there are, oldest first: a slice, or indices."""
        return slice(0, self.num_rows)

    def _in_time(self, name: str) -> Any:
        rows = self._rows_in_time()
        return map_present(lambda leaf: leaf[rows], getattr(self, name))

    def _columns(self) -> dict[str, Any]:
        """Return what minibatches are made of, oldest row first, by field; None where there is nothing."""
        lacking = {"masks"} | (_POLICY - self._given) | (set() if self._has_returns else {"advantages", "returns"})
        names = {field: storage_records.COLUMN_OF.get(field, field) for field in self.MiniBatch._fields}
        return {
            field: None if name in lacking or getattr(self, name) is None else self._in_time(name)
            for field, name in names.items()
        }

    # ----------------------------------------------------------------------------------------------- checks

    def _check_room(self, num_rows: int) -> None:
        if self.step + num_rows > self._capacity:
            raise SpecError(
                f"the storage is full: {self.step} rows of {self._capacity}, expected room for {num_rows} more. Call "
                "`clear()` after each rollout, or raise `num_transitions_per_env`."
            )

    def _check_rows(self, *names: str) -> None:
        if not self.num_rows:
            raise IncompleteError("the storage has no rows yet. Call `add_transitions` first.")
        lacking = [name for name in names if name not in self._given]
        if lacking:
            raise IncompleteError(f"the transitions of this rollout did not bring {', '.join(lacking)}.")
