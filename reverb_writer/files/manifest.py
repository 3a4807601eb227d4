"""The description of a trajectory on disk: the member `manifest.json` of its file.

    format, version               what wrote it
    num_steps, boundary_step      how many steps there are, and whether the last one only holds the final observation
    end, terminated, truncated    how the trajectory ended
    structure                     the nest of one step with dtypes and shapes: a signature of Reverb, in base 64
    metadata                      what the writer was given to keep with it

A named tuple is read as a new class of that name and those fields, a `Trajectory` as `reverb_writer.Trajectory`.
Reading imports and runs nothing.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from reverb_writer.errors import FormatError, ReverbWriterError
from reverb_writer.files.row_layout import RowLayout
from reverb_writer.slices.markers import read_markers
from reverb_writer.steps import boundary_steps

FORMAT = "reverb-writer trajectory"
VERSION = 1


class End(enum.Enum):
    """How a trajectory ended; an importing observer ends its episode in the same way."""

    STEP = "step"  # its last step was the last of the episode
    RESET = "reset"  # by `reset()`, with the cached steps written
    CUT = "cut"  # by `reset(discard=True)` or `close()`


@dataclass(frozen=True)
class Manifest:
    """The description of a trajectory.

    Attributes:
        num_steps: steps, the boundary step included.
        boundary_step: whether the last step only holds the final observation, as in TF-Agents and RLDS.
        end: how it ended.
        terminated: whether the environment ended it; None if it is not known.
        truncated: whether a limit ended it, so that the state after it has a value; None if it is not known.
        layout: what its steps have in common.
        metadata: what the writer was given to keep with it; JSON.
    """

    num_steps: int
    boundary_step: bool
    end: End
    terminated: bool | None
    truncated: bool | None
    layout: RowLayout
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        num_steps: int,
        last_rows: Any,
        end: End,
        layout: RowLayout,
        metadata: Mapping[str, Any],
        *,
        terminated: bool | None = None,
        truncated: bool | None = None,
        has_boundary: bool = False,
    ) -> Manifest:
        """Describe a trajectory; its last steps, leaves [2, ...], tell what its writer does not."""
        is_boundary = boundary_steps(last_rows)
        if end is not End.STEP:
            terminated, truncated = terminated or False, True if truncated is None else truncated
        else:
            has_boundary = has_boundary or (is_boundary is not None and bool(is_boundary[-1]))
            if terminated is None and truncated is None:
                markers = read_markers(last_rows)
                terminated = None if markers.terminated is None else bool(markers.terminated[-1])
                truncated = None if markers.truncated is None else bool(markers.truncated[-1])
            if truncated is None and terminated is not None:
                truncated = not terminated
        return cls(num_steps, has_boundary, end, terminated, truncated, layout, metadata)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise FormatError(f"{self.num_steps} steps, expected at least one.")

    @property
    def num_transitions(self) -> int:
        """The steps that have an action: all but the boundary step."""
        return self.num_steps - self.boundary_step

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                **{name: getattr(self, name) for name in ("num_steps", "boundary_step", "terminated", "truncated")},
                "end": self.end.value,
                "structure": self.layout.encoded,
                "metadata": dict(self.metadata),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest.

        Raises:
            FormatError: it is none, or of another version.
        """
        try:
            values = json.loads(text)
            found = values.get("format"), values.get("version")
            if found == (FORMAT, VERSION):
                return cls(
                    num_steps=int(values["num_steps"]),
                    boundary_step=bool(values["boundary_step"]),
                    end=End(values["end"]),
                    terminated=values["terminated"],
                    truncated=values["truncated"],
                    layout=RowLayout.read(values["structure"]),
                    metadata=dict(values["metadata"]),
                )
        except (ReverbWriterError, AttributeError, DecodeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"its manifest cannot be read: {error!r}") from error
        raise FormatError(f"its format is {found[0]!r}, version {found[1]!r}; expected {FORMAT!r}, version {VERSION}.")
