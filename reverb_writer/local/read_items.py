"""The items of an insert request, in groups of similar items.

Items of our writers differ in a few columns of bytes, so they are decoded many at once. Items of other writers are
parsed one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from reverb_writer.protocol import messages
from reverb_writer.protocol.item_encoding import DecodedItems, decode_items
from reverb_writer.protocol.trajectory_parsing import ItemLayout, Parsed, Slice, parse_trajectory

Slices = Sequence[Sequence[Slice]]
"""The slices of an item, by group of columns."""


class ItemGroup(NamedTuple):
    """Items of one table, of one layout, with equally long trajectories."""

    table: str
    layout: ItemLayout
    numbers: Sequence[int]  # places of the items in the request
    keys: Sequence[int]
    priorities: Sequence[float]
    trajectories: Sequence[bytes]  # one FlatTrajectory per item
    slices: Sequence[Slices]
    # Runs of items with the same chunks: the first item, and the highest used tensor of each chunk, by key.
    runs: Sequence[tuple[int, dict[int, int]]]


def read_items(items: Sequence[bytes]) -> Iterator[ItemGroup]:
    """Yield the items of a request, each a PrioritizedItem.

    Raises:
        DecodeError, FormatError: an item is damaged.
    """
    by_size: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        by_size.setdefault(len(item), []).append(number)
    for numbers in by_size.values():
        group = [items[number] for number in numbers]
        first = messages.StoredItem.FromString(group[0])
        parsed = parse_trajectory(first.flat_trajectory)
        decoded = None
        if len(group) > 1:
            decoded = decode_items(group, first.table, len(parsed[1][0]), len(parsed[0].is_scalar))
        if decoded is not None:
            yield _decoded_group(first.table, parsed[0], decoded, numbers, group)
            continue
        yield _group_of_one(first, parsed, numbers[0])
        for number, item in zip(numbers[1:], group[1:], strict=True):
            read = messages.StoredItem.FromString(item)
            yield _group_of_one(read, parse_trajectory(read.flat_trajectory), number)


def _decoded_group(
    table: str, layout: ItemLayout, decoded: DecodedItems, numbers: Sequence[int], items: Sequence[bytes]
) -> ItemGroup:
    chunk_keys, last_tensor = decoded.chunk_keys, len(layout.is_scalar) - 1
    numbers_of = [array.ravel().tolist() for array in (chunk_keys, decoded.offsets, decoded.lengths)]
    every_slice = zip(*numbers_of, strict=True)
    slices = list(zip(zip(*[every_slice] * chunk_keys.shape[1], strict=True), strict=True))  # for one group of columns
    starts = [0, *((chunk_keys[1:] != chunk_keys[:-1]).any(1).nonzero()[0] + 1).tolist()]
    runs = [
        (start, dict.fromkeys(keys, last_tensor))
        for start, keys in zip(starts, chunk_keys[starts].tolist(), strict=True)
    ]
    trajectories = [item[decoded.trajectory_at :] for item in items]
    return ItemGroup(
        table, layout, numbers, decoded.keys.tolist(), decoded.priorities.tolist(), trajectories, slices, runs
    )


def _group_of_one(read: Any, parsed: Parsed, number: int) -> ItemGroup:
    layout, slices = parsed
    runs = [(0, tensors_named(parsed))]
    return ItemGroup(read.table, layout, [number], [read.key], [read.priority], [read.flat_trajectory], [slices], runs)


def tensors_named(parsed: Parsed) -> dict[int, int]:
    """Return the keys of an item's chunks in order, with the highest tensor that the item uses of each."""
    layout, slices = parsed
    tensors: dict[int, int] = {}
    for group, pieces in zip(layout.groups, slices, strict=True):
        tensor = max(group.tensors)
        for key, _, _ in pieces:
            tensors[key] = max(tensors.get(key, 0), tensor)
    return tensors
