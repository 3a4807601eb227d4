"""Checkpoints on disk: their contents, their folder, and their conversion to other tables and shards."""
