"""An encoded chunk is decoded within its rows or refused, however it is damaged."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.decoding.chunks import EncodedChunk, EncodedChunks
from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.protocol import messages

KEY_BYTES = 2  # tag and a key below 128
COLUMNS = [np.arange(5), np.arange(5 * 640, dtype=np.uint8).reshape(5, 640), np.ones(5, bool)]
SENT = chunk(7, COLUMNS).SerializeToString()

edits = st.lists(
    st.tuples(st.integers(0, len(SENT)), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=3
)  # where, how many bytes go, which come


@given(edits, st.sampled_from([(0, 1, 2), (1,), (2, 0)]))
@example([(len(SENT), 0, b"\x20\x01")], (0, 1, 2))  # delta-encoded, said at the end
@example([(len(SENT), 0, b"\x2a\x02\x0a\x00")], (1,))  # one more tensor
def test_chunk_that_is_sent_again_damaged_is_refused_or_decoded_within_its_rows(
    changes: list[tuple[int, int, bytes]], indices: tuple[int, ...]
) -> None:
    damaged = SENT
    for where, num_gone, come in changes:
        damaged = damaged[:where] + come + damaged[where + num_gone :]
    for sent in (damaged, (damaged + bytes(len(SENT)))[: len(SENT)]):  # as long as before, too
        with contextlib.suppress(FormatError, UnsafeDataError):
            _decoded(EncodedChunks([sent], 1 << 20).get(7, indices))
        assert _decoded(EncodedChunks([SENT], 1 << 20).get(7, indices)) == [
            COLUMNS[index].tobytes() for index in indices
        ]


def test_block_that_is_shorter_than_its_shape_is_refused() -> None:
    made = chunk(7, [np.arange(24, dtype=np.uint8)])
    block = made.data.tensors[0].tensor_content
    shorter = b"\x14" + 5 * (b"\x0c" + bytes(4))  # announces 20 bytes, and has five pieces of four
    assert len(shorter) == len(block)
    with pytest.raises(FormatError, match="20 bytes, expected 24"):
        EncodedChunks([made.SerializeToString().replace(block, shorter)], 1 << 20).get(7, (0,))


def test_damaged_block_is_refused() -> None:
    at = SENT.index(messages.SampledChunk.FromString(SENT).data.tensors[1].tensor_content)
    for damage in (b"\xff" * 8, b"\x00" * 8):
        damaged = SENT[: at + 2] + damage + SENT[at + 10 :]
        for key, encoded in ((7, damaged), (9, b"\x08\x09" + damaged[KEY_BYTES:])):
            with pytest.raises(FormatError):
                _decoded(EncodedChunks([encoded], 1 << 20).get(key, (0, 1, 2)))


def _decoded(found: EncodedChunk) -> list[bytes]:
    columns = [np.zeros((found.length, *shape), dtype) for dtype, shape in found.schema.dtypes_and_shapes]
    stored = [column.reshape(found.length, math.prod(column.shape[1:])).view(np.uint8) for column in columns]
    found.decode_into(columns, stored, 0)
    return [column.tobytes() for column in columns]
