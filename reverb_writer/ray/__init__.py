"""Shards that Ray places, watches and starts again; no byte of the data passes through Ray.

    ReplayCluster.start -> a detached actor for each shard, found by its name
    actor               -> `reverb-writer-server serve`, a child process on an interpreter of its own
    cluster.target()    -> a source of addresses, for `rw.Client`, observers and datasets

The extra `ray` brings what this needs: pip install 'reverb-writer[ray]'.
"""

from __future__ import annotations

from reverb_writer.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
