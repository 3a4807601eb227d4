"""Benchmarks: ours and the peers in turn, on a real server. `python -m benchmarks --help`."""
