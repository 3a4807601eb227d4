"""Which shard an actor writes to: rendezvous hashing of its id. Pure but for `default_actor_id`.

Each pair of actor and shard has a score, a hash of both names. The actor's shard is the one of the highest score, so
every process computes the same without asking anyone. A shard that is added takes those actors for which its score is
the highest, about 1 of n; one that is removed gives away its own. No other actor moves.

Source: Thaler and Ravishankar 1998, Using name-based mappings to increase hit rates.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from collections.abc import Iterable

from reverb_writer.errors import SpecError

_numbers = itertools.count()


def rank_shards(actor_id: str, names: Iterable[str]) -> list[str]:
    """Return the shards in the order in which an actor chooses them: where it goes if those before are lost.

    >>> rank_shards("actor-7", ["a", "b", "c"]), rank_shards("actor-7", ["c", "a"])
    (['a', 'c', 'b'], ['a', 'c'])
    """
    return sorted(names, key=lambda name: (_score(actor_id, name), name), reverse=True)


def choose_shard(actor_id: str, names: Iterable[str]) -> str:
    """Return the shard that an actor writes to.

    It depends on nothing but the arguments, not even on the order of the names. Of n shards each gets about 1/n of many
    actors. A shard that is added moves about 1/n of them, all to itself; one that is removed moves only its own.

    Args:
        actor_id: a name that no other actor has, and that stays when the actor starts again.
        names: of the shards, all different, at least one; a server of a list of addresses is named by its address.

    Raises:
        SpecError: there is no shard.

    >>> [choose_shard(f"actor-{number}", ["a", "b", "c"]) for number in range(6)]
    ['c', 'c', 'a', 'c', 'a', 'a']
    """
    ranked = rank_shards(actor_id, names)
    if not ranked:
        raise SpecError("`names` must be the names of one shard or more, got none.")
    return ranked[0]


def default_actor_id() -> str:
    """Return an id that no other writer has: this machine, this process, and how many had one before in it."""
    return f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"


def _score(actor_id: str, name: str) -> int:
    # The length of the id keeps "a" + "bc" and "ab" + "c" apart.
    pair = f"{len(actor_id)}:{actor_id}{name}".encode()
    return int.from_bytes(hashlib.blake2b(pair, digest_size=8).digest(), "big")
