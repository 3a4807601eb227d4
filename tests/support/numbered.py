"""Items of known numbers, to be read in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np

import reverb_writer as rw
from reverb_writer.client.whole_items import one_item
from reverb_writer.protocol import messages
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InsertRequest
from reverb_writer.transport.single_request import InsertStream

QUEUE = rw.TableConfig("queue", 10_000, sampler="fifo", max_times_sampled=1)


def write_numbers(observer: Any, numbers: Iterable[int]) -> None:
    """Write steps of an episode that goes on, one a number."""
    for number in numbers:
        observer({"n": np.int64(number)}, end_of_episode=False)


def write_steps(address: str, table: str, num_steps: int, length: int = 4, **options: Any) -> None:
    """Write one episode of steps 0, 1, 2, ... in two leaves; the second is ten times the first."""
    with rw.TrajectoryObserver(address, table, length, **options) as observer:
        for number in range(num_steps):
            step = {"a": np.int64(number), "b": np.full(2, 10 * number, np.float32)}
            observer(step, end_of_episode=number == num_steps - 1)


def insert_numbers(address: str, table: str, numbers: Any, length: int = 1) -> None:
    """Insert an item a number, which holds it `length` times."""
    with rw.Client(address) as client:
        for number in numbers:
            client.insert([np.full(length, number, np.int64)], {table: 1.0})


def insert_items(channel: Channel, request: InsertRequest, timeout_s: float = 60.0) -> None:
    """Insert the items of a request, which a test has encoded, and wait until the server has confirmed them."""
    with contextlib.closing(InsertStream(channel, channel.server_info(60.0))) as stream:
        stream.insert(request, timeout_s)


def insert_variant(client: rw.Client, table: str) -> None:
    """Write an item with one empty tensor of dtype VARIANT, as anyone who reaches the server can."""
    _insert_tensor(client, table, b"", messages.DataType.DT_VARIANT)


def insert_damaged(client: rw.Client, table: str) -> None:
    """Write an item whose tensor is no compressed block."""
    _insert_tensor(client, table, b"\xff" * 8)


def _insert_tensor(client: rw.Client, table: str, content: bytes, dtype: int | None = None) -> None:
    request = one_item([np.zeros(1, np.int64)], [False], {table: 1.0})
    ((key, encoded),) = request.chunks.items()
    message = messages.InsertStreamRequest.FromString(encoded)
    tensor = message.chunks[0].data.tensors[0]
    tensor.dtype = tensor.dtype if dtype is None else dtype
    tensor.tensor_content = content
    request.chunks[key] = message.SerializeToString()
    insert_items(client.shards[0].channel, request)


def first_numbers(batch: rw.Batch) -> list[int]:
    """Return the first number of each item of a batch of them."""
    (leaf,) = batch.data
    return [int(number) for number in leaf[:, 0]]
