"""instinct_rl's names, for a one-line migration: its spelling, its order of files, and its pickled trajectories.

    from reverb_writer.instinct_rl import RolloutDataset, RolloutStorage

This package only serves code and files of instinct_rl; new code does not need it, and no other module imports it.
docs/how-to/from-instinct-rl.md lists the intended differences. Names load at first use.
"""

from __future__ import annotations

from reverb_writer.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
