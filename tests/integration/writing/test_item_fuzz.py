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


def test_items_of_all_lengths_come_back_compressed_or_not(place: Place) -> None:
    """Items of 1 byte to 1 MB: on both sides of the size from which messages are read as views."""
    rng = np.random.default_rng(0)
    written = []
    for number, power in enumerate(rng.permutation(np.linspace(0, 20, 64))):
        noise = rng.integers(0, 256, int(2**power), np.uint8)
        written.append({"x": noise * np.uint8(number % 3 > 0), "y": rng.standard_normal(1 + number)})
    with rw.ItemWriter(place.client, "a") as writer:
        for item in written * 2:
            writer.write(item)
    found = [sample.data for sample in place.client.sample("a", 64)]
    with rw.ReplayDataset(place.client, "a", 8, collate="pad") as dataset:
        for first in range(0, 64, 8):
            batch = next(dataset).data
            for of_item, *leaves in zip(written[first : first + 8], batch["x"], batch["y"], strict=True):
                found.append({name: leaf[: len(of_item[name])] for name, leaf in zip("xy", leaves, strict=True)})
                assert not any(leaf[len(of_item[name]) :].any() for name, leaf in zip("xy", leaves, strict=True))
    for expected, item in zip(written * 2, found, strict=True):
        np.testing.assert_array_equal(item["x"], expected["x"])
        np.testing.assert_array_equal(item["y"], expected["y"])


def test_an_item_of_100_mb_comes_back(place: Place) -> None:
    """It is larger than the default bound of bytes in flight allows beside another item."""
    large = np.random.default_rng(0).integers(0, 256, 100_000_000, np.uint8)
    with rw.ItemWriter(place.client, "a") as writer:
        for _ in range(2):
            writer.write({"x": large})
    for sample in place.client.sample("a", 2):
        np.testing.assert_array_equal(sample.data["x"], large)
