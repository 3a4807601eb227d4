"""Windows worked by hand, and refusals. docs/explanation/windows.md has the drawings, and a test runs them."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import numpy as np
import pytest

from reverb_writer import windows
from reverb_writer.errors import SpecError
from reverb_writer.windows import EndOfEpisode, WindowSpec

DROP, PAD, TILE, COVER, TRUNCATE, ALIGN_END = EndOfEpisode

# S > L warns once per process and pair; only the test of the warning minds.
pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")


def test_spanning_windows_are_the_same_whatever_the_end_mode() -> None:
    for mode in EndOfEpisode:
        assert WindowSpec(4, 3, mode).spanning_windows(9) == [(0, 4), (3, 7)]


def test_whole_episode_is_one_window_at_the_boundary() -> None:
    spec = WindowSpec.whole_episode()
    assert spec == WindowSpec(None)
    assert spec.num_windows(100) == 0
    assert (spec.num_padding(5), spec.closing_window(5), spec.windows(5)) == (0, (0, 5), [(0, 5)])
    assert (spec.num_padding(0), spec.closing_window(0), spec.windows(0)) == (0, None, [])
    assert spec.num_dropped(5) == spec.num_dropped(0) == {}
    assert spec.spanning_windows(5) == []


NO_LENGTHS = [(0, "must be >= 1, got 0."), *((no, f"must be an integer, got {no!r} (") for no in (2.0, "2", np.True_))]
MODES = "must be one of 'drop', 'pad', 'tile', 'cover', 'truncate', 'align_end', got"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(((3, value), f"`stride_length` {refusal}") for value, refusal in NO_LENGTHS),
        ((3, None), "`stride_length` must be an integer, got None (NoneType)."),
        *(((value,), f"`sequence_length` {refusal}") for value, refusal in NO_LENGTHS),
        ((True,), "`sequence_length` must be an integer, got True (bool). Pass None for whole episodes."),
        *(((3, 1, mode), f"`end_of_episode` {MODES} {mode!r}.") for mode in ("keep", "DROP", None, 1, ["drop"])),
        # These modes keep every step.
        *(
            ((3, 4, mode), f"<= `sequence_length` with {mode.name}, got 4 > 3.")
            for mode in (COVER, TRUNCATE, ALIGN_END)
        ),
        *(((None, *other), "None needs `stride_length` 1 and ") for other in ((2, DROP), (1, PAD), (1, ALIGN_END))),
    ],
)
def test_spec_that_cannot_work_is_refused(fields: tuple[Any, ...], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        WindowSpec(*fields)


@pytest.mark.parametrize("spec", [WindowSpec(3), WindowSpec.whole_episode()])
@pytest.mark.parametrize("method", ["num_padding", "closing_window", "windows", "num_dropped", "preview"])
@pytest.mark.parametrize(
    ("n", "refusal"),
    [
        (-1, "`n` must be >= 0, got -1."),
        (2.5, "`n` must be an integer, got 2.5 (float)."),
        (False, "`n` must be an integer, got False (bool)."),
    ],
)
def test_episode_length_that_cannot_be_is_refused(spec: WindowSpec, method: str, n: Any, refusal: str) -> None:
    for call, name in ((getattr(spec, method), "`n`"), (spec.spanning_windows, "`num_steps`")):
        with pytest.raises(SpecError) as error:
            call(n)
        assert str(error.value) == refusal.replace("`n`", name)


@pytest.mark.parametrize("mode", [DROP, PAD, TILE])
def test_stride_beyond_the_window_warns_once_in_a_process(mode: EndOfEpisode, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if in a fresh process. Later tests of this process must find the cache as it was.
    monkeypatch.setattr(windows, "_warn_of_gap", functools.cache(windows._warn_of_gap.__wrapped__))
    with pytest.warns(UserWarning, match="`stride_length`") as caught:
        WindowSpec(3, 5, mode)
    (warning,) = caught
    assert str(warning.message) == (
        "`stride_length` 5 > `sequence_length` 3: 2 of every 5 steps will be in no window. "
        "Lower `stride_length` to 3 to keep them."
    )
    assert warning.filename == __file__

    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        for other in (DROP, PAD, TILE):
            WindowSpec(3, 5, other)
        WindowSpec(3, 3, mode)
    assert again == []


@pytest.mark.parametrize("integer", [np.int8, np.uint64, np.array])
def test_numpy_integers_are_stored_as_plain_ones(integer: type) -> None:
    spec = WindowSpec(integer(3), integer(2), "tile")
    assert (type(spec.sequence_length), type(spec.stride_length)) == (int, int)
    assert spec == WindowSpec(3, 2, "tile")
    assert {type(bound) for window in spec.windows(integer(6)) for bound in window} == {int}
    assert spec.preview(integer(6)) == spec.preview(6)
    assert type(WindowSpec(9).num_dropped(integer(6))["short_episode"]) is int


def test_preview_keeps_its_columns_when_step_numbers_are_long() -> None:
    header, _, last, _ = WindowSpec(1000, 1000).preview(2000).splitlines()
    assert last.startswith("1000:2000 ")
    assert header.index("1998") == last.index("1998")
