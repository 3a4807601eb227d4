"""How an episode ended, as far as its writer or its last steps tell."""

from __future__ import annotations

from typing import Any, NamedTuple

from reverb_writer.files.manifest import End
from reverb_writer.slices.markers import read_markers
from reverb_writer.steps import boundary_steps


class Outcome(NamedTuple):
    """Why an episode ended; None where it is not known."""

    terminated: bool | None = None
    truncated: bool | None = None

    def completed(self, last_rows: Any, end: End) -> Outcome:
        """Return the outcome with what the last two steps of the episode, leaves [2, ...], tell besides."""
        terminated, truncated = self
        if end is not End.STEP:
            return Outcome(terminated or False, truncated if truncated is not None else True)
        if terminated is None and truncated is None:
            markers = read_markers(last_rows)
            terminated = None if markers.terminated is None else bool(markers.terminated[-1])
            truncated = None if markers.truncated is None else bool(markers.truncated[-1])
        if truncated is None and terminated is not None:
            truncated = not terminated
        return Outcome(terminated, truncated)


def is_boundary_step(rows: Any) -> bool:
    """Return whether the last step is a boundary step, which only holds an observation (TF-Agents, RLDS)."""
    flags = boundary_steps(rows)
    return flags is not None and bool(flags[-1])
