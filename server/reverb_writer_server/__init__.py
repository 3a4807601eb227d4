"""A Reverb replay server that is safe to run: `ReplayServer` in process, the command `reverb-writer-server` outside.

Public names load at first use: `reverb-writer-server checkpoints` needs no TensorFlow.
"""

from __future__ import annotations

import os

from reverb_writer import __version__ as __version__  # both distributions are released together
from reverb_writer.lazy import lazy_names

# TensorFlow reads it when it is loaded. It would log missing GPUs as errors; nothing here computes with it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
