"""Why a cluster of shards cannot start."""

from __future__ import annotations

from reverb_writer.errors import ReverbWriterError


class PlacementError(ReverbWriterError, RuntimeError):
    """Ray has no room for the shards; the message says what they need and what is free."""


class ShardStartError(ReverbWriterError, RuntimeError):
    """The server of a shard does not start; the message has its last log lines."""
