"""Samples of all writers become columns, with a cache of any size; contradictory samples are refused."""

from __future__ import annotations

import gc
import re
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled import chunk, item, response, together

from reverb_writer.decoding import batch_assembler
from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.decoding.chunks import ChunkRing, EncodedChunk
from reverb_writer.decoding.samples import Column
from reverb_writer.decoding.table_structure import TableStructure
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import SampleReassembler, Samples
from reverb_writer.protocol.signatures import ArraySpec


def samples_of(message: bytes) -> Samples:
    return SampleReassembler().feed(message)


def assembled(message: bytes, **bounds: int) -> tuple[list[Column], Any]:
    assembler = BatchAssembler(bounds.get("cache", 1 << 20), bounds.get("sample", 1 << 20))
    for error in assembler.add(samples_of(message)):
        raise error
    columns, info, _ = assembler.take()
    return columns, info


def test_window_over_two_chunks() -> None:
    chunks = [chunk(7, [[0, 1, 2], [[0.0], [0.1], [0.2]]]), chunk(1 << 60, [[3, 4, 5], [[0.3], [0.4], [0.5]]])]
    columns, infos = assembled(response((together(9, [7, 1 << 60], [(1, 2), (0, 2)], 2), chunks)))
    assert columns[0].rows.tolist() == [1, 2, 3, 4]
    assert columns[1].rows.tolist() == [[0.1], [0.2], [0.3], [0.4]]
    assert columns[0].lengths.tolist() == [4]
    assert (infos.keys, infos.priorities, infos.probabilities) == (9, 1.5, 0.25)
    assert (infos.table_sizes, infos.times_sampled) == (4, 2)


def test_chunks_of_items_that_are_read_once_are_forgotten_after_a_batch_that_is_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_assembler, "_READ_ONCE_BYTES", 3 * 8)
    assembler = BatchAssembler(1 << 20, 1 << 20, reads_once=True)

    def batch(*items: int) -> list[int]:
        of_items = [(together(key, [key], [(0, 2)], 2), [chunk(key, [[key, key], [b"a", b"b"]])]) for key in items]
        assert assembler.add(samples_of(response(*of_items))) == []
        numbers, strings = assembler.take()[0]
        assert strings.rows.tolist() == [b"a", b"b"] * len(items)
        found: list[int] = numbers.rows.tolist()
        return found

    # A chunk has 16 bytes of integers, 16 of pointers, and two of content with its two lengths.
    for first in range(1, 9, 2):
        assert batch(first, first + 1) == [first, first, first + 1, first + 1]
        assert assembler.cache_bytes == 0
    assert batch(1) == [1, 1]
    assert assembler.cache_bytes == 0
    monkeypatch.setattr(batch_assembler, "_READ_ONCE_BYTES", 1 << 20)
    assert batch(2) == [2, 2]
    assert assembler.cache_bytes == 36


def test_delta_encoded_scalar_and_string_columns() -> None:
    chunks = [
        chunk(1, [[[1], [1], [1]]], delta_encoded=True),
        chunk(2, [[2.0, 3.0, 4.0]]),
        chunk(3, [np.array([b"a", b"", b"ccc"], object)]),
    ]
    one = item(1, [[(1, 0, 3, 0)], [(2, 2, 1, 0)], [(3, 1, 2, 0)]], is_scalar=(1,))
    assembler = BatchAssembler(1 << 20, 1 << 20)
    assert assembler.add(samples_of(response((one, chunks), (one, chunks)))) == []
    for leaves, info, _ in assembler.take_each(None):
        assert leaves[0].tolist() == [[1], [2], [3]]
        assert leaves[1] == 4.0
        assert leaves[2].tolist() == [b"", b"ccc"]
        assert info.key == 1


def test_booleans_empty_rows_and_length_prefixes_that_are_longer_than_needed() -> None:
    made = chunk(1, [[True, False, True], np.zeros((3, 0)), [7, 8, 9]])
    booleans, _, numbers = made.data.tensors
    assert booleans.tensor_content == b"\x03\x08\x01\x00\x01"  # a block of 3 bytes, given as they are
    booleans.tensor_content = b"\x03\x08\xff\x00\x02"  # another writer's
    assert numbers.tensor_content[0] == 24
    numbers.tensor_content = b"\x98\x00" + numbers.tensor_content[1:]  # 24, too
    columns, _ = assembled(response((together(1, [1], [(0, 3)], 3), [made])))
    assert columns[0].rows.view(np.uint8).tolist() == [1, 0, 1]
    assert columns[1].rows.shape == (3, 0)
    assert columns[2].rows.tolist() == [7, 8, 9]


def test_a_column_of_strings_whose_rows_have_none() -> None:
    made = chunk(1, [np.zeros((3, 0), object), [7, 8, 9]])
    columns, _ = assembled(response((together(1, [1], [(0, 3)], 2), [made])))
    assert (columns[0].rows.dtype, columns[0].rows.shape) == (np.dtype(object), (3, 0))
    assert columns[1].rows.tolist() == [7, 8, 9]


def frames(content: Any) -> Any:
    """Return rows that are large beside those of `content`."""
    return content.astype(np.uint8)[:, None] + np.arange(1600).astype(np.uint8)


@given(st.data())
def test_result_does_not_depend_on_the_size_of_the_cache(data: st.DataObject) -> None:
    """A cache of a few rows evicts chunks all the time, also within a sample."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=8))
    starts = np.cumsum([0, *lengths])
    content = {key: np.arange(starts[key], starts[key + 1]) for key in range(len(lengths))}
    entries, expected = [], []
    for number in range(data.draw(st.integers(1, 12))):
        first = data.draw(st.integers(0, int(starts[-1]) - 1))
        stop = data.draw(st.integers(first + 1, int(starts[-1])))
        used = [key for key in content if starts[key] < stop and starts[key + 1] > first]
        pieces = [(max(first - starts[key], 0), min(stop, starts[key + 1]) - max(first, starts[key])) for key in used]
        pieces = [(int(offset), int(length)) for offset, length in pieces]
        one = together(number, used, pieces, 3)
        if data.draw(st.booleans()):  # another writer
            one.flat_trajectory.columns[1].CopyFrom(one.flat_trajectory.columns[0])
        first_column, second_column, _ = one.flat_trajectory.columns
        expected.append((np.arange(first, stop), bool(second_column == first_column)))
        entries.append((one, [chunk(key, [content[key], -content[key], frames(content[key])]) for key in used]))
    assembler = BatchAssembler(data.draw(st.sampled_from([1, 100, 2000, 10_000, 20_000, 1 << 20])), 1 << 20)
    samples = samples_of(response(*entries, *entries))
    expected += expected
    while samples:  # in batches: chunks of the one before are evicted
        size = data.draw(st.integers(1, len(samples)))
        assert assembler.add(samples[:size]) == []
        rows = [rows for rows, _ in expected[:size]]
        of_columns = (rows, [-one if not same else one for one, same in expected[:size]], list(map(frames, rows)))
        if data.draw(st.booleans()):
            all_rows = assembler.rows()
            assert all_rows.info.lengths.tolist() == list(map(len, rows))
            chosen = np.array(data.draw(st.lists(st.integers(0, sum(map(len, rows)) - 1))), np.int64)
            for taken, of_samples in zip(all_rows.take(chosen), of_columns, strict=True):
                np.testing.assert_array_equal(taken, np.concatenate(of_samples)[chosen])
            assembler.begin_next()
        else:
            for column, of_samples in zip(assembler.take()[0], of_columns, strict=True):
                assert column.lengths.tolist() == list(map(len, rows))
                np.testing.assert_array_equal(column.rows, np.concatenate(of_samples))
        samples = samples[size:]
        del expected[:size]


def test_rows_of_known_items_stay_when_many_more_become_known() -> None:
    entries = [(together(n, [1], [(n, 2)], 1), [chunk(1, [np.arange(1000)])]) for n in range(900)]
    assembler = BatchAssembler(1 << 20, 1 << 20)
    for first in (850, 600, 300, 0):
        assert assembler.add(samples_of(response(*entries[first:]))) == []
        columns, *_ = assembler.take()
        assert [rows.tolist() for rows in columns[0].split()] == [[n, n + 1] for n in range(first, 900)]


def test_chunk_that_is_evicted_for_another_one_of_its_item_does_not_evict_all_others() -> None:
    """Five chunks fill the cache. The sixth takes the place of the first, which takes that of the second."""
    chunks = [chunk(n, [np.full(100, n)]) for n in range(6)]
    alone = [(together(n, [n], [(0, 100)], 1), [chunks[n]]) for n in range(5)]
    both = together(9, [0, 5], [(0, 100), (0, 100)], 1), [chunks[0], chunks[5]]
    assembler = BatchAssembler(5 * 800, 1 << 20)
    assert assembler.add(samples_of(response(*alone, both, *alone[2:]))) == []
    assert assembler.num_decoded_chunks == 5 + 2
    columns, *_ = assembler.take()
    assert np.concatenate(columns[0].split())[::100].tolist() == [0, 1, 2, 3, 4, 0, 5, 2, 3, 4]


def test_a_sample_may_be_as_large_as_the_limit() -> None:
    content = np.arange(4)
    num_bytes = content.nbytes + frames(content).nbytes
    message = response((together(1, [1], [(0, 4)], 2), [chunk(1, [content, frames(content)])]))
    columns, _ = assembled(message, sample=num_bytes)
    np.testing.assert_array_equal(columns[1].rows, frames(content))
    with pytest.raises(UnsafeDataError, match="max_sample_bytes"):
        assembled(message, sample=num_bytes - 1)
    repeated = item(1, [[(1, 0, 100, 0)] * 3])
    with pytest.raises(UnsafeDataError, match="max_sample_bytes"):
        assembled(response((repeated, [chunk(1, [np.zeros(100)])])), sample=2399)


def test_one_item_at_a_time_exceeds_the_memory_limit() -> None:
    """In each of ten items another column is large. Each column is a group, and has its own ring."""
    assembler = BatchAssembler(10_000, 1 << 20)
    tracemalloc.start()
    try:
        for large in range(10):
            for rows_of_large in (100_000, 1):  # an item of small chunks follows each large one
                lengths = [rows_of_large if column == large else 1 for column in range(10)]
                keys = [column if length == 1 else 100 + large for column, length in enumerate(lengths)]
                slices = [[(key, 0, length, 0)] for key, length in zip(keys, lengths, strict=True)]
                contents = [chunk(key, [np.full(length, key)]) for key, length in zip(keys, lengths, strict=True)]
                assert assembler.add(samples_of(response((item(large + rows_of_large, slices), contents)))) == []
                columns, *_ = assembler.take()
                assert [column.rows[0] for column in columns] == keys
                assert [len(column.rows) for column in columns] == lengths
                del columns
        assert tracemalloc.get_traced_memory()[0] < 2 * 8 * 100_000
    finally:
        tracemalloc.stop()


def test_chunks_of_a_dropped_assembler_are_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        assembler = BatchAssembler(1 << 20, 1 << 20)
        assert assembler.add(samples_of(response((together(1, [1], [(0, 2)], 1), [chunk(1, [[5, 6, 7]])])))) == []
        ring = weakref.ref(next(iter(assembler._decoder._caches.values())).partitions[0].ring)
        assert ring() is not None
        del assembler
        assert ring() is None
    finally:
        gc.enable()


class Entry:
    """A sample that a test can watch."""

    def __init__(self, entry: Any) -> None:
        self.info, self.data = entry.info, list(entry.data)


def test_a_batch_and_samples_that_wait_keep_no_message_of_others() -> None:
    """One message that was kept for its numbers kept its whole response: 100 MB."""
    entries = [(together(n, [n], [(0, 2)], 1), [chunk(n, [[n, n]])]) for n in range(3)]
    gc.disable()
    try:
        samples = Samples.of([Entry(entry) for entry in samples_of(response(*entries))])
        alive = [weakref.ref(entry) for entry in samples]
        assembler = BatchAssembler(1 << 20, 1 << 20)
        assert assembler.add(samples[:2]) == []
        waiting = samples[2:]
        del samples
        assert [one() is None for one in alive] == [True, True, False]
        columns, info, _ = assembler.take()
        assert (columns[0].rows.tolist(), info.keys.tolist(), waiting.keys.tolist()) == ([0, 0, 1, 1], [0, 1], [2])
    finally:
        gc.enable()


def test_a_cache_that_is_too_small_is_gone_before_chunks_are_decoded_into_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of both is twice the limit."""
    rings = weakref.WeakSet[ChunkRing]()
    num_rings, put = [], ChunkRing.put

    def watched(ring: ChunkRing, key: int, one: EncodedChunk) -> bool:
        rings.add(ring)
        num_rings.append(len(rings))
        return put(ring, key, one)

    monkeypatch.setattr(ChunkRing, "put", watched)
    chunks = [chunk(1, [[1, 2]]), chunk(2, [np.arange(9)])]
    entries = [(together(1, [1], [(0, 2)], 1), chunks[:1]), (together(2, [1, 2], [(0, 2), (0, 9)], 1), chunks)]
    columns, _ = assembled(response(*entries), cache=40)  # five rows
    assert columns[0].rows.tolist() == [1, 2, 1, 2, *range(9)]
    assert num_rings == [1, 1, 1]


def test_samples_of_another_shape_or_dtype_are_refused_and_without_a_structure_are_taken_one_by_one() -> None:
    content = {1: np.ones((2, 1)), 2: np.ones((2, 1)), 3: np.ones((2, 3)), 4: np.ones((2, 1), np.int8)}
    samples = samples_of(response(*[(together(n, [n], [(0, 2)], 1), [chunk(n, [content[n]])]) for n in (1, 3, 4, 2)]))
    assembler = BatchAssembler(1 << 20, 1 << 20, structure=TableStructure("table", None))
    errors = assembler.add(samples)
    assert re.search(r"float64 \[3\], expected float64 \[1\]\. Make the actors", str(errors[0]))
    assert re.search(r"int8 \[1\], expected float64 \[1\]", str(errors[1]))
    assert list(map(type, errors)) == [FormatError] * 2  # a class that users can name
    assert [rows.tolist() for rows in assembler.take()[0][0].split()] == [[[1.0], [1.0]]] * 2
    assembler = BatchAssembler(1 << 20, 1 << 20)
    assert assembler.add(samples) == []
    found = [(info.key, leaf.tolist()) for (leaf,), info, _ in assembler.take_each(None)]
    assert found == [(1, [[1.0], [1.0]]), (3, [[1.0] * 3] * 2), (4, [[1], [1]]), (2, [[1.0], [1.0]])]


def test_items_that_do_not_fit_the_signature_are_foreign(caplog: pytest.LogCaptureFixture) -> None:
    """As dm-reverb's reader, which takes the columns in the order of the signature: `a`, then `b`."""
    signature = {"b": ArraySpec((2, 3), np.dtype("float32")), "a": ArraySpec((2,), np.dtype("int64"))}
    rows: list[Any] = [[5, 6], np.ones((2, 3), np.float32)]
    good, swapped = item(1, [[(1, 0, 2, 0)], [(1, 0, 2, 1)]]), item(2, [[(1, 0, 2, 1)], [(1, 0, 2, 0)]])
    scalar, fewer = item(3, [[(1, 0, 1, 0)], [(1, 0, 2, 1)]], is_scalar=(0,)), item(4, [[(1, 0, 2, 0)]])
    entries = [(one, [chunk(1, rows)]) for one in (swapped, good, scalar, fewer, swapped)]
    wide = (item(5, [[(2, 0, 2, 0)], [(2, 0, 2, 1)]]), [chunk(2, [[5, 6], np.ones((2, 4), np.float32)])])
    assembler = BatchAssembler(1 << 20, 1 << 20, structure=TableStructure("table", signature))
    assert assembler.add(samples_of(response(*entries, wide))) == []
    assert assembler.num_foreign == 5
    columns, info, _ = assembler.take()
    assert info.keys.tolist() == [1]
    assert {name: column.rows.tolist() for name, column in assembler.pack(columns).items()} == {
        "a": [5, 6],
        "b": [[1.0] * 3] * 2,
    }
    (warning,) = [record.getMessage() for record in caplog.records if "foreign_items" in record.getMessage()]
    assert "leaf `column 0`: float32 (3,), but table `table` holds int64 () in `a`" in warning


GOOD = (together(8, [1], [(0, 2)], 1), [chunk(1, [[5, 6, 7]])])


@pytest.mark.parametrize(
    ("one", "chunks", "message"),
    [
        (together(1, [2], [(0, 2)], 1), [chunk(1, [[1, 2]])], "chunk 2, which its sample does not contain"),
        (together(1, [2], [(0, 3)], 1), [chunk(2, [[1, 2]])], r"rows 0\+3 of a chunk of 2"),
        (together(1, [1], [(2, 2)], 1), [], r"rows 2\+2 of a chunk of 3"),
        (item(1, [[(2, 0, 2, 1)]]), [chunk(2, [[1, 2]])], "tensor 1 of a chunk of 1"),
        (item(1, []), [], "without columns"),
        (item(1, [[]]), [], "impossible slices"),
        (item(1, [[(2, -1, 1, 0)]]), [chunk(2, [[1, 2]])], "impossible slices"),
        (item(1, [[(2, 0, 2, 0)]], is_scalar=(0,)), [chunk(2, [[1, 2]])], "more than one row"),
        (together(1, [2, 3], [(0, 2), (0, 1)], 1), [chunk(2, [[1, 2]]), chunk(3, [[0.5]])], "differ in dtype or shape"),
        (together(1, [2], [(0, 1)], 1), [chunk(2, [5])], "no rows"),
    ],
)
def test_contradictory_sample_is_refused_and_changes_nothing(one: Any, chunks: Any, message: str) -> None:
    assembler = BatchAssembler(1 << 20, 1 << 20)
    (error,) = assembler.add(samples_of(response(GOOD, (one, chunks), GOOD)))
    assert isinstance(error, FormatError)
    assert re.search(message, str(error))
    columns, infos, _ = assembler.take()
    assert columns[0].rows.tolist() == [5, 6, 5, 6]
    assert len(infos.keys) == 2


def test_each_sample_left_out_has_one_error_and_the_others_keep_their_order() -> None:
    entries: list[Any] = [(together(n, [n], [(0, 1)], 1), [chunk(n, [[n]])]) for n in range(5)]
    entries[1] = (together(1, [1], [(0, 1)], 1), [])
    entries[3] = (together(3, [3], [(0, 7)], 1), [chunk(3, [[3]])])
    variant = messages.ChunkData(chunk_key=9)
    variant.data.tensors.add(dtype=messages.DataType.DT_VARIANT)
    entries.append((together(9, [9], [(0, 1)], 1), [variant]))
    assembler = BatchAssembler(1 << 20, 1 << 20)
    errors = assembler.add(samples_of(response(*entries)))
    assert list(map(type, errors)) == [FormatError, FormatError, UnsafeDataError]
    assert ["chunk 1" in str(errors[0]), "rows 0+7" in str(errors[1])] == [True, True]
    assert assembler.num_samples == 3
    columns, infos, _ = assembler.take()
    assert columns[0].rows.tolist() == [0, 2, 4]
    assert infos.keys.tolist() == [0, 2, 4]
    assert assembler.num_samples == 0
