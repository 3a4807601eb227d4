"""A sampled item as a value."""

from __future__ import annotations

from typing import Any

import numpy as np

import reverb_writer as rw


def test_sample_with_another_field_keeps_the_kinds_of_its_rows() -> None:
    info: Any = None
    sample = rw.Sample.of({"x": np.zeros(2)}, info, np.array([3, 12], np.uint8))
    replaced = sample._replace(data={"x": np.ones(2)})
    assert replaced.data["x"].tolist() == [1, 1]
    assert replaced.kinds is not None
    assert replaced.kinds.tolist() == [3, 12]
