"""A Reverb replay server that is safe to run: `ReplayServer` in process, the command `reverb-writer-server` outside.

The names below load when they are first touched: `reverb-writer-server checkpoints` needs no TensorFlow.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from reverb_writer.lazy import lazy_names

# TensorFlow reads it when it is loaded, and would tell of missing GPUs as of errors; nothing here computes with it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if TYPE_CHECKING:
    from reverb_writer_server.ports import PortInUseError as PortInUseError
    from reverb_writer_server.replay_server import ReplayServer as ReplayServer

__version__ = "0.1.0"

_MODULE_OF = {"PortInUseError": "ports", "ReplayServer": "replay_server"}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULE_OF)
