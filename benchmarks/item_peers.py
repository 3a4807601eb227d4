"""Ways of whole items from one process to another that people use beside ours."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import pickle
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import psutil

from benchmarks.item_transports import MAX_BATCH, Items, Place, Transport
from benchmarks.processes import TABLE, Remote

_START_S = 30.0
_POLL_S = 0.001


class Queue(Transport):
    """`multiprocessing.Queue`."""

    name = "multiprocessing.Queue"
    is_direct = True

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        yield Place(multiprocessing.get_context("spawn").Queue(MAX_BATCH), lambda: 0.0)

    def put_batch(self, batch: Any) -> None:
        for item in batch:
            self._address.put(item)

    def get_all(self, num_items: int, batch: int) -> None:
        for _ in range(num_items // batch):
            _collate([self._address.get() for _ in range(batch)])


class Redis(Transport):
    """Lists of pickles."""

    name = "Redis and pickle"

    def __init__(self, make: Callable[[], Items], address: Any) -> None:
        import redis

        super().__init__(make, address)
        self._redis: Any = redis.Redis(port=address)

    @classmethod
    def missing(cls) -> str:
        has_both = find_spec("redis") is not None and shutil.which("redis-server") is not None
        return "" if has_both else "redis-server and the package `redis`"

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            line = ["redis-server", "--port", str(port), "--save", "", "--dir", folder]
            server = subprocess.Popen(line, stdout=subprocess.DEVNULL)
            try:
                end = time.monotonic() + _START_S
                while True:
                    with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
                        break
                    if time.monotonic() > end:
                        raise TimeoutError(f"redis-server did not listen within {_START_S:.0f} s")
                    time.sleep(0.05)
                yield Place(port, lambda: _cpu_s([psutil.Process(server.pid)]))
            finally:
                server.terminate()
                server.wait(_START_S)

    def put_batch(self, batch: Any) -> None:
        self._redis.rpush(TABLE, *[pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in batch])

    def get_all(self, num_items: int, batch: int) -> None:
        for _ in range(num_items // batch):
            found: list[bytes] = []
            while len(found) < batch:
                found += self._redis.lpop(TABLE, batch - len(found)) or self._redis.blpop([TABLE])[1:]
            _collate([pickle.loads(data) for data in found])  # noqa: S301  # its own data


class TransferQueue(Transport):
    """verl's data plane with the storage that it starts by itself; each process joins one cluster of Ray."""

    name = "TransferQueue"

    def __init__(self, make: Callable[[], Items], address: Any) -> None:
        import torch

        super().__init__(make, address)
        self._tq, self._torch, self._num_put = _joined_cluster(address), torch, 0

    @classmethod
    def missing(cls) -> str:
        return "" if find_spec("transfer_queue") is not None else "the package `TransferQueue`"

    @classmethod
    @contextlib.contextmanager
    def serve(cls) -> Iterator[Place]:
        with Remote(ServedTransferQueue) as server:
            yield Place(server.call("address"), lambda: _cpu_s(server.process.children(recursive=True)))

    def batch(self, items: Items) -> Any:
        from tensordict import TensorDict

        columns = {name: [self._torch.from_numpy(item[name]) for item in items] for name in items[0]}
        joined = {
            name: self._torch.stack(leaves)
            if len({*map(len, leaves)}) == 1
            else self._torch.nested.as_nested_tensor(leaves, layout=self._torch.jagged)
            for name, leaves in columns.items()
        }
        return TensorDict(joined, batch_size=(len(items),))

    def put_batch(self, batch: Any) -> None:
        keys = [str(self._num_put + number) for number in range(len(batch))]
        self._num_put += len(batch)
        self._tq.kv_batch_put(keys=keys, partition_id=TABLE, fields=batch)

    def get_all(self, num_items: int, batch: int) -> None:
        client, fields = self._tq.get_client(), [*self._items[0]]
        for _ in range(num_items // batch):
            while not (ready := client.get_meta(fields, batch, TABLE, task_name="learn")).size:
                time.sleep(_POLL_S)
            found = client.get_data(ready)
            for leaf in found.values():
                if leaf.is_nested:
                    self._torch.nested.to_padded_tensor(leaf, 0)

    def close(self) -> None:
        import ray

        ray.shutdown()


class ServedTransferQueue:
    """A cluster of Ray with TransferQueue's actors; for `Remote`."""

    def __init__(self) -> None:
        import ray

        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
        self._tq = _joined_cluster("")
        self._ray = ray

    def address(self) -> str:
        return str(self._ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        self._tq.close()
        self._ray.shutdown()


def _joined_cluster(address: str) -> Any:
    """Return the package of TransferQueue, as a member of a cluster; of the process's own if there is no address."""
    import ray

    transfer_queue = importlib.import_module("transfer_queue")  # no types are installed
    if address:
        ray.init(address, log_to_driver=False)
    transfer_queue.init({"controller": {"polling_mode": True}})  # otherwise a reader that waits blocks the writers
    return transfer_queue


def _cpu_s(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def _collate(items: Items) -> dict[str, Any]:
    """Return items as a padded batch."""
    return {name: _padded([item[name] for item in items]) for name in items[0]}


def _padded(leaves: list[Any]) -> Any:
    """Return the leaves as one array, as a learner needs it."""
    padded = np.zeros((len(leaves), max(map(len, leaves))), leaves[0].dtype)
    for row, leaf in zip(padded, leaves, strict=True):
        row[: len(leaf)] = leaf
    return padded
