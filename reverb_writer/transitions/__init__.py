"""From steps to transitions (s, a, r, discount, s'): the one convention of steps, and n-step transitions.

    windows [B, T, ...] ──> to_transitions ──> Transitions [B, T - 1, ...] ──> n_step, or rw.returns
    slices [N, ...]                                        [N - 1, ...]

docs/explanation/steps.md draws the convention: the rows of observation, action and flags in each layout.
"""

from __future__ import annotations

from reverb_writer.transitions.n_step import n_step
from reverb_writer.transitions.pairing import to_transitions
from reverb_writer.transitions.records import NStepTransitions, Transitions

__all__ = ["NStepTransitions", "Transitions", "n_step", "to_transitions"]
