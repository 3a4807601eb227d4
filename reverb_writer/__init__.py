"""Reverb for every Python: write and sample replay data without TensorFlow.

Names load at first use, so `import reverb_writer` takes almost no time.
"""

from __future__ import annotations

import os
import sys

from reverb_writer.lazy import lazy_names

if "grpc" not in sys.modules:
    # With gRPC's own handlers one forked child in five crashes, even without using gRPC, such as a data loader's
    # worker; without them none does. gRPC reads the variable at its import. The user's own value is kept.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
