"""A chunk that is taken apart without protobuf is what protobuf says that it is, however it is damaged."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st
from sampled import chunk

from reverb_writer.errors import FormatError
from reverb_writer.wire import messages
from reverb_writer.wire.plain_chunks import find_contents, find_frame
from reverb_writer.wire.sent_chunks import Kind, LikelyKinds, SentChunk, SentChunks

KEY_BYTES = 2  # tag and a key below 128
COLUMNS = [np.arange(5), np.arange(5 * 640, dtype=np.uint8).reshape(5, 640), np.ones(5, bool)]
SENT = chunk(7, COLUMNS).SerializeToString()
SAME_SIZE = chunk(7, [np.arange(5), np.ones((5, 640), np.int8), np.ones(5, np.uint8)]).SerializeToString()
KIND = Kind([(t.dtype, t.tensor_shape) for t in messages.SampledChunk.FromString(SENT).data.tensors])

edits = st.lists(
    st.tuples(st.integers(0, len(SENT)), st.integers(0, 4), st.binary(max_size=6)), min_size=1, max_size=3
)  # where, how many bytes go, which come


def test_a_chunk_like_the_one_before_is_taken_apart() -> None:
    at, stop, rest = find_frame(SENT, KEY_BYTES) or (0, 0, b"")
    contents = find_contents(SENT, at, stop, KIND.expected)
    assert contents == [t.tensor_content for t in messages.SampledChunk.FromString(SENT).data.tensors]
    assert rest == b"\x30\x03"  # data_tensors_len, 3


@given(edits)
@example([(len(SENT), 0, b"\x20\x01")])  # delta-encoded, said at the end
@example([(len(SENT), 0, b"\x2a\x02\x0a\x00")])  # one more tensor
def test_what_is_taken_apart_is_what_protobuf_finds(changes: list[tuple[int, int, bytes]]) -> None:
    sent = SENT
    for edited, num_gone, come in changes:
        where = max(edited, KEY_BYTES)  # the key was read before
        sent = sent[:where] + come + sent[where + num_gone :]
    frame = find_frame(sent, KEY_BYTES)
    if frame is None or frame[2] != b"\x30\x03":
        return  # no kind is known for it
    contents = find_contents(sent, frame[0], frame[1], KIND.expected)
    if contents is not None:
        try:
            found = messages.SampledChunk.FromString(sent)
        except DecodeError:  # the place in the episode is damaged, which nobody reads
            return
        assert contents == [t.tensor_content for t in found.data.tensors]
        assert [(t.dtype, t.tensor_shape) for t in found.data.tensors] == [
            (t.dtype, t.tensor_shape) for t in messages.SampledChunk.FromString(SENT).data.tensors
        ]
        assert not found.delta_encoded


def test_kinds_that_are_learned_change_no_result() -> None:
    kinds: LikelyKinds = {}
    sent = [SENT, SAME_SIZE, SENT, chunk(7, COLUMNS, delta_encoded=True).SerializeToString(), SENT]
    for one in sent:
        for indices in ((0, 1, 2), (0, 2, 1), (1,), (0, 1, 2)):
            found, alone = (SentChunks([one], 1 << 20, *known).get(7, indices) for known in ([kinds], []))
            assert found.kind is alone.kind
            assert found.is_plain == alone.is_plain
            for of in (found, alone):
                assert of.length == 5
            assert _decoded(found) == _decoded(alone)
    assert len(kinds) == 1  # all tensors in their order; the rest is left to protobuf


def test_damaged_block_of_a_kind_that_is_known_is_refused() -> None:
    kinds: LikelyKinds = {}
    SentChunks([SENT], 1 << 20, kinds).get(7, (0, 1, 2))
    at = SENT.index(messages.SampledChunk.FromString(SENT).data.tensors[1].tensor_content)
    for damage in (b"\xff" * 8, b"\x00" * 8):
        damaged = SENT[: at + 2] + damage + SENT[at + 10 :]
        with pytest.raises(FormatError):
            _decoded(SentChunks([damaged], 1 << 20, kinds).get(7, (0, 1, 2)))


def _decoded(found: SentChunk) -> list[bytes]:
    columns = [np.zeros((5, *shape), dtype) for dtype, shape in found.kind.dtypes_and_shapes]
    stored = [column.reshape(5, -1).view(np.uint8) for column in columns]
    found.decode_into(columns, stored, 0)
    return [column.tobytes() for column in columns]
