"""Numbers that change while a learner trains. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reverb_writer.arguments import integer, number


@dataclass(frozen=True)
class LinearSchedule:
    """A number that goes from `start` to `end` in `num_steps` equal parts, and stays there.

    Attributes:
        start: the number at step 0.
        end: the number from step `num_steps` on.
        num_steps: >= 1.

    Raises:
        SpecError: a number is not finite, or `num_steps` < 1.

    >>> beta = LinearSchedule(0.4, 1.0, 300)
    >>> [round(beta(step), 9) for step in (0, 150, 300, 9000)]
    [0.4, 0.7, 1.0, 1.0]
    """

    start: float
    end: float
    num_steps: int

    def __post_init__(self) -> None:
        number("start", self.start)
        number("end", self.end)
        integer("num_steps", self.num_steps, minimum=1)

    def __call__(self, step: int) -> float:
        """Return the number at `step`, counted from 0."""
        done = min(max(step / self.num_steps, 0.0), 1.0)
        return self.start + (self.end - self.start) * done
