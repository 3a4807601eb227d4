"""Reverb for every Python: write and sample replay data without TensorFlow.

The names below load when they are first touched, so `import reverb_writer` costs next to nothing.
"""

from __future__ import annotations

import os
import sys

from reverb_writer.lazy import lazy_names

if "grpc" not in sys.modules:
    # gRPC's own handlers let one forked child in five crash, even one that does not use gRPC, such as the worker of a
    # data loader. Without them none does. Read by gRPC when it is imported; a value that is set already stays.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
