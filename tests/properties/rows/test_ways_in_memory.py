"""Random episodes, listed by hand, in every layout that `reverb_writer.rows` knows: exactly their transitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played import Played, played
from ways import MEMORY, Way, in_memory


def check(way: Way, episodes: Sequence[Played]) -> None:
    assert Counter(way.run(episodes)) == Counter(pair for episode in episodes for pair in way.keeps(episode))


@pytest.mark.parametrize("name", MEMORY)
@settings(max_examples=40)
@given(episodes=played())
def test_rows_in_memory_give_the_transitions_of_their_episodes(name: str, episodes: list[Played]) -> None:
    check(in_memory(*MEMORY[name]), episodes)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
@settings(max_examples=40)
@given(episodes=played(), name=st.sampled_from([*MEMORY]))
def test_tensors_and_jax_arrays_give_the_transitions_of_their_episodes(
    library: str, episodes: list[Played], name: str
) -> None:
    pytest.importorskip("array_api_compat")
    make: Any = pytest.importorskip(library).asarray
    check(in_memory(*MEMORY[name], make), episodes)
