"""A Reverb replay server that is safe to run: `ReplayServer` in process, `python -m reverb_writer_server` outside."""

from __future__ import annotations

import os

# TensorFlow reads it when it is loaded, and would tell of missing GPUs as of errors; nothing here computes with it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from reverb_writer_server.ports import PortInUseError
from reverb_writer_server.replay_server import ReplayServer

__all__ = ["PortInUseError", "ReplayServer"]
__version__ = "0.1.0"
