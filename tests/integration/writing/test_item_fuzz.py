"""Items of any nests, lengths and dtypes on each server: the property of `test_whole_items`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from item_nests import assert_round_trip, items
from kinds import contents
from reading import Place

import reverb_writer as rw

pytestmark = [contents, pytest.mark.slow]


@settings(max_examples=100)
@given(nests=st.lists(items(), min_size=1, max_size=4))
def test_items_come_back_as_written_on_each_server(place: Place, nests: list[Any]) -> None:
    assert_round_trip(place, nests)


def test_an_item_of_100_mb_comes_back(place: Place) -> None:
    """It is larger than the default bound of bytes in flight allows beside another item."""
    large = np.random.default_rng(0).integers(0, 256, 100_000_000, np.uint8)
    with rw.ItemWriter(place.client, "a") as writer:
        for _ in range(2):
            writer.write({"x": large})
    for sample in place.client.sample("a", 2):
        np.testing.assert_array_equal(sample.data["x"], large)
