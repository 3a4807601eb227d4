"""Rendezvous hashing: which shard an episode goes to, and which ones move when there are more shards or fewer."""

from __future__ import annotations

import collections
import os

from hypothesis import given
from hypothesis import strategies as st

from reverb_writer.client.targets import default_actor_id, rank_shards

ACTORS = [f"actor-{number}" for number in range(3000)]

names = st.lists(st.text(min_size=1, max_size=20), min_size=2, max_size=8, unique=True)


def shards_of(names: list[str]) -> dict[str, str]:
    return {actor: rank_shards(actor, names)[0] for actor in ACTORS}


def test_order_is_that_of_the_hashes() -> None:
    """`printf 7:actor-7a | b2sum -l 64` gives 911f4c95..., with `b` 22d3ad03..., with `c` 4c28503f..."""
    assert rank_shards("actor-7", ["b", "c", "a"]) == ["a", "c", "b"]


def test_each_of_four_shards_gets_about_a_quarter_of_the_actors() -> None:
    counts = collections.Counter(shards_of(["a", "b", "c", "d"]).values())
    assert all(650 < counts[name] < 850 for name in "abcd")  # 750 expected, standard deviation 24


def test_shard_that_is_added_to_four_takes_about_a_fifth_of_the_actors_all_for_itself() -> None:
    before, after = shards_of(["a", "b", "c", "d"]), shards_of(["a", "b", "c", "d", "e"])
    moved = {actor for actor in ACTORS if before[actor] != after[actor]}
    assert {after[actor] for actor in moved} == {"e"}
    assert 510 < len(moved) < 690  # 600 expected, standard deviation 22
    assert {before[actor] for actor in moved} == set("abcd")


@given(st.text(max_size=20), names, st.randoms())
def test_order_of_names_does_not_matter(actor: str, names: list[str], random: object) -> None:
    shuffled = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert rank_shards(actor, names) == rank_shards(actor, shuffled)
    assert sorted(rank_shards(actor, names)) == sorted(names)


@given(st.text(max_size=20), names)
def test_shard_that_is_removed_moves_only_its_own_actors(actor: str, names: list[str]) -> None:
    """Each to the next in its order."""
    chosen, second, *_ = rank_shards(actor, names)
    for removed in names:
        rest = [name for name in names if name != removed]
        assert rank_shards(actor, rest)[0] == (second if removed == chosen else chosen)


def test_default_ids_differ_and_name_this_process() -> None:
    ids = [default_actor_id() for _ in range(10)]
    assert len(set(ids)) == 10
    assert all(f":{os.getpid()}:" in one for one in ids)
