"""A Reverb replay server that is safe to run: `ReplayServer` in process, the command `reverb-writer-server` outside.

The names below load when they are first touched: `reverb-writer-server checkpoints` needs no TensorFlow.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# TensorFlow reads it when it is loaded, and would tell of missing GPUs as of errors; nothing here computes with it.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

if TYPE_CHECKING:
    from reverb_writer_server.ports import PortInUseError as PortInUseError
    from reverb_writer_server.replay_server import ReplayServer as ReplayServer

__version__ = "0.1.0"

_MODULE_OF = {"PortInUseError": "ports", "ReplayServer": "replay_server"}


def __getattr__(name: str) -> Any:
    """Load a public name at its first touch (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(globals().keys() | _MODULE_OF.keys())
