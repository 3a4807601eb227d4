"""From rows to transitions (s, a, r, discount, s'), over one step and over n steps.

    windows [B, T, ...] ──> to_transitions ──> Transitions [B, T - 1, ...] ──> n_step, or rw.returns
    slices [N, ...]                                        [N - 1, ...]

`reverb_writer.rows` has the kinds of rows, and docs/explanation/steps.md draws them.
"""

from __future__ import annotations

from reverb_writer.transitions.n_step import n_step, one_per_window
from reverb_writer.transitions.pairing import to_transitions
from reverb_writer.transitions.records import NStepTransitions, Transitions

__all__ = ["NStepTransitions", "Transitions", "n_step", "one_per_window", "to_transitions"]
