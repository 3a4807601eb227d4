"""Whatever bytes come for a response, a learner gets samples or a typed error, and memory stays bounded.

`make fuzz` runs a million mutations; the default a few thousand of the same.
"""

from __future__ import annotations

import os
import random
import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from sampled import chunk, item, response, together

from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.reading.batches import collate
from reverb_writer.structure import packer
from reverb_writer.wire.assembly import Assembly
from reverb_writer.wire.responses import Splicer

MUTATIONS = int(os.environ.get("REVERB_WRITER_FUZZ", "3000"))
CACHE_BYTES = SAMPLE_BYTES = 1 << 20

_FRAMES = np.arange(5 * 64, dtype=np.uint8).reshape(5, 8, 8)
RECORDED = [
    response(
        (
            together(1, [11, 12], [(3, 2), (0, 4)], 3),
            [chunk(key, [np.arange(5), _FRAMES, np.ones(5)]) for key in (11, 12)],
        ),
        (together(2, [12], [(1, 3)], 3), [chunk(12, [np.arange(5), _FRAMES, np.ones(5)])]),
    ),
    response(
        (
            item(3, [[(21, 0, 3, 0)], [(22, 1, 1, 0)], [(23, 0, 2, 0)]], squeezed=(1,)),
            [
                chunk(21, [np.arange(6).reshape(3, 2)], delta_encoded=True),
                chunk(22, [np.array([True, False])]),
                chunk(23, [np.array([b"abc", b""], object)]),
            ],
        )
    ),
]


def learn(message: bytes, assembly: Assembly) -> None:
    """Do what a learner does with a message; let nothing but the typed errors through."""
    try:
        for sample in Splicer().feed(message):
            try:
                assembly.add(sample)
            except (FormatError, UnsafeDataError):
                continue
        if assembly.num_samples:
            collate(*assembly.take(), packer(None), "list", "")
    except (FormatError, StructureError):
        pass


def mutated(message: bytes, rng: random.Random) -> bytes:
    content = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(content))
        kind = rng.randrange(5)
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            content[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:  # five kinds
            del content[at : at + rng.randrange(1, 9)]
        elif kind == 3:  # five kinds
            content[at:at] = content[at : at + rng.randrange(1, 33)]
        else:
            content[at : at + 4] = rng.randbytes(4)
        if not content:
            break
    return bytes(content)


def test_recorded_responses_are_good() -> None:
    assembly = Assembly(CACHE_BYTES, SAMPLE_BYTES)
    for message in RECORDED:
        for sample in Splicer().feed(message):
            assembly.add(sample)
        assembly.take()


def test_mutated_responses_give_samples_or_typed_errors_within_bounds() -> None:
    rng = random.Random(0)  # noqa: S311  # to be repeated, not secret
    assembly = Assembly(CACHE_BYTES, SAMPLE_BYTES)
    tracemalloc.start()
    try:
        for number in range(MUTATIONS):
            learn(mutated(rng.choice(RECORDED), rng), assembly)
            if number % 1000 == 999:
                assert tracemalloc.get_traced_memory()[1] < 8 * (CACHE_BYTES + SAMPLE_BYTES)
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
def test_any_bytes_give_samples_or_typed_errors(message: bytes) -> None:
    learn(message, Assembly(CACHE_BYTES, SAMPLE_BYTES))


@given(st.binary(max_size=200))
def test_any_trajectory_gives_samples_or_typed_errors(flat: bytes) -> None:
    from reverb_writer.wire import messages

    made = messages.SampledResponse()
    made.entries.add(end_of_sequence=True).info.item.flat_trajectory = flat
    learn(made.SerializeToString(), Assembly(CACHE_BYTES, SAMPLE_BYTES))
