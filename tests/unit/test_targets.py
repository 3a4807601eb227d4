"""What an observer's arguments mean: kinds of windows, their tables and priorities, and the chunks that suit them."""

from __future__ import annotations

from typing import Any

import pytest

from reverb_writer.errors import SpecError
from reverb_writer.protocol.item_encoding import MAX_CHUNK_LENGTH
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.window_targets import WindowTarget, chunk_length_for, window_targets

DROP = EndOfEpisode.DROP
pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


@pytest.mark.parametrize(
    ("tables", "expected"), [("one", ("one",)), (["b", "a"], ("b", "a")), (("one",), ("one",)), ((), ())]
)
def test_tables_are_a_name_or_several(tables: Any, expected: tuple[str, ...]) -> None:
    assert WindowTarget(WindowSpec(2), tables).tables == expected


@pytest.mark.parametrize("tables", [("a", "a"), ("a", ""), "", ("a", 3), (None,)])
def test_tables_that_are_none_are_refused(tables: Any) -> None:
    with pytest.raises(SpecError, match="`table` must be a name or several different ones"):
        WindowTarget(WindowSpec(2), tables)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf"), "high", None])
def test_priority_that_is_none_is_refused(priority: Any) -> None:
    with pytest.raises(SpecError, match="`priority` must be a finite number >= 0"):
        WindowTarget(WindowSpec(2), ("table",), priority)


# Several kinds of windows.


def test_one_kind_goes_to_all_tables() -> None:
    assert window_targets(["a", "b"], 4, 2, EndOfEpisode.PAD, 3.0, None) == [
        WindowTarget(WindowSpec(4, 2, "pad"), ("a", "b"), 3.0)
    ]


def test_windows_go_to_the_tables_of_their_names_or_their_own() -> None:
    windows: dict[str, WindowSpec | WindowTarget] = {
        "short": WindowSpec(2),
        "long": WindowTarget(WindowSpec(8, 4), ("x", "y"), 0.5),
        "named": WindowTarget(WindowSpec(3), (), 7.0),
    }
    assert window_targets("all", 5, 1, DROP, 2.0, windows) == [
        WindowTarget(WindowSpec(5), ("all",), 2.0),
        WindowTarget(WindowSpec(2), ("short",), 2.0),
        WindowTarget(WindowSpec(8, 4), ("x", "y"), 0.5),
        WindowTarget(WindowSpec(3), ("named",), 7.0),
    ]
    assert len(window_targets(None, None, 1, DROP, 2.0, windows)) == 3


@pytest.mark.parametrize(
    ("table", "length", "windows", "message"),
    [
        (None, None, None, "`table` and `sequence_length` belong together, got None and None"),
        (None, None, {}, "belong together"),
        ("a", None, None, "got 'a' and None. Give both, or `windows` alone."),
        ("a", None, {"b": WindowSpec(2)}, "belong together"),
        (None, 3, {"b": WindowSpec(2)}, "got None and 3"),
        ([], 3, None, "`table` must be a name or several different ones, got none"),
        (["a", "a"], 3, None, "several different ones"),
        (None, None, {"b": 3}, r"`windows\['b'\]` must be a WindowSpec or a WindowTarget, got int"),
        ("a", 0, None, "`sequence_length` must be >= 1, got 0"),
    ],
)
def test_arguments_that_name_no_windows_are_refused(table: Any, length: Any, windows: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        window_targets(table, length, 1, DROP, 1.0, windows)


# Chunks.


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        # One window a chunk where they do not overlap.
        ([(20, 20)], 20),
        ([(1, 1)], 1),
        # The common grid, where a window touches at most four chunks of it.
        ([(20, 10)], 10),
        ([(4, 1)], 1),
        ([(4, 3)], 1),
        ([(12, 9)], 3),
        # The shortest window where the grid is too fine.
        ([(5, 1)], 5),
        ([(20, 1)], 20),
        ([(20, 3)], 20),
        ([(2, 1), (80, 40)], 2),
        ([(40, 40), (80, 40)], 40),
        ([(20_000, 1)], MAX_CHUNK_LENGTH),
        ([(20_000, 20_000)], MAX_CHUNK_LENGTH),
    ],
)
def test_chunks_follow_from_the_windows(windows: list[tuple[int, int]], expected: int) -> None:
    assert chunk_length_for([WindowSpec(*window) for window in windows]) == expected


def test_whole_episodes_take_the_chunks_of_the_windows_beside_them() -> None:
    assert chunk_length_for([WindowSpec.whole_episode()]) == 100
    assert chunk_length_for([WindowSpec.whole_episode(), WindowSpec(20, 10)]) == 10
