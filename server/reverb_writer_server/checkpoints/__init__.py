"""Checkpoints on disk: what is in one, which are kept, how they become those of other tables and shards."""
