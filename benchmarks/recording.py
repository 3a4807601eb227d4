"""Records the requests that our observer sends."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import reverb_writer as rw
from benchmarks.actors import ours
from benchmarks.workloads import Workload
from reverb_writer.protocol.messages import INSERT_STREAM
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.wire import Wire


class _Tap(Channel):
    """A connection that keeps the messages of its insert streams."""

    def __init__(self, address: str) -> None:
        """Prepare the connection."""
        super().__init__(address)
        self.streams: list[list[bytes]] = []

    def open(self, method: str) -> tuple[Wire, Any]:
        """Open a stream; keep the requests of an insert stream before they go out."""
        wire, call = super().open(method)
        if method == INSERT_STREAM:
            kept: list[bytes] = []
            self.streams.append(kept)
            write = call.write

            async def tapped(request: bytes) -> None:
                kept.append(request)
                await write(request)

            call.write = tapped
        return wire, call


def record(address: str, workload: Workload, num_steps: int, **options: Any) -> list[bytes]:
    """Write `num_steps` steps with our observer and return the messages of its insert stream."""
    with rw.Client(address) as client, contextlib.closing(_Tap(address)) as tap:
        client.shards[0].server.channel = tap
        actor = ours(client, workload, **options)
        actor.write(math.inf, num_steps)
        actor.close()
        return tap.streams[-1]  # before it there is one for the table's structure
