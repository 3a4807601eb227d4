"""The contenders that read: each takes samples of one table as fast as it can.

    ours, trajectory_dataset            batches
    ours_one_by_one, reverb_client      single samples, `Client.sample`
    raw                                 bytes only: what the server can send

Each function makes a `Learner` in the process that calls it; the peer is imported there and nowhere else.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import reverb_writer as rw
from benchmarks.processes import TABLE
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream

_SAMPLES_A_CALL = 2000


@dataclass(frozen=True)
class ReadRun:
    """What was read.

    Attributes:
        items: samples.
        wall_s: how long it took.
        cpu_s: CPU time of the learner's process, all threads.
    """

    items: int
    wall_s: float
    cpu_s: float

    @property
    def items_per_s(self) -> float:
        """Samples a second."""
        return self.items / self.wall_s


@dataclass
class Learner:
    """A loop that has nothing to do but take the next samples.

    Attributes:
        counts: takes samples, and yields how many.
        close: ends it.
    """

    counts: Iterator[int]
    close: Callable[[], Any] = lambda: None


class Reader:
    """A learner that is connected to a server only while it reads, so that it fetches nothing out of turn.

    For `Remote`.
    """

    def __init__(self, connect: Callable[[Any], Learner]) -> None:
        """Remember how to make the learner of an address."""
        self._connect = connect

    def read(self, address: Any, seconds: float) -> ReadRun:
        """Read for `seconds`, after a quarter of that, in which what is slow the first time is done."""
        with contextlib.closing(self._connect(address)) as learner:
            _read(learner, seconds / 4)
            return _read(learner, seconds)

    def close(self) -> None:
        """Do nothing: a reader keeps nothing open."""


def _read(learner: Learner, seconds: float) -> ReadRun:
    items = 0
    cpu_s, start = time.process_time(), time.perf_counter()
    while time.perf_counter() - start < seconds:
        items += next(learner.counts)
    return ReadRun(items, time.perf_counter() - start, time.process_time() - cpu_s)


def ours(address: str | Sequence[str], batch_size: int, **options: Any) -> Learner:
    """Return a learner with our dataset."""
    dataset = rw.ReplayDataset(address, TABLE, batch_size, **options)
    return Learner((len(batch.info.keys) for batch in dataset), dataset.close)


def trajectory_dataset(address: str, batch_size: int, dtypes: Any, shapes: Any) -> Learner:
    """Return a learner with Reverb's dataset, batched and fetched ahead by `tf.data`.

    Args:
        address: of the server.
        batch_size: samples in a batch.
        dtypes: NumPy's, by column.
        shapes: with the time dimension, by column.
    """
    import reverb
    import tensorflow as tf

    samples = reverb.TrajectoryDataset(
        address,
        TABLE,
        tuple(map(tf.as_dtype, dtypes)),
        tuple(map(tf.TensorShape, shapes)),
        max_in_flight_samples_per_worker=2 * batch_size,
    )
    return Learner(batch_size for _ in samples.batch(batch_size).prefetch(2))


def ours_one_by_one(address: str) -> Learner:
    """Return a learner with our `Client.sample`."""
    client = rw.Client(address)
    return Learner((1 for _ in _endless(lambda: client.sample(TABLE, _SAMPLES_A_CALL))), client.close)


def reverb_client(address: str) -> Learner:
    """Return a learner with Reverb's `Client.sample`."""
    import reverb

    client = reverb.Client(address)
    return Learner(1 for _ in _endless(lambda: client.sample(TABLE, _SAMPLES_A_CALL, emit_timesteps=False)))


def raw(address: str, batch_size: int) -> Learner:
    """Return a reader of bytes that asks for two batches ahead, as ours does, and only counts what comes."""
    channel = Channel(address)
    request = messages.SampleStreamRequest(table=TABLE, num_samples=batch_size).SerializeToString()
    stream = ByteStream(channel, messages.SAMPLE_STREAM)
    stream.send(request)
    stream.send(request)

    def counts() -> Iterator[int]:
        missing = 0
        for message in iter(stream.read, None):
            entries = messages.SampledResponse.FromString(message).entries
            num_samples = sum(entry.end_of_sequence for entry in entries)
            missing += num_samples
            while missing >= batch_size:
                stream.send(request)
                missing -= batch_size
            yield num_samples

    def close() -> None:
        stream.close()
        channel.close()

    return Learner(counts(), close)


def _endless(draw: Callable[[], Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(draw() for _ in itertools.count())
