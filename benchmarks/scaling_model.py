"""A simulation of up to 16 hosts, fitted to what `shards` measures on one: `python -m benchmarks.scaling_model`.

It measures nothing. docs/deploy/sizing.md has its results and what it leaves out.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.report import Table

_HOSTS = (1, 2, 4, 8, 16)
_PROCESSORS = 2
_NETWORK_BYTES_PER_S = 10e9 / 8
_DRAWS = 2_000


def scaling_model(server_cpu_us: float, item_bytes: float, num_actors: int) -> Table:
    """Return what shards on several hosts would take.

    Args:
        server_cpu_us: CPU time of a server for an item, microseconds, as `shards` measures it.
        item_bytes: of an item on the network.
        num_actors: how many write, each as fast as the others.
    """
    shard = min(_PROCESSORS * 1e6 / server_cpu_us, _NETWORK_BYTES_PER_S / item_bytes)
    rows = []
    for hosts in _HOSTS:
        share = busiest_share(hosts, num_actors)
        rows.append(
            [
                str(hosts),
                f"{hosts * shard:,.0f}",
                f"{share:.2f}",
                f"{hosts * shard / share:,.0f}",
                f"{hosts * shard / share / num_actors:,.0f}",
            ]
        )
    return Table(
        f"Simulated: a shard on each host, {num_actors:,} actors",
        ["hosts", "items/s, evenly spread", "busiest shard over the mean", "items/s, spread by hashing", "of an actor"],
        rows,
        f"{server_cpu_us:g} us an item, {_PROCESSORS} processors a shard, {item_bytes:,.0f} bytes an item, 10 Gbit/s.",
    )


def busiest_share(shards: int, actors: int) -> float:
    """Return how many actors the busiest shard has over the mean, if a hash spreads them; the mean of many draws.

    >>> busiest_share(1, 1000), busiest_share(2, 1)
    (1.0, 2.0)
    """
    counts = np.random.default_rng(0).multinomial(actors, np.full(shards, 1 / shards), _DRAWS)
    return float(np.mean(counts.max(axis=1)) / (actors / shards))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server-cpu-us", type=float, default=8.0)
    parser.add_argument("--item-bytes", type=float, default=1000.0)
    parser.add_argument("--actors", type=int, default=1000)
    given = parser.parse_args()
    print(scaling_model(given.server_cpu_us, given.item_bytes, given.actors).markdown())
