"""A Reverb replay server that is safe to run: the class `ReplayServer` and the command `reverb-writer-server`.

Public names load at first use: `reverb-writer-server checkpoints` needs no TensorFlow.
"""

from __future__ import annotations

import os

from reverb_writer import __version__ as __version__  # both distributions are released together
from reverb_writer.lazy import lazy_names

# TensorFlow reads this when it loads. It would log missing GPUs as errors, and this package computes nothing with it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
