"""Names for replays on several servers: their addresses, and each server's share of a table."""

from reverb_writer.shards.targets import Shard, Target, TargetFile, TargetSource
from reverb_writer.tables.shares import share_of

__all__ = ["Shard", "Target", "TargetFile", "TargetSource", "share_of"]
