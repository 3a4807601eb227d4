"""Priorities: which numbers are any, and which windows a function is asked about, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from reverb_writer.arguments import check_priority
from reverb_writer.errors import SpecError
from reverb_writer.windows import WindowSpec
from reverb_writer.writing.priorities import EpisodeEnd, WindowPriorities

Window = list[int]


@pytest.mark.parametrize("priority", [0, 0.0, 1, 2.5, 5e-324, np.float32(0.5), np.int64(3), np.array(0.25), True])
def test_finite_number_that_is_not_negative_is_a_priority(priority: Any) -> None:
    checked = check_priority(priority)
    assert type(checked) is float
    assert checked == priority


@pytest.mark.parametrize(
    "priority",
    [-1, -5e-324, float("nan"), float("inf"), -np.inf, "1.0", b"1", None, [1.0], np.zeros(2), 1j, 10**400, object()],
)
def test_whatever_else_is_refused(priority: Any) -> None:
    with pytest.raises(SpecError, match="`priority` must be a finite number >= 0, got "):
        check_priority(priority)


class Recorder:
    """A priority function that keeps the windows that it was asked about, and answers with their sums."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def __call__(self, window: Any) -> float:
        self.windows.append(window.tolist())
        return float(window.sum())


def priorities(*kinds: tuple[WindowSpec, Any]) -> WindowPriorities:
    """Return priorities for steps of one number, which padding steps have as -1."""
    specs, functions = zip(*kinds, strict=True)
    return WindowPriorities(specs, functions, [np.array(-1)], lambda leaves: leaves[0])


def run(asked: WindowPriorities, *numbers: int, first: int = 1) -> None:
    for n, number in enumerate(numbers, first):
        asked.commit(asked.evaluate([np.array(number)], n, None))


def ending(spec: WindowSpec, n: int) -> EpisodeEnd:
    return EpisodeEnd(n, [spec.num_padding(n)], [spec.closing_window(n)], {})


def test_function_is_asked_for_every_window_when_its_last_step_comes() -> None:
    function = Recorder()
    asked = priorities((WindowSpec(3, 2), function))
    run(asked, 1, 2)
    assert function.windows == []
    run(asked, 4, 8, 16, 32, first=3)
    assert function.windows == [[1, 2, 4], [4, 8, 16]]
    assert asked.known(0, [3, 5]).tolist() == [7.0, 28.0]


def test_answers_are_kept_by_kind_and_end_until_they_are_forgotten() -> None:
    one, two = Recorder(), Recorder()
    asked = priorities((WindowSpec(1), one), (WindowSpec(2), 5.0), (WindowSpec(2), two))
    run(asked, 1, 2, 4)
    assert asked.known(2, [2]).tolist() == [3.0]
    assert asked.known(0, [1, 2, 3]).tolist() == [1.0, 2.0, 4.0]
    assert asked.known(2, [3]).tolist() == [6.0]
    asked.forget(2)
    assert asked.known(0, [3]).tolist() == [4.0]
    with pytest.raises(KeyError):
        asked.known(2, [2])


@pytest.mark.parametrize(
    ("mode", "numbers", "windows"),
    [
        ("drop", [1, 2, 3, 4], [[1, 2, 3]]),
        ("pad", [1, 2], [[1, 2, -1]]),
        ("tile", [1, 2, 3, 4], [[1, 2, 3], [3, 4, -1]]),
        ("cover", [1, 2, 3, 4], [[1, 2, 3], [3, 4, -1]]),
        ("truncate", [1, 2, 3, 4], [[1, 2, 3], [3, 4]]),
        ("truncate", [1], [[1]]),
        ("align_end", [1, 2, 3, 4], [[1, 2, 3], [2, 3, 4]]),
    ],
)
@pytest.mark.parametrize("last_step_alone", [True, False])
def test_end_of_an_episode_asks_for_its_windows_too(
    mode: str, numbers: list[int], windows: list[Window], last_step_alone: bool
) -> None:
    function = Recorder()
    spec = WindowSpec(3, 2, mode)
    asked = priorities((spec, function))
    n = len(numbers)
    if last_step_alone:
        run(asked, *numbers[:-1])
        priced = asked.evaluate([np.array(numbers[-1])], n, ending(spec, n))
    else:  # as at a reset
        run(asked, *numbers)
        priced = asked.evaluate(None, n, ending(spec, n))
    asked.commit(priced)
    assert function.windows == windows
    ends = [stop for _, stop in spec.windows(n)]
    assert asked.known(0, ends).tolist() == [sum(window) for window in windows]


def test_whole_episode_is_asked_for_at_its_end() -> None:
    function = Recorder()
    spec = WindowSpec.whole_episode()
    asked = priorities((spec, function))
    run(asked, *range(500))
    asked.commit(asked.evaluate([np.array(500)], 501, ending(spec, 501)))
    assert function.windows == [list(range(501))]
    assert asked.known(0, [501]).tolist() == [125250.0]


def test_next_episode_starts_empty() -> None:
    function = Recorder()
    asked = priorities((WindowSpec(2), function))
    run(asked, 1, 2)
    asked.clear()
    run(asked, 3, 4)
    assert function.windows == [[1, 2], [3, 4]]
    with pytest.raises(KeyError):
        asked.known(0, [1])


def raising(window: Any) -> float:
    raise ZeroDivisionError(str(window.tolist()))


@pytest.mark.parametrize("answer", [lambda _: -1.0, lambda _: float("nan"), lambda _: None, raising])
def test_evaluation_that_fails_changes_nothing(answer: Callable[[Any], Any]) -> None:
    answers: list[Callable[[Any], Any]] = [np.sum, answer, np.sum]
    asked = priorities((WindowSpec(2), lambda window: answers[0](window)))  # noqa: PLW0108  # the first one changes
    run(asked, 1, 2)
    answers.pop(0)
    with pytest.raises((SpecError, ZeroDivisionError)):
        asked.evaluate([np.array(3)], 3, None)
    answers.pop(0)
    run(asked, 4, first=3)
    assert asked.known(0, [2, 3]).tolist() == [3.0, 6.0]


def test_refusal_names_the_window() -> None:
    asked = priorities((WindowSpec(2), lambda _: -0.5))
    run(asked, 1)
    with pytest.raises(
        SpecError, match=r"finite number >= 0, got -0\.5\. The function gave it for the window that ends at step 2\."
    ):
        asked.evaluate([np.array(2)], 2, None)


def test_window_is_the_function_s_own() -> None:
    seen: list[Any] = []

    def spoil(window: Any) -> float:
        seen.append(window.tolist())
        window[:] = 99
        return 0.0

    asked = priorities((WindowSpec(2), spoil))
    leaf = np.array(0)
    for n in range(1, 4):
        leaf[...] = n
        asked.commit(asked.evaluate([leaf], n, None))
    assert seen == [[1, 2], [2, 3]]


def test_strings_reach_the_function_byte_by_byte() -> None:
    seen: list[Any] = []

    def keep(leaves: Sequence[Any]) -> float:
        seen.append(leaves[0].tolist())
        return 0.0

    asked = WindowPriorities([WindowSpec(2)], [keep], [b""], lambda leaves: leaves)
    for n, string in enumerate([b"a\0", b"", b"\xff"], 1):
        asked.commit(asked.evaluate([string], n, None))
    assert seen == [[b"a\0", b""], [b"", b"\xff"]]
