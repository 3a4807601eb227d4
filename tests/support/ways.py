"""Ways from episodes, listed by hand, to transitions in memory: rows of each layout, as windows and as flat rows.

`ways_of_servers` has the ways through a server, and `tests/properties/rows` plays random episodes through all ways. To
add a layout, add its rows to `rows_of` and its name to a list; to add a container, add a function to `CONTAINERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tree
from played import COMMON, LAYOUTS, Pair, Played, has_discounts, laid_out

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL

BOUNDARY_LAYOUTS = [*LAYOUTS, "kinds"]
"""Layouts whose episodes end with a row of the final observation; "kinds" has no flags, but kinds beside the rows."""

ACTION_LAYOUTS = ["gymnasium", "d4rl", "rsl_rl", "torchrl", "kinds of actions"]
"""Layouts whose last row has the last action: they keep no final observation."""


def all_pairs(episode: Played, layout: str) -> list[Pair]:
    """Return all transitions of an episode."""
    return [episode.pair(t, has_discounts(layout)) for t in range(episode.size)]


def pairs_of_actions(episode: Played, layout: str) -> list[Pair]:
    """Return the transitions of an episode whose final observation is unknown."""
    *before, last = all_pairs(episode, layout)
    is_terminal = episode.end == "terminated"
    return [*before, *([last._replace(next_observation=last.observation)] if is_terminal else [])]


class Way(NamedTuple):
    """A way from episodes to transitions."""

    run: Callable[[Sequence[Played]], Iterable[Pair]]
    keeps: Callable[[Played], Sequence[Pair]]  # the transitions of an episode that it must give


def pairs_in(found: rw.Transitions) -> list[Pair]:
    """Return the transitions of a batch, of any shape and library, in the order of rows."""
    columns = [*found[:2], found.reward, found.discount, found.next_observation]
    mask = np.asarray(found.mask)
    return list(itertools.starmap(Pair, zip(*(np.asarray(column)[mask].tolist() for column in columns), strict=True)))


# ------------------------------------------------------------------------------------------------------ in memory


def kinds_by_hand(episode: Played, *, beside_actions: bool = False) -> Any:
    """Return the kinds of an episode's rows."""
    kinds = np.full(episode.size + (not beside_actions), ACTION, np.uint8)
    kinds[0] |= FIRST
    if episode.end != "cut":
        last = LAST | TERMINAL if episode.end == "terminated" else LAST
        kinds[-1] = kinds[-1] | last if beside_actions else last
    return kinds


def rows_of(episode: Played, layout: str) -> list[Any]:
    """Return the rows of an episode in a layout."""
    if layout not in ACTION_LAYOUTS:
        written = [episode.row(t) for t in range(episode.num_rows)]
        following = [*written[1:], None]
        known = "rlds" if layout == "kinds" else layout
        rows = [laid_out(row, known, after) for row, after in zip(written, following, strict=True)]
        return [{name: row[name] for name in COMMON} for row in rows] if layout == "kinds" else rows
    rows = []
    for t in range(episode.size):
        row = {name: episode.row(t)[name] for name in COMMON}
        is_last = t == episode.size - 1
        terminated, truncated = (np.bool_(is_last and episode.end == end) for end in ("terminated", "truncated"))
        flags: dict[str, dict[str, Any]] = {
            "gymnasium": {"terminated": terminated, "truncated": truncated},
            "d4rl": {"terminals": terminated, "timeouts": truncated},
            "rsl_rl": {"dones": terminated | truncated, "time_outs": truncated},
            "torchrl": {
                "is_init": np.bool_(t == 0),
                "next": {"terminated": terminated, "done": terminated | truncated},
            },
            "kinds of actions": {},
        }
        rows.append({**row, **flags[layout]})
    return rows


def stacked(rows: Sequence[Any]) -> Any:
    return tree.map_structure(lambda *leaves: np.stack(leaves), *rows)


class Rows(NamedTuple):
    """Rows of some episodes in memory, and what the caller knows of them."""

    steps: Any
    options: dict[str, Any]  # of `to_transitions`


def _options(layout: str, kinds: Any) -> dict[str, Any]:
    beside = layout in ACTION_LAYOUTS
    if layout.startswith("kinds"):
        return {"kinds": kinds, **({"last_row": "action"} if beside else {})}
    return {"last_row": "action"} if beside else {"last_row": "boundary"} if layout == "flags" else {}


def _kinds(episode: Played, layout: str) -> Any:
    return kinds_by_hand(episode, beside_actions=layout in ACTION_LAYOUTS)


def windows(episodes: Sequence[Played], layout: str) -> Iterable[Rows]:
    """Yield each episode as a window, [1, T]."""
    for episode in episodes:
        steps = stacked(rows_of(episode, layout))
        one = tree.map_structure(lambda leaf: leaf[None], steps)
        yield Rows(one, _options(layout, _kinds(episode, layout)[None]))


def padded(episodes: Sequence[Played], layout: str) -> Iterable[Rows]:
    """Yield all episodes as windows with zeros after them, [B, T], and a mask."""
    both = rw.slices.pad_trajectories([stacked(rows_of(episode, layout)) for episode in episodes])
    kinds = np.full(both.mask.shape, PADDING, np.uint8)
    for row, episode in zip(kinds, episodes, strict=True):
        known = _kinds(episode, layout)
        row[: len(known)] = known
    yield Rows(both.data, {**_options(layout, kinds), **({} if layout.startswith("kinds") else {"mask": both.mask})})


def spanning(episodes: Sequence[Played], layout: str) -> Iterable[Rows]:
    """Yield all episodes as one window, [1, T]; flags without first rows need the mask."""
    kinds = np.concatenate([_kinds(episode, layout) for episode in episodes])[None]
    steps = stacked([row for episode in episodes for row in rows_of(episode, layout)])
    more = {"mask": np.ones(kinds.shape, bool)} if layout == "flags" else {}
    yield Rows(tree.map_structure(lambda leaf: leaf[None], steps), {**_options(layout, kinds), **more})


def flat(episodes: Sequence[Played], layout: str) -> Iterable[Rows]:
    """Yield all episodes end to end, [N]."""
    for steps, options in spanning(episodes, layout):
        less = {name: value[0] if name == "kinds" else value for name, value in options.items() if name != "mask"}
        yield Rows(tree.map_structure(lambda leaf: leaf[0], steps), less)


CONTAINERS = {"windows": windows, "padded": padded, "spanning": spanning, "flat": flat}


def transitions_of(rows: Rows, make: Callable[[Any], Any] = np.asarray) -> rw.Transitions:
    """Return the transitions of rows as arrays of a library."""
    arrays = {name: value if name == "last_row" else make(value) for name, value in rows.options.items()}
    return rw.to_transitions(tree.map_structure(make, rows.steps), **arrays)


def in_memory(layout: str, container: str, make: Callable[[Any], Any] = np.asarray) -> Way:
    """Return the way of rows of a layout in a container, as arrays of a library."""

    def run(episodes: Sequence[Played]) -> Iterable[Pair]:
        for rows in CONTAINERS[container](episodes, layout):
            yield from pairs_in(transitions_of(rows, make))

    def keeps(episode: Played) -> list[Pair]:
        return (pairs_of_actions if layout in ACTION_LAYOUTS else all_pairs)(episode, layout)

    return Way(run, keeps)


def _suits(layout: str, container: str) -> bool:
    """Return whether rows of the layout show where episodes begin and end in the container."""
    return not (layout == "discount" and container in ("spanning", "flat"))


MEMORY = {
    f"{layout}, {container}": (layout, container)
    for layout, container in itertools.product([*BOUNDARY_LAYOUTS, *ACTION_LAYOUTS], CONTAINERS)
    if _suits(layout, container)
}
"""Layout and container of each way in memory, by name."""
