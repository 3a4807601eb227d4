"""The bytes of windows that are counted step by step: strings, unknown lengths; and lengths beside a signature's."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from interrupting import EachMoment
from reading import spec

import reverb_writer as rw
from reverb_writer.steps import StepStructure
from reverb_writer.writing.step_layout import ItemSizes, StepLayout
from reverb_writer.writing.window_kinds import WindowTarget


def sizes(limit: int, *lengths: int, mask: bool = False) -> ItemSizes:
    layout = StepLayout(StepStructure({"text": "ab"}), mask=mask)
    return ItemSizes(layout, [WindowTarget(rw.WindowSpec(length)) for length in lengths], limit)


def check(counted: ItemSizes, *texts: Any) -> None:
    for number, text in enumerate(texts, 1):
        counted.check([text], number)


def test_window_of_two_steps_has_the_bytes_of_the_last_two() -> None:
    check(sizes(8, 2), *["aaaa"] * 5)  # 20 bytes in all, 8 in each window
    with pytest.raises(rw.errors.StructureError, match=r"an item of 2 steps takes 9 bytes .* `text` with 5 bytes"):
        check(sizes(8, 2), "aaaa", "aaaa", "aaaaa")


def test_mask_has_a_byte_for_each_step() -> None:
    check(sizes(10, 2, mask=True), "aaaa", "aaaa")
    with pytest.raises(rw.errors.StructureError, match="an item of 2 steps takes 10 bytes"):
        check(sizes(9, 2, mask=True), "aaaa", "aaaa")


@pytest.mark.parametrize("text", ["ab\u00fc", b"abcd", np.array("ab\u00fc"), np.array(["ab", b"cd"], object)], ids=repr)
def test_text_has_the_bytes_of_its_characters(text: Any) -> None:
    check(sizes(4, 1), text)
    with pytest.raises(rw.errors.StructureError, match="an item of 1 steps takes 4 bytes"):
        check(sizes(3, 1), text)


def test_each_length_of_windows_is_checked() -> None:
    check(sizes(8, 1, 2), "aaaa", "aaaa", "aaaa")
    with pytest.raises(rw.errors.StructureError, match="an item of 3 steps takes 12 bytes"):
        check(sizes(8, 1, 3), "aaaa", "aaaa", "aaaa")


def test_step_that_is_counted_again_replaces_itself_and_an_episode_begins_anew() -> None:
    counted = sizes(8, 2)
    check(counted, "aaaa", "aaaa")
    with pytest.raises(rw.errors.StructureError, match="an item of 2 steps takes 10 bytes"):
        counted.check(["aaaaaa"], 2)
    counted.check(["a"], 2)
    counted.check(["aaaaaaa"], 3)
    check(counted, "aaaaaaaa")  # step 1 of another episode


def test_steps_of_a_block_are_checked_too() -> None:
    with rw.LocalServer([rw.TableConfig("a")]) as server:
        with rw.EpisodeObserver(server, "a", 9, max_item_bytes=16) as observer:
            observer.extend({"n": np.arange(2)})
            with pytest.raises(rw.errors.StructureError, match="an item of 3 steps takes 24 bytes"):
                observer.extend({"n": np.arange(1)})
        with rw.EpisodeObserver(server, "a", 9) as observer:
            observer.extend({"text": np.array(["a", "b"], object)})
            with pytest.raises(rw.errors.StructureError, match="step 2, leaf `text`: NoneType is not a string"):
                observer.extend({"text": np.array([None], object)})


def test_interrupt_at_any_moment_of_a_count_leaves_each_step_counted_once() -> None:
    interrupt = EachMoment()
    for _ in interrupt:
        counted = sizes(12, 3)
        check(counted, "aaaa")
        interrupt(lambda counted=counted: counted.check(["aaaa"], 2))  # type: ignore[misc]  # a default
        counted.check(["aaaa"], 2)  # the ring has not taken the step, so it comes again
        counted.check(["aaaa"], 3)  # 12 bytes
        counted.check(["aaaa"], 4)
        with pytest.raises(rw.errors.StructureError, match="an item of 3 steps takes 13 bytes"):
            counted.check(["aaaaa"], 5)
    assert interrupt.moment > 5


@pytest.mark.parametrize(
    ("num_steps", "length", "mode", "message"),
    [
        (4, 4, "drop", ""),
        (4, 3, "drop", "windows of 3 steps, but `x` has 4 steps in its signature. Pass `sequence_length=4`."),
        (4, 4, "truncate", "TRUNCATE makes windows of fewer than 4 steps, but `x` has 4 steps in its signature."),
        (1, 1, "truncate", ""),
        (None, 4, "truncate", ""),
    ],
)
def test_windows_have_the_number_of_steps_that_a_signature_fixes(
    num_steps: int | None, length: int, mode: Any, message: str
) -> None:
    layout = StepLayout(StepStructure({"x": np.zeros(2, np.float32)}), mask=False)
    target = WindowTarget(rw.WindowSpec(length, end_of_episode=mode), ("a",))
    refused = pytest.raises(rw.errors.StructureError, match=f"^table `a`: {re.escape(message)}")
    with refused if message else contextlib.nullcontext():
        layout.check([target], {"a": {"x": spec((num_steps, 2), np.float32)}})
