"""Any bytes of a response give a learner samples or a typed error, within the memory limit.

`make fuzz` runs a million mutations; the default a few thousand of the same.
"""

from __future__ import annotations

import os
import random
import tracemalloc
from typing import Any

import numpy as np
from damage import damaged
from hypothesis import given
from hypothesis import strategies as st
from sampled import chunk, item, response, together

from reverb_writer.decoding.batch_assembler import BatchAssembler
from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import SampleReassembler, Samples
from reverb_writer.reading.whole_samples import WholeSamples

MUTATIONS = int(os.environ.get("REVERB_WRITER_FUZZ", "3000"))
CACHE_BYTES = SAMPLE_BYTES = 1 << 20

_COLUMNS = [np.arange(5), np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8), np.ones(5)]
RECORDED = [
    response(
        (together(1, [11, 12], [(3, 2), (0, 4)], 3), [chunk(key, _COLUMNS) for key in (11, 12)]),
        (together(2, [12], [(1, 3)], 3), [chunk(12, _COLUMNS)]),
    ),
    response(
        (
            item(3, [[(21, 0, 3, 0)], [(22, 1, 1, 0)], [(23, 0, 2, 0)]], is_scalar=(1,)),
            [
                chunk(21, [np.arange(6).reshape(3, 2)], delta_encoded=True),
                chunk(22, [np.array([True, False])]),
                chunk(23, [np.array([b"abc", b""], object)]),
            ],
        )
    ),
]


def receive(message: bytes, assembler: BatchAssembler) -> None:
    """Decode a message as a learner does; only typed errors are expected."""
    try:
        for error in assembler.add(SampleReassembler().feed(message)):
            assert isinstance(error, (FormatError, UnsafeDataError))
        if assembler.num_samples:
            WholeSamples(8, "pad").make(assembler, "")
    except (FormatError, StructureError):
        pass
    finally:
        assembler.begin_next()


def test_recorded_responses_are_good() -> None:
    assembler = BatchAssembler(CACHE_BYTES, SAMPLE_BYTES)
    for message in RECORDED:
        assert assembler.add(SampleReassembler().feed(message)) == []
        assembler.take()


def test_mutated_responses_give_samples_or_typed_errors_within_bounds() -> None:
    rng = random.Random(0)  # noqa: S311  # to be repeated, not secret
    assembler = BatchAssembler(CACHE_BYTES, SAMPLE_BYTES)
    tracemalloc.start()
    try:
        for number in range(MUTATIONS):
            receive(damaged(rng.choice(RECORDED), rng), assembler)
            if number % 1000 == 999:
                # Four layouts, one that replaces another, and a batch while its arrays are enlarged.
                assert tracemalloc.get_traced_memory()[1] < 10 * (CACHE_BYTES + SAMPLE_BYTES)
    finally:
        tracemalloc.stop()


COLUMNS = [
    lambda length, seed: np.arange(length) + seed,
    lambda length, seed: np.arange(length) * -1.5 * seed,
    lambda length, seed: np.full((length, 2), seed, np.int32),  # as large as the two before
    lambda length, seed: np.full((length, 600), seed, np.uint8),
    lambda length, seed: np.full((length, 3, 200), seed, np.uint8),
    lambda length, seed: np.array([b"%d" % seed * length] * length, object),
]
some_chunk = st.tuples(
    st.integers(1, 4), st.integers(1, 6), st.lists(st.sampled_from(COLUMNS), min_size=2, max_size=2), st.booleans()
)  # key, length, columns, whether delta-encoded
some_item = st.tuples(st.lists(st.tuples(some_chunk, st.integers(1, 6)), min_size=1, max_size=3), st.booleans())


@given(st.lists(some_item, min_size=1, max_size=12), st.sampled_from([1, 1500, 4000, 10_000]), st.integers(1, 4))
def test_chunks_that_are_sent_again_with_other_contents_are_refused_or_decoded_within_their_rows(
    items: list[Any], cache_bytes: int, batch_size: int
) -> None:
    """A server may send anything with a key that it has used before; small caches decode some of these chunks."""
    entries, num_rows = [], []
    for number, (named, is_complete) in enumerate(items):
        slices = [(0, min(length, rows)) for (_, length, _, _), rows in named]
        chunks = {
            key: chunk(key, [column(length, number) for column in columns], delta_encoded=delta_encoded)
            for (key, length, columns, delta_encoded), _ in named
        }
        keys = [one[0] for one, _ in named]
        entries.append((together(number, keys, slices, 2), list(chunks.values())[not is_complete :]))
        num_rows.append(sum(rows for _, rows in slices))
    assembler = BatchAssembler(cache_bytes, SAMPLE_BYTES)
    samples = SampleReassembler().feed(response(*entries))
    while samples:
        some, samples = samples[:batch_size], samples[batch_size:]
        errors = assembler.add(some)
        assert all(isinstance(error, (FormatError, UnsafeDataError)) for error in errors)
        assert assembler.num_samples == len(some) - len(errors)
        for columns, info, _ in assembler.take_each(None):
            assert list(map(len, columns)) == [num_rows[info.key]] * 2


def test_chunk_that_has_changed_when_it_is_decoded_again_is_refused() -> None:
    """The cache holds one of two chunks: the first is evicted for the second, and sent again with other contents."""
    first, second = chunk(1, [np.arange(4)]), chunk(2, [np.arange(4)])
    for other in (chunk(1, [np.arange(4) * 0.5]), chunk(1, [np.arange(3)]), chunk(3, [np.arange(4)])):
        assembler = BatchAssembler(32, SAMPLE_BYTES)
        of_both = together(2, [1, 2], [(0, 4), (0, 4)], 1), [other, second]
        good, bad = SampleReassembler().feed(response((together(1, [1], [(0, 4)], 1), [first]), of_both))
        (error,) = assembler.add(Samples.of([good, bad]))
        assert isinstance(error, FormatError)
        assert assembler.add(Samples.of([good])) == []
        columns, *_ = assembler.take()
        assert np.concatenate(columns[0].split()).tolist() == 2 * [0, 1, 2, 3]


@given(st.binary(max_size=200))
def test_any_trajectory_gives_samples_or_typed_errors(flat: bytes) -> None:
    made = messages.SampledResponse()
    made.entries.add(end_of_sequence=True).info.item.flat_trajectory = flat
    receive(made.SerializeToString(), BatchAssembler(CACHE_BYTES, SAMPLE_BYTES))
