"""Names of replays on several servers: where they are, and which part of a table each has."""

from reverb_writer.client.targets import Shard, Target, TargetFile, TargetSource
from reverb_writer.tables.shares import share_of

__all__ = ["Shard", "Target", "TargetFile", "TargetSource", "share_of"]
