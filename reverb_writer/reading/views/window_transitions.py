"""Transitions of the batches of a dataset: one per window, or one from each row of slices."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reverb_writer import rows
from reverb_writer.arrays import any_true
from reverb_writer.errors import SpecError
from reverb_writer.rows.kinds import pairs
from reverb_writer.slices.batch import Batch
from reverb_writer.transitions import NStepTransitions, n_step, one_per_window, to_transitions

_LOG = logging.getLogger(__package__)

_MANY = 10_000  # transitions among which an end of an episode is expected


@dataclass
class _Seen:
    """The rows of the delivered transitions so far."""

    num_transitions: int = 0
    has_first: bool = False
    has_end: bool = False

    def note(self, batch: Batch) -> bool:
        """Take a batch; return whether many transitions with beginnings of episodes had no end, once."""
        if self.has_end:
            return False
        kinds, starts = batch.kinds, None if batch.slices is None else batch.slices.starts
        mask = pairs(kinds, starts).mask
        self.has_end = any_true(mask & rows.has(kinds[..., 1:], rows.LAST))
        self.has_first = self.has_first or any_true(rows.has(kinds, rows.FIRST))
        before, self.num_transitions = self.num_transitions, self.num_transitions + len(kinds)
        return not self.has_end and self.has_first and before < _MANY <= self.num_transitions


@dataclass(frozen=True)
class ToTransitions:
    """Makes transitions over n steps of batches; see `dataset.transitions`."""

    n: int
    gamma: float
    is_prioritized: bool
    _rng: np.random.Generator = field(default_factory=np.random.default_rng, compare=False, repr=False)
    _seen: _Seen = field(default_factory=_Seen, compare=False, repr=False)

    def __call__(self, batch: Any) -> NStepTransitions:
        """Return the transitions of a batch; raises SpecError for anything else, and as `to_transitions`."""
        if not isinstance(batch, Batch):
            raise SpecError(f"`transitions` needs a Batch, and `transform` returned {type(batch).__name__}.")
        if batch.slices is not None:
            found = n_step(to_transitions(batch), self.n, self.gamma)
        else:
            found = one_per_window(batch, self.n, self.gamma, self._rng, is_prioritized=self.is_prioritized)
            most = batch.kinds.shape[1] - (batch.last_row != "action")
            if most < self.n:
                text = (
                    f"windows of {batch.kinds.shape[1]} rows give transitions over at most {most} steps, not {self.n}."
                )
                warnings.warn(f"{text} Write windows of n + 1 rows.", stacklevel=2)
        if self._seen.note(batch):
            _LOG.warning(
                "%d transitions held first steps of episodes and no last one, so the learner sees no end. Write "
                "windows with `stride_length=1` or `end_of_episode='tile'`, and say the ends: `observer(step, "
                "terminated=terminated, truncated=truncated, final_observation=next_observation)`.",
                self._seen.num_transitions,
            )
        found.batch = batch
        return found
