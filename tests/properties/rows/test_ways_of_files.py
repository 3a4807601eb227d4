"""Random episodes, listed by hand, through files: exactly their transitions."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from played import Pair, Played, played
from reading import Place
from ways_of_files import (
    WRITTEN,
    export_table,
    import_files,
    pairs_of_episodes,
    read_files,
    without_discounts,
    write_files,
)
from ways_of_servers import FILLER, OBSERVERS, READERS, STEPS, suits, write

# A client's threads draw keys by `random` while Hypothesis draws an example, which it takes for a part of the example.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")


WITH_FINAL_OBSERVATIONS = [
    name
    for name, way in STEPS.items()
    if way.last_row is None and name not in ("end_of_episode", "said, no final observation")
]


@contextlib.contextmanager
def new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def expected(steps: str, episodes: Sequence[Played]) -> Counter[Pair]:
    return Counter(without_discounts(pair for episode in episodes for pair in STEPS[steps].keeps(episode)))


def listed(pairs: Iterable[Pair]) -> Counter[Pair]:
    return Counter(pair for pair in without_discounts(pairs) if pair.observation < FILLER)


@pytest.mark.parametrize("steps", WRITTEN)
@settings(max_examples=15)
@given(episodes=played())
def test_files_give_the_transitions_of_their_episodes(steps: str, episodes: list[Played]) -> None:
    assume({episode.end for episode in episodes} <= STEPS[steps].ends)
    assume(expected(steps, episodes))  # files without a transition are refused
    with new_folder() as folder:
        write_files(folder, steps, episodes)
        assert listed(read_files(folder)) == expected(steps, episodes)


@settings(max_examples=40)
@given(episodes=played(), steps=st.sampled_from(WRITTEN), observer=st.sampled_from([*OBSERVERS]))
def test_imported_files_give_the_transitions_of_their_episodes(
    place: Place, episodes: list[Played], steps: str, observer: str
) -> None:
    assume(suits(steps, observer, episodes))
    place.client.reset("a")
    last_row = STEPS[steps].last_row
    with new_folder() as folder:
        write_files(folder, steps, episodes)
        options = {"last_row": STEPS[steps].options.get("last_row")}
        import_files(folder, OBSERVERS[observer](place.client, timeout_s=60, **options))
    found = listed(READERS["windows"](place.client, last_row))
    assert (Counter({*found}) if last_row == "action" else found) == expected(steps, episodes)


@settings(max_examples=40)
@given(episodes=played(), steps=st.sampled_from([*STEPS]), observer=st.sampled_from([*OBSERVERS]))
def test_exported_items_give_the_transitions_of_their_episodes(
    uniform: Place, episodes: list[Played], steps: str, observer: str
) -> None:
    assume(suits(steps, observer, episodes))
    uniform.client.reset("a")
    write(uniform.client, steps, observer, episodes)
    with new_folder() as folder:
        export_table(uniform.client, folder)
        found = listed(read_files(folder)) if expected(steps, episodes) else Counter[Pair]()
    # A row that is a transition by itself may be in two items.
    has_action = any(name in steps for name in ("gymnasium", "d4rl", "rsl_rl", "torchrl"))
    assert (Counter({*found}) if has_action else found) == expected(steps, episodes)


@settings(max_examples=40)
@given(
    episodes=played(),
    steps=st.sampled_from(WITH_FINAL_OBSERVATIONS),
    observer=st.sampled_from(["episodes", "windows up to 4"]),
)
def test_episodes_of_items_give_their_transitions(
    place: Place, episodes: list[Played], steps: str, observer: str
) -> None:
    assume(suits(steps, observer, episodes))
    place.client.reset("a")
    write(place.client, steps, observer, episodes)
    size = place.client.server_info()["a"].current_size
    found = listed(pairs_of_episodes(place.client.sample("a", size) if size else ()))
    assert found == expected(steps, episodes)
