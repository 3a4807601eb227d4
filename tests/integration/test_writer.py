"""`SequenceWriter` on a real server: how steps are cut into chunks, who shares what, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from reading import fifo, read, read_column
from server_process import HostedServer

import reverb_writer as rw
from reverb_writer.protocol import messages
from reverb_writer.transport.byte_stream import ByteStream
from reverb_writer.transport.insert_stream import InsertStream

pytestmark = pytest.mark.filterwarnings("ignore:`stride_length`")

INTEGER = np.dtype(np.int64)


@pytest.fixture
def client(replay_server: Callable[..., HostedServer]) -> Iterator[rw.Client]:
    server = replay_server(fifo("a"), fifo("b"))
    with rw.Client(server.address, timeout_s=60) as client:
        yield client


@pytest.fixture
def stream(client: rw.Client) -> Iterator[InsertStream]:
    with contextlib.closing(_Closing(client.open_stream())) as closing:
        yield closing.stream


class _Closing:
    def __init__(self, stream: InsertStream) -> None:
        self.stream = stream

    def close(self) -> None:
        self.stream.close(60)


def writer_of(stream: InsertStream, *windows: rw.WindowSpec | rw.WindowTarget, **options: Any) -> rw.SequenceWriter:
    """Return a writer of integers; a spec's windows go to table `a` if it is the first, to `b` if the second."""
    targets = [
        window if isinstance(window, rw.WindowTarget) else rw.WindowTarget(window, (table,))
        for window, table in zip(windows, ("a", "b"), strict=False)
    ]
    return rw.SequenceWriter(stream, [INTEGER], [()], targets, padding_step=[0], **options)


def append_all(writer: rw.SequenceWriter, *numbers: int) -> None:
    for number in numbers:
        writer.append([np.int64(number)])


def slices_of(client: rw.Client, table: str) -> list[list[tuple[int, int, int, int]]]:
    """Take out all items; of each return (chunk key, offset, length, chunk's length) for every chunk it touches."""
    size = client.server_info()[table].current_size
    request = messages.SampleStreamRequest(table=table, num_samples=size).SerializeToString()
    found = []
    stream = ByteStream(client.shards[0].channel, messages.SAMPLE_STREAM, timeout_s=60)
    stream.send(request)
    for reply in stream:
        for entry in messages.SampleStreamResponse.FromString(reply).entries:
            lengths = {
                chunk.chunk_key: chunk.sequence_range.end - chunk.sequence_range.start + 1 for chunk in entry.data
            }
            (column,) = entry.info.item.flat_trajectory.columns
            found.append(
                [
                    (piece.chunk_key, piece.offset, piece.length, lengths[piece.chunk_key])
                    for piece in column.chunk_slices
                ]
            )
        if len(found) == size:
            break
    stream.cancel()
    return found


# Chunks.


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (3, 5), (4, 6), (1, 3), (20, 30)])
def test_window_that_overlaps_none_is_one_whole_chunk(
    client: rw.Client, stream: InsertStream, length: int, stride: int
) -> None:
    writer = writer_of(stream, rw.WindowSpec(length, stride))
    for number in range(100):
        append_all(writer, number)
        if number % 7 == 0:
            writer.send()
    writer.end_episode()
    stream.flush(60)
    items = slices_of(client, "a")
    assert len(items) == len(rw.WindowSpec(length, stride).windows(100))
    for pieces in items:
        assert [(offset, taken) for _, offset, taken, _ in pieces] == [(0, length)]
        assert [size for _, _, _, size in pieces] == [length]


def test_step_is_stored_once_for_all_windows_and_tables(client: rw.Client, stream: InsertStream) -> None:
    targets = [rw.WindowTarget(rw.WindowSpec(4, 1), ("a", "b")), rw.WindowTarget(rw.WindowSpec(8, 4), ("a",))]
    writer = writer_of(stream, *targets, chunk_length=4)
    append_all(writer, *range(40))
    writer.end_episode()
    stream.flush(60)
    pieces = list(itertools.chain.from_iterable([*slices_of(client, "a"), *slices_of(client, "b")]))
    assert len({key for key, _, _, _ in pieces}) == writer.chunks.num_chunks == 10
    assert {size for _, _, _, size in pieces} == {4}


@pytest.mark.parametrize("chunk_length", [1, 3, 16383])
def test_chunks_have_the_length_that_is_asked_for(client: rw.Client, stream: InsertStream, chunk_length: int) -> None:
    writer = writer_of(stream, rw.WindowSpec(6, 2), chunk_length=chunk_length)
    assert writer.chunks.length == chunk_length
    append_all(writer, *range(12))
    writer.end_episode()
    stream.flush(60)
    sizes = {size for pieces in slices_of(client, "a") for _, _, _, size in pieces}
    assert sizes == {min(chunk_length, 12)}


# Padding.


def test_padding_is_what_is_given(client: rw.Client, stream: InsertStream) -> None:
    target = rw.WindowTarget(rw.WindowSpec(3, 3, "cover"), ("a",))
    dtypes, shapes, padding = [np.dtype(np.float16), np.dtype(object)], [(2,), ()], [np.full(2, 9, np.float16), b"end"]
    writer = rw.SequenceWriter(stream, dtypes, shapes, [target], padding_step=padding)
    writer.append([np.ones(2, np.float16), b"x"], last=True)
    stream.flush(60)
    (item,) = read(client, "a")
    assert [column.tolist() for column in item.data] == [[[1, 1], [9, 9], [9, 9]], [b"x", b"end", b"end"]]


# Sharing.


def test_writers_share_a_stream_each_with_episodes_of_its_own(client: rw.Client, stream: InsertStream) -> None:
    one, other = (writer_of(stream, rw.WindowSpec(2)) for _ in range(2))
    for number in range(1, 4):
        append_all(one, number)
        append_all(other, 10 * number)
    assert one.end_episode() == {}
    append_all(other, 40)
    assert other.end_episode() == {}
    stream.flush(60)
    assert sorted(read_column(client, "a")) == [[1, 2], [2, 3], [10, 20], [20, 30], [30, 40]]
    assert client.server_info()["a"].num_deleted_episodes == 2


def test_writers_of_many_threads_do_not_disturb_each_other(client: rw.Client, stream: InsertStream) -> None:
    spec = rw.WindowSpec(5, 3, "tile")
    writers = [writer_of(stream, spec, request_items=7) for _ in range(4)]
    firsts = [[1000 * (10 * index + episode) for episode in range(10)] for index in range(4)]
    done = threading.Event()

    def write(index: int) -> None:
        for first, i in itertools.product(firsts[index], range(60)):
            writers[index].append([np.int64(first + i)], last=i == 59)

    def send_all_the_time() -> None:
        while not done.is_set():
            for writer in writers:
                writer.send()

    threads = [threading.Thread(target=write, args=[index]) for index in range(4)]
    sender = threading.Thread(target=send_all_the_time)
    for thread in (*threads, sender):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    sender.join()
    stream.flush(60)
    found = read_column(client, "a")
    for index in range(4):
        episodes = [[*range(first, first + 60), *[0] * 10] for first in firsts[index]]
        expected = [steps[start:stop] for steps in episodes for start, stop in spec.windows(60)]
        assert [window for window in found if window[0] // 10_000 == index] == expected


# Ends.


def test_end_of_an_episode_tells_what_no_window_holds(stream: InsertStream) -> None:
    writer = writer_of(stream, rw.WindowSpec(3, 2), rw.WindowSpec(4, 4, "pad"))
    assert writer.end_episode() == {}
    append_all(writer, 1, 2)
    assert writer.end_episode() == {"short_episode": 2}
    append_all(writer, 1, 2, 3, 4, 5)
    assert writer.append([np.int64(6)], last=True) == {"unaligned_tail": 1 + 2}
    append_all(writer, 1, 2, 3, 4, 5, 6)
    assert writer.end_episode(align=True) == {"unaligned_tail": 2}
    append_all(writer, 1, 2, 3, 4, 5, 6)
    assert writer.end_episode(discard=True) == {"reset": 1 + 2}


def test_items_and_chunks_are_counted(client: rw.Client, stream: InsertStream) -> None:
    writer = writer_of(stream, rw.WindowSpec(2, 2), rw.WindowSpec(4, 4), chunk_length=2)
    append_all(writer, *range(8))
    assert writer.num_steps == 8
    writer.send()
    assert (writer.num_unsent_items, writer.num_items, writer.chunks.num_chunks) == (0, 4 + 2, 4)
    writer.end_episode()
    assert (writer.num_steps, writer.num_items) == (0, 6)
    stream.flush(60)
    assert [client.server_info()[table].current_size for table in ("a", "b")] == [4, 2]


# Refusals.


@pytest.mark.parametrize("chunk_length", [0, -1, 16384])
def test_chunk_length_out_of_range_is_refused(stream: InsertStream, chunk_length: int) -> None:
    with pytest.raises(rw.SpecError, match=rf"`chunk_length` must be in 1\.\.16383, got {chunk_length}"):
        writer_of(stream, rw.WindowSpec(2), chunk_length=chunk_length)


def test_writer_of_no_windows_is_refused(stream: InsertStream) -> None:
    with pytest.raises(rw.SpecError, match="`targets` must be at least one kind of window"):
        writer_of(stream)


def test_windows_without_a_table_are_refused(stream: InsertStream) -> None:
    with pytest.raises(rw.SpecError, match="table"):
        writer_of(stream, rw.WindowTarget(rw.WindowSpec(2)))


def test_dtype_that_reverb_does_not_know_is_refused(stream: InsertStream) -> None:
    targets = [rw.WindowTarget(rw.WindowSpec(2), ("a",))]
    with pytest.raises(rw.StructureError, match="dtype datetime64"):
        rw.SequenceWriter(stream, [np.dtype("M8[s]")], [()], targets, padding_step=[0])


@pytest.mark.parametrize("leaves", [[], [np.int64(1)], [np.int64(1)] * 3])
def test_step_of_too_few_or_too_many_leaves_is_refused(client: rw.Client, stream: InsertStream, leaves: Any) -> None:
    writer = rw.SequenceWriter(stream, [INTEGER] * 2, [()] * 2, [rw.WindowTarget(rw.WindowSpec(2), ("a",))])
    writer.append([np.int64(40), np.int64(41)])
    with pytest.raises(rw.StructureError, match=f"a step has {len(leaves)} leaves, expected 2"):
        writer.append(leaves)
    writer.append([np.int64(60), np.int64(61)])
    writer.send()
    stream.flush(60)
    assert [tuple(column.tolist() for column in sample.data) for sample in read(client, "a")] == [([40, 60], [41, 61])]


# Priorities that change.


def priorities_of(client: rw.Client, table: str, count: int) -> list[tuple[list[int], float]]:
    return [(sample.data[0].tolist(), sample.info.priority) for sample in client.sample(table, count)]


def length_of(window: Any) -> float:
    return 100.0 + len(window[0])


def test_priority_counts_for_windows_that_are_not_complete_yet(client: rw.Client, stream: InsertStream) -> None:
    writer = writer_of(stream, rw.WindowSpec(2), chunk_length=10)
    append_all(writer, 1, 2, 3)
    writer.set_priority(0, 7.0)
    append_all(writer, 4)
    writer.send()
    stream.flush(60)
    assert priorities_of(client, "a", 3) == [([1, 2], 1.0), ([2, 3], 1.0), ([3, 4], 7.0)]


def test_constant_becomes_a_function_between_episodes_and_sees_whole_windows(
    client: rw.Client, stream: InsertStream
) -> None:
    short, long = (
        rw.WindowTarget(rw.WindowSpec(n), (table,), p) for n, table, p in ((3, "a", length_of), (5, "b", 1.0))
    )
    writer = writer_of(stream, short, long)
    append_all(writer, 1, 2, 3, 4, 5)
    writer.end_episode()
    writer.set_priority(1, length_of)
    append_all(writer, 1, 2, 3, 4, 5)
    writer.end_episode()
    stream.flush(60)
    assert [priority for _, priority in priorities_of(client, "b", 2)] == [1.0, 105.0]
    assert [priority for _, priority in priorities_of(client, "a", 6)] == [103.0] * 6


def test_constant_becomes_a_function_in_mid_episode_if_the_steps_were_kept(
    client: rw.Client, stream: InsertStream
) -> None:
    kept, long = (
        rw.WindowTarget(rw.WindowSpec(n), (table,), p) for n, table, p in ((3, "a", length_of), (2, "b", 1.0))
    )
    writer = writer_of(stream, kept, long, chunk_length=10)
    append_all(writer, 1, 2, 3)
    writer.set_priority(1, length_of)
    append_all(writer, 4)
    writer.set_priority(1, 5.0)
    append_all(writer, 5)
    writer.send()
    stream.flush(60)
    assert [priority for _, priority in priorities_of(client, "b", 4)] == [1.0, 1.0, 102.0, 5.0]


def test_priority_that_would_need_steps_that_were_not_kept_is_refused(client: rw.Client, stream: InsertStream) -> None:
    short, long = (
        rw.WindowTarget(rw.WindowSpec(n), (table,), p) for n, table, p in ((2, "a", length_of), (5, "b", 1.0))
    )
    writer = writer_of(stream, short, long)
    append_all(writer, 1, 2, 3, 4)
    with pytest.raises(rw.SpecError, match="last 4 steps of this one, and 3 were kept"):
        writer.set_priority(1, length_of)
    append_all(writer, 5)
    writer.send()
    stream.flush(60)
    assert priorities_of(client, "b", 1) == [([1, 2, 3, 4, 5], 1.0)]


def test_writer_of_a_closed_stream_says_so(stream: InsertStream) -> None:
    writer = writer_of(stream, rw.WindowSpec(1))
    append_all(writer, 1)
    stream.close(60)
    with pytest.raises(rw.ClosedError, match="closed"):
        append_all(writer, 2)
