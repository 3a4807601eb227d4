"""Random episodes, listed by hand, written to a server in each way and read back: exactly their transitions."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from played import Pair, Played, played
from reading import Place, fifo
from ways_of_servers import FILLER, OBSERVERS, READERS, SAMPLERS, STEPS, suits, write

import reverb_writer as rw

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

PRESENT = [name for name in READERS if name not in ("torch", "jax") or importlib.util.find_spec(name)]


def expected(steps: str, episodes: Sequence[Played]) -> Counter[Pair]:
    return Counter(pair for episode in episodes for pair in STEPS[steps].keeps(episode))


def counted(steps: str, pairs: Iterable[Pair]) -> Counter[Pair]:
    """Count transitions of listed episodes; a row that is a transition by itself may be in two items."""
    found = Counter(pair for pair in pairs if pair.observation < FILLER)
    return Counter({*found}) if STEPS[steps].last_row == "action" else found


@pytest.mark.parametrize("steps", STEPS)
@settings(max_examples=25)
@given(episodes=played(), observer=st.sampled_from([*OBSERVERS]), reader=st.sampled_from(PRESENT))
def test_a_server_gives_the_transitions_of_its_episodes(
    place: Place, steps: str, episodes: list[Played], observer: str, reader: str
) -> None:
    assume(suits(steps, observer, episodes))
    place.client.reset("a")
    write(place.client, steps, observer, episodes)
    found = READERS[reader](place.client, STEPS[steps].last_row)
    assert counted(steps, found) == expected(steps, episodes)


@settings(max_examples=40)
@given(
    episodes=played(),
    steps=st.sampled_from([*STEPS]),
    observer=st.sampled_from([*OBSERVERS]),
    sampler=st.sampled_from([*SAMPLERS]),
)
def test_samplers_give_only_transitions_of_the_episodes(
    uniform: Place, episodes: list[Played], steps: str, observer: str, sampler: str
) -> None:
    assume(suits(steps, observer, episodes))
    uniform.client.reset("a")
    write(uniform.client, steps, observer, episodes)
    found = counted(steps, SAMPLERS[sampler](uniform.client, STEPS[steps].last_row))
    assert {*found} <= {*expected(steps, episodes)}


@settings(max_examples=25)
@given(episodes=played(), steps=st.sampled_from([*STEPS]), observer=st.sampled_from([*OBSERVERS]))
def test_two_servers_give_the_transitions_of_their_episodes(
    places: list[Place], episodes: list[Played], steps: str, observer: str
) -> None:
    assume(suits(steps, observer, episodes))
    with rw.Client([place.address for place in places]) as client:
        client.reset("a")
        write(client, steps, observer, episodes)
        found = [pair for place in places for pair in READERS["windows"](place.client, STEPS[steps].last_row)]
    assert counted(steps, found) == expected(steps, episodes)


@pytest.fixture
def places() -> Iterator[list[Place]]:
    """Two servers with a table whose items come out once each."""
    with contextlib.ExitStack() as opened:
        servers = [opened.enter_context(rw.LocalServer([fifo("a")])) for _ in range(2)]
        yield [Place(one.address, opened.enter_context(rw.Client(one.address))) for one in servers]
