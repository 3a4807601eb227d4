"""Which columns the signature of a table describes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec, check_signature

F4 = np.dtype(np.float32)


def check(signature: Any, *shapes: tuple[int, ...], time: tuple[int | None, ...] | None = None) -> None:
    times = None if time is None else [time] * len(shapes)
    check_signature("replay", signature, [f"leaf{n}" for n in range(len(shapes))], [F4] * len(shapes), shapes, times)


@pytest.mark.parametrize(
    ("of_table", "time"),
    [
        ((None, 3), None),
        ((5, 3), (5,)),
        ((None, None), (5,)),
        ((None, 3), (None,)),
        ((3,), None),
        ((None,), None),
        (None, None),
    ],
)
def test_window_or_step_of_the_signature_is_taken(of_table: Any, time: Any) -> None:
    check({"x": ArraySpec(of_table, F4)}, (3,), time=time)


@pytest.mark.parametrize(
    ("of_table", "time"),
    [((None, 4), None), ((5, 3), (4,)), ((5, 4), (5,)), ((None, 3, 1), None), ((4,), None), ((), None)],
)
def test_other_shapes_are_refused_by_leaf(of_table: Any, time: Any) -> None:
    with pytest.raises(rw.errors.StructureError, match=r"leaf `leaf0`: float32 .* but table `replay` holds float32"):
        check({"x": ArraySpec(of_table, F4)}, (3,), time=time)


def test_dtype_and_number_of_leaves_are_those_of_the_signature() -> None:
    with pytest.raises(rw.errors.StructureError, match="but table `replay` holds int32"):
        check({"x": ArraySpec((None, 3), np.dtype(np.int32))}, (3,))
    with pytest.raises(rw.errors.StructureError, match=r"its signature has 1 leaves \(x\), got 2 \(leaf0, leaf1\)"):
        check({"x": ArraySpec((None, 3), F4)}, (3,), (3,))


def test_leaves_are_steps_together_or_windows_together() -> None:
    """A signature `[None, 2]` is a step of shape (?, 2) or windows of shape (2,): the other leaf tells which."""
    check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((), F4)}, (7, 2), ())
    check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((None,), F4)}, (2,), ())
    with pytest.raises(rw.errors.StructureError, match="leaf `leaf0`"):
        check({"a": ArraySpec((None, 2), F4), "b": ArraySpec((None,), F4)}, (7, 2), ())
