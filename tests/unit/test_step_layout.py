"""The columns of a step, with a mask after them and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverb_writer.errors import StructureError
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.steps import StepStructure
from reverb_writer.writing.step_layout import StepLayout

STEP: Any = {"obs": np.zeros(2, np.float32), "n": np.int64(0)}
INTEGER = ArraySpec((), np.dtype(np.int64))
FLOATS = ArraySpec((2,), np.dtype(np.float32))
FLAG = ArraySpec((), np.dtype(bool))


def layout(*, mask: bool, batch_size: int | None = None) -> StepLayout:
    example: Any = STEP
    if batch_size is not None:
        example = {name: np.zeros((batch_size, *leaf.shape), leaf.dtype) for name, leaf in STEP.items()}
    return StepLayout(StepStructure(example, batch_size=batch_size), mask=mask)


def test_columns_are_the_leaves_in_the_order_of_their_keys() -> None:
    plain = layout(mask=False)
    assert plain.paths == ("n", "obs")
    assert plain.dtypes == (np.dtype(np.int64), np.dtype(np.float32))
    assert plain.shapes == ((), (2,))
    assert plain.spec == {"n": INTEGER, "obs": FLOATS}
    assert [np.asarray(leaf).tolist() for leaf in plain.padding_step] == [0, [0, 0]]


def test_mask_is_one_more_column_beside_the_step() -> None:
    masked = layout(mask=True)
    assert masked.paths == ("n", "obs", "mask")
    assert masked.dtypes[2] == np.dtype(bool)
    assert masked.shapes == ((), (2,), ())
    assert masked.spec == ({"n": INTEGER, "obs": FLOATS}, FLAG)
    assert masked.padding_step[2] == np.False_


@pytest.mark.parametrize("mask", [False, True])
def test_real_step_has_a_true_mask(mask: bool) -> None:
    columns = layout(mask=mask).flatten({"obs": np.ones(2, np.float32), "n": np.int64(3)}, 0)
    assert [np.asarray(column).tolist() for column in columns] == [3, [1, 1], True][: 2 + mask]


@pytest.mark.parametrize("mask", [False, True])
def test_steps_of_several_environments_have_a_mask_each(mask: bool) -> None:
    step = {"obs": np.ones((3, 2), np.float32), "n": np.arange(3)}
    columns = layout(mask=mask, batch_size=3).flatten(step, 0)
    assert [np.asarray(column).tolist() for column in columns] == [[0, 1, 2], [[1, 1]] * 3, [True] * 3][: 2 + mask]


@pytest.mark.parametrize("mask", [False, True])
def test_priority_functions_get_the_step_without_the_mask(mask: bool) -> None:
    assert layout(mask=mask).pack([1, 2, 3][: 2 + mask]) == {"n": 1, "obs": 2}


def test_arrays_match_if_all_dtypes_and_shapes_do() -> None:
    plain = layout(mask=False)
    numbers, floats = np.zeros(4, np.int64), np.zeros((4, 2), np.float32)
    assert plain.matches([numbers, floats], 4)
    assert not plain.matches([numbers, floats], 3)
    assert not plain.matches([numbers.astype(np.int32), floats], 4)
    assert not plain.matches([numbers, floats[:, :1]], 4)


def test_strings_never_match_since_each_must_be_converted() -> None:
    strings = StepLayout(StepStructure({"text": "a"}), mask=False)
    assert not strings.matches([np.array(["a", "b"], object)], 2)


def test_step_that_differs_is_refused_with_a_mask_too() -> None:
    with pytest.raises(StructureError, match=r"step 5, leaf `obs`: float32 \(3,\)"):
        layout(mask=True).flatten({"obs": np.ones(3, np.float32), "n": np.int64(3)}, 5)
