"""Items of any nests, lengths and dtypes, of a byte to some MB, come back as they were written."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from item_nests import assert_round_trip, items
from reading import Place


@settings(max_examples=60)
@given(nests=st.lists(items(), min_size=1, max_size=4))
def test_items_come_back_as_written(place: Place, nests: list[Any]) -> None:
    assert_round_trip(place, nests)
