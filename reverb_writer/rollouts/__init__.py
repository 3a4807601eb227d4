"""On-policy rollouts: storages in memory. Names load at first use."""

from __future__ import annotations

from reverb_writer.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
