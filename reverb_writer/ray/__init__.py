"""Shards that Ray places, watches and restarts; the data never pass through Ray.

    ReplayCluster.start -> a detached actor per shard, found by its name
    actor               -> `reverb-writer-server serve`, a child process on its own interpreter
    cluster.target()    -> a source of addresses, for `rw.Client`, observers and datasets

The extra `ray` installs Ray: pip install 'reverb-writer[ray]'.
"""

from __future__ import annotations

from reverb_writer.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
