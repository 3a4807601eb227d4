"""Checkpoints on disk: what is in one, which are kept, how one is fitted to other tables."""
