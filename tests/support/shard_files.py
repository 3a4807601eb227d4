"""Files that tell a client which shards there are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reverb_writer as rw


class ShardFile:
    """A file of shards, and the target that names it."""

    def __init__(self, folder: Path, *lines: str) -> None:
        self.path = folder / "shards"
        self.path.write_text("\n".join(lines))
        self.target = f"file:{self.path}"

    def tell(self, client: rw.Client, *lines: str) -> None:
        """Write the file anew, and have a client read it."""
        self.path.write_text("\n".join(lines))
        client.connections.refresh()


def shard_lines(servers: Sequence[Any]) -> list[str]:
    """Return the lines of servers: the shards `a`, `b`, ..."""
    return [f"{name} {server.address}" for name, server in zip("abcdefgh", servers, strict=False)]
