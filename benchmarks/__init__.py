"""Benchmarks: ours and the peers in turn, on a real server. `python -m benchmarks --help`."""

import os

# Before NumPy is imported: threads of BLAS that wait for work take the cores from the threads that are measured.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
