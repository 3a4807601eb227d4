"""Records the requests that our observer sends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import reverb_writer as rw
from benchmarks.actors import ours
from benchmarks.workloads import Workload
from reverb_writer.protocol.messages import INSERT_STREAM
from reverb_writer.transport.channel import Channel


class _Tap(Channel):
    """A connection that keeps the messages of its insert streams."""

    def __init__(self, address: str) -> None:
        """Prepare the connection."""
        super().__init__(address)
        self.streams: list[list[bytes]] = []

    def stream(self, method: str, requests: Iterator[bytes], *, timeout_s: float | None = None) -> Any:
        """Open a stream; keep the requests of an insert stream before they go out."""
        if method != INSERT_STREAM:
            return super().stream(method, requests, timeout_s=timeout_s)
        kept: list[bytes] = []
        self.streams.append(kept)

        def tapped() -> Iterator[bytes]:
            for request in requests:
                kept.append(request)
                yield request

        return super().stream(method, tapped(), timeout_s=timeout_s)


def record(address: str, workload: Workload, num_steps: int, **options: Any) -> list[bytes]:
    """Write `num_steps` steps with our observer and return the messages of its insert stream."""
    with rw.Client(address) as client, contextlib.closing(_Tap(address)) as tap:
        client.shards[0].channel = tap
        actor = ours(client, workload, **options)
        actor.write(math.inf, num_steps)
        actor.close()
        return tap.streams[-1]  # before it there is one for the table's structure
