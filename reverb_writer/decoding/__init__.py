"""Bytes of samples to columns of a batch: each chunk is decoded once, rows are gathered together. Pure."""
