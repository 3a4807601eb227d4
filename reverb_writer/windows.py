"""The windows of an episode: integers only, no arrays and no I/O.

Three numbers define them: `L` = `sequence_length`, `S` = `stride_length`, and `c`, the number of steps appended so far
in this episode. One rule makes the windows:

    the last L steps are a window whenever c >= L and (c - L) % S == 0

So the regular windows start at 0, S, 2S, ... The modes of `EndOfEpisode` differ only after the boundary step of an
episode of `n` steps: either padding steps follow, to which the same rule applies, or one closing window off the rule.
`windows` combines the results of `num_windows`, `num_padding` and `closing_window`.

A window is a pair (start, stop) of step numbers, as in `steps[start:stop]`; a stop beyond n means padding.
"""

from __future__ import annotations

import enum
import functools
import warnings
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError

__all__ = ["SHORT_EPISODE", "STRIDE_GAP", "UNALIGNED_TAIL", "EndOfEpisode", "WindowSpec"]

# Reasons why a step is in no window.
SHORT_EPISODE: Final = "short_episode"  # its episode has no window at all
STRIDE_GAP: Final = "stride_gap"  # it is between two windows, because S > L
UNALIGNED_TAIL: Final = "unaligned_tail"  # it is after the last window


class EndOfEpisode(enum.Enum):
    """The treatment of steps that are in no regular window at the end of an episode of `n` steps.

    Let `m` be the number of steps missing in the next regular window: L - n if n < L, otherwise (L - n) % S.

    | mode      | padding steps k(n) | windows start at                                          | known elsewhere as  |
    | --------- | ------------------ | --------------------------------------------------------- | ------------------- |
    | DROP      | 0                  | 0, S, 2S, ... as long as start + L <= n                   | TF-Agents, default  |
    | PAD       | max(0, L - n)      | as DROP; at 0, padded, if n < L                           | TF-Agents, pad      |
    | TILE      | L - 1              | 0, S, 2S, ... as long as start < n                        | TF-Agents, pad+tile |
    | COVER     | m                  | as DROP; if m > 0 also at n + m - L, padded               | Acme, ZERO_PAD      |
    | TRUNCATE  | 0                  | as DROP; if m > 0 also at n + m - L, cut short at n       | Acme, TRUNCATE      |
    | ALIGN_END | 0                  | as DROP; if m > 0 and n >= L also at n - L, off the rule  | Acme, WRITE         |

    If S <= L, COVER, TRUNCATE and TILE lose no step, nor does ALIGN_END if n >= L. An episode of no steps has no
    windows. An argument may also be a mode's lower-case name: `"drop"`, ... `"align_end"`.

    Source: TF-Agents `ReverbAddTrajectoryObserver` and Acme `SequenceAdder`.
    """

    DROP = "drop"
    PAD = "pad"
    TILE = "tile"
    COVER = "cover"
    TRUNCATE = "truncate"
    ALIGN_END = "align_end"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(repr(mode.value) for mode in cls)
        raise SpecError(f"`end_of_episode` must be one of {names}, got {value!r}.")


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """The windows to cut from an episode.

    Immutable, hashable, and safe to share between threads. Integers of any type are stored as plain ints.

    Attributes:
        sequence_length: L, the steps of a window, >= 1; None for one window per episode, with all its steps.
        stride_length: S, the steps from one window's start to the next one's, >= 1. With S > L, S - L of every S steps
            are in no window: DROP, PAD and TILE only warn (once per process and pair), other modes refuse it.
        end_of_episode: treatment of the last steps; a string is converted to the enum's member.

    Raises:
        SpecError: a number is not an integer or is too small, the mode is unknown, or the three contradict each other.
    """

    sequence_length: int | None
    stride_length: int = 1
    end_of_episode: EndOfEpisode | str = EndOfEpisode.DROP

    def __post_init__(self) -> None:
        """Check the fields, and store them as plain ints and a member of the enum."""
        length, stride = self.sequence_length, integer("stride_length", self.stride_length, minimum=1)
        mode = EndOfEpisode(self.end_of_episode)
        if length is not None:
            length = integer("sequence_length", length, minimum=1, hint="Pass None for whole episodes.")
        elif (stride, mode) != (1, EndOfEpisode.DROP):
            got = f"got {stride} and {mode.name}. Leave both out."
            raise SpecError(f"`sequence_length` None needs `stride_length` 1 and `end_of_episode` DROP, {got}")
        if length is not None and stride > length:
            if mode in (EndOfEpisode.COVER, EndOfEpisode.TRUNCATE, EndOfEpisode.ALIGN_END):
                raise SpecError(
                    f"`stride_length` must be <= `sequence_length` with {mode.name}, got {stride} > {length}. "
                    f"Lower `stride_length` to {length}, or use DROP, PAD or TILE."
                )
            _warn_of_gap(length, stride)
        for name, value in (("sequence_length", length), ("stride_length", stride), ("end_of_episode", mode)):
            object.__setattr__(self, name, value)

    @classmethod
    def whole_episode(cls) -> WindowSpec:
        """Make one window of every episode, from its first step to its boundary step."""
        return cls(sequence_length=None)

    def num_windows(self, num_steps: Any) -> Any:
        """Return the number of complete regular windows after `num_steps` steps, elementwise for an array; unchecked.

        >>> [WindowSpec(3, stride_length=2).num_windows(count) for count in (2, 3, 4, 5)]
        [0, 1, 1, 2]
        """
        length, stride = self.sequence_length, self.stride_length
        return num_steps * 0 if length is None else (num_steps - length + stride) // stride * (num_steps >= length)

    def num_padding(self, n: int) -> int:
        """Return k(n), the number of padding steps after the boundary step of an `n`-step episode.

        >>> WindowSpec(4, end_of_episode="tile").num_padding(6)
        3
        """
        n = integer("n", n, minimum=0)
        if n == 0 or self.sequence_length is None:
            return 0
        if self.end_of_episode is EndOfEpisode.PAD:
            return max(0, self.sequence_length - n)
        if self.end_of_episode is EndOfEpisode.TILE:
            return self.sequence_length - 1
        return self._num_missing(n, self.sequence_length) if self.end_of_episode is EndOfEpisode.COVER else 0

    def closing_window(self, n: int) -> tuple[int, int] | None:
        """Return the window off the rule at the end of an `n`-step episode, or None; its stop is n.

        TRUNCATE cuts a window short, ALIGN_END moves one off the stride, a whole episode is one.

        >>> WindowSpec(4, stride_length=4, end_of_episode="truncate").closing_window(6)
        (4, 6)
        """
        n, length = integer("n", n, minimum=0), self.sequence_length
        if n == 0 or length is None:
            return (0, n) if n else None
        missing = self._num_missing(n, length)
        if missing and self.end_of_episode is EndOfEpisode.TRUNCATE:
            return (n + missing - length, n)
        if missing and self.end_of_episode is EndOfEpisode.ALIGN_END and n >= length:
            return (n - length, n)
        return None

    def _num_missing(self, n: int, length: int) -> int:
        """Return m of the table: 0 if a regular window is complete at step count n."""
        return length - n if n < length else (length - n) % self.stride_length

    def windows(self, n: int) -> list[tuple[int, int]]:
        """Return all windows of a complete `n`-step episode, in the order of writing.

        stop - start is L, except for a whole episode and for a closing window of TRUNCATE.

        >>> WindowSpec(3, stride_length=2, end_of_episode="cover").windows(6)
        [(0, 3), (2, 5), (4, 7)]
        """
        n = integer("n", n, minimum=0)
        closing = self.closing_window(n)
        return self.spanning_windows(n + self.num_padding(n)) + ([closing] if closing else [])

    def spanning_windows(self, num_steps: int) -> list[tuple[int, int]]:
        """Return the windows of a stream of `num_steps` steps without a reset of c; `end_of_episode` is ignored.

        Source: TF-Agents `ReverbTrajectorySequenceObserver`, Acme CONTINUE.

        >>> WindowSpec(4, stride_length=4).spanning_windows(8)
        [(0, 4), (4, 8)]
        """
        num_steps = integer("num_steps", num_steps, minimum=0)
        length, stride = self.sequence_length or 0, self.stride_length
        return [(start, start + length) for start in range(0, self.num_windows(num_steps) * stride, stride)]

    def num_dropped(self, n: int) -> dict[str, int]:
        """Return the number of steps of an `n`-step episode that are in no window, by reason; empty if there are none.

        The reasons are `SHORT_EPISODE`, `STRIDE_GAP` and `UNALIGNED_TAIL`; O(1).

        >>> WindowSpec(4, stride_length=3).num_dropped(6)
        {'unaligned_tail': 2}
        """
        n = integer("n", n, minimum=0)
        if n == 0 or self.sequence_length is None or self.closing_window(n):
            return {}
        num_windows = self.num_windows(n + self.num_padding(n))
        if not num_windows:
            return {SHORT_EPISODE: n}
        last_stop = (num_windows - 1) * self.stride_length + self.sequence_length
        gap = max(0, self.stride_length - self.sequence_length)
        dropped = {STRIDE_GAP: gap * (num_windows - 1), UNALIGNED_TAIL: max(0, n - last_stop)}
        return {reason: count for reason, count in dropped.items() if count}

    def preview(self, n: int) -> str:
        """Draw the windows of an `n`-step episode as text, one per line: B is the boundary step, P padding.

        >>> print(WindowSpec(4, stride_length=3, end_of_episode="pad").preview(6))
        step     0 1 2 3 4 B
        0:4      0 1 2 3
        dropped          4 B
        covered 4 of 6 steps; dropped: unaligned_tail 2
        """
        n = integer("n", n, minimum=0)
        windows, reasons = self.windows(n), self.num_dropped(n)
        num_columns = max([n, *(stop for _, stop in windows)])
        labels = [str(step) if step < n - 1 else "B" if step < n else "P" for step in range(num_columns)]
        margin, width = max(8, 2 * len(str(num_columns)) + 2), max(map(len, labels), default=0)
        dropped = set(range(n)).difference(*(range(*window) for window in windows))

        def line(name: str, steps: range | set[int]) -> str:
            cells = [label if step in steps else "" for step, label in enumerate(labels)]
            return f"{name:{margin}} {' '.join(cell.rjust(width) for cell in cells)}".rstrip()

        lines = [line("step", range(num_columns)), *(line(f"{a}:{b}", range(a, b)) for a, b in windows)]
        lines += [line("dropped", dropped)] if dropped else []
        summary = "; dropped: " + ", ".join(f"{reason} {count}" for reason, count in reasons.items()) if reasons else ""
        return "\n".join([*lines, f"covered {n - len(dropped)} of {n} steps{summary}"])


@functools.cache
def _warn_of_gap(length: int, stride: int) -> None:
    warnings.warn(
        f"`stride_length` {stride} > `sequence_length` {length}: {stride - length} of every {stride} steps will be in "
        f"no window. Lower `stride_length` to {length} to keep them.",
        stacklevel=4,  # past __post_init__ and the generated __init__: the caller of WindowSpec()
    )
