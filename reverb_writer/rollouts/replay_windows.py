"""Windows of a replay table as the rows of a rollout: each window is an environment.

batch.data    leaves [batch size, L, ...]        batches of B windows       transitions, each step
batch.kinds   [batch size, L]             ──>    [B, L, ...]          ──>   [B, ...]

Fields that the windows do not have come from the kinds of their rows:

    dones        rows whose action ended the episode, or after which the episode is cut
    truncated    rows with `dones` whose episode the environment did not end
    mask         0 on rows without an action: boundary rows and padding
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import tree

from reverb_writer import rows
from reverb_writer.errors import DOCS, IncompleteError, StructureError
from reverb_writer.leaves import host_array
from reverb_writer.nests import fields_of, map_present
from reverb_writer.rollouts.array_nests import Arrays
from reverb_writer.rollouts.storage_records import Transition
from reverb_writer.rows.kinds import pairs


def read(
    arrays: Arrays,
    dataset: Iterable[Any],
    kind: type[Transition],
    num_envs: int,
    num_rows: int,
    fields_fn: Callable[[Any], Mapping[str, Any]] | None,
) -> list[Transition]:
    """Take batches with `num_envs` windows together; return their steps: `num_rows` or `num_rows` + 1."""
    batches: list[Mapping[str, Any]] = []
    missing = num_envs
    batch_iterator = iter(dataset)
    while missing:
        batch = next(batch_iterator, None)
        if batch is None:
            raise IncompleteError(f"the dataset has ended: got {num_envs - missing} windows, expected {num_envs}.")
        given = _fields_of(batch.data if fields_fn is None else fields_fn(batch.data), kind)
        found = {name: map_present(arrays.asarray, nest) for name, nest in given.items()}
        size, length = _size_of(found, missing, num_rows)
        shown = _shown_by_kinds(arrays, batch, found)
        batches.append({**{name: arrays.asarray(flags) for name, flags in shown.items()}, **found})
        missing -= size
    windows = arrays.concatenate(*batches) if len(batches) > 1 else batches[0]
    steps = [kind(**{name: _step(arrays, name, nest, t) for name, nest in windows.items()}) for t in range(length)]
    if length > num_rows:
        for name in (field.name.removeprefix("next_") for field in fields(kind) if field.name.startswith("next_")):
            if getattr(steps[num_rows - 1], f"next_{name}") is None:
                setattr(steps[num_rows - 1], f"next_{name}", getattr(steps[num_rows], name))
    return steps


def _fields_of(data: Any, kind: type[Transition]) -> Mapping[str, Any]:
    names = {field.name for field in fields(kind)}
    given = fields_of(data)
    if given is None or not names.issuperset(given):
        found = f"a {type(data).__name__}" if given is None else ", ".join(map(str, given))
        raise StructureError(
            f"the windows must be dicts or named tuples of fields of `Transition`, {', '.join(sorted(names))}; got "
            f"{found}. Pass `fields_fn` to translate them."
        )
    return given


def _size_of(found: Mapping[str, Any], missing: int, num_rows: int) -> tuple[int, int]:
    """Return the number of windows in a batch, and their length."""
    sizes = {tuple(leaf.shape[:2]) for leaf in tree.flatten(found) if leaf is not None}
    if len(sizes) != 1 or len(size := sizes.pop()) != 2 or size[1] not in (num_rows, num_rows + 1):  # noqa: PLR2004
        shapes = map_present(lambda leaf: tuple(leaf.shape), dict(found))
        raise StructureError(
            f"windows must have {num_rows} steps, or {num_rows + 1} with the one after the last, in leaves "
            f"[batch size, steps, ...]; got shapes {shapes}."
        )
    if size[0] > missing:
        raise StructureError(
            f"got a batch of {size[0]} windows, expected at most {missing}. Choose a batch size that divides the "
            "number of environments."
        )
    return int(size[0]), int(size[1])


def _shown_by_kinds(arrays: Arrays, batch: Any, found: Mapping[str, Any]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the fields that the kinds of rows show and that the windows may lack; refuse ends on boundary rows."""
    kinds = None
    with contextlib.suppress(StructureError):  # nothing shows the ends: the windows have fields for them
        kinds = getattr(batch, "kinds", None)
    if kinds is not None:
        kinds = host_array(kinds)
        _check_ends(arrays, found, kinds)
        ends = _ends_of(kinds)
        return ends if "dones" not in found else {name: flags for name, flags in ends.items() if name == "mask"}
    with contextlib.suppress(StructureError):
        kinds = host_array(rows.kinds_of(batch.data, outcome=False))
    if kinds is not None:
        _check_ends(arrays, found, kinds)
    return {}


def _ends_of(kinds: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.bool_]]:
    """Return the fields of `Transition` that the kinds show, [batch size, L]."""
    is_action, has_end = rows.has(kinds, rows.ACTION), rows.has(kinds, rows.LAST)
    followed, terminal = (np.pad(flags, ((0, 0), (0, 1))) for flags in pairs(kinds)[:2])
    is_boundary = has_end & ~is_action
    ends_next = np.pad(is_boundary[:, 1:], ((0, 0), (0, 1)))
    dones = is_action & (has_end | ~followed | ends_next)
    dones[:, -1] &= has_end[:, -1]  # the window does not show whether the episode continues after it
    truncated = dones & ~terminal & ~rows.has(kinds, rows.TERMINAL)
    found = {"dones": dones, "truncated": truncated}
    return found if is_action.all() else {**found, "mask": is_action}


def _check_ends(arrays: Arrays, found: Mapping[str, Any], kinds: npt.NDArray[np.uint8]) -> None:
    """Refuse ends that are flagged on boundary rows."""
    is_boundary = rows.has(kinds, rows.LAST) & ~rows.has(kinds, rows.ACTION)
    for name in ("dones", "truncated"):
        flags = found.get(name)
        if flags is None:
            continue
        wrong = int(((arrays.to_numpy(flags).reshape(is_boundary.shape) != 0) & is_boundary).sum())
        if wrong:
            raise StructureError(
                f"`{name}` is set on {wrong} boundary rows, which only hold the final observation. It belongs on the "
                f"row of the action that ended the episode, one row before. Leave out `{name}`: the kinds of the rows "
                f"show the ends. {DOCS}/explanation/steps.html draws the rows."
            )


def _step(arrays: Arrays, name: str, nest: Any, t: int) -> Any:
    step = map_present(lambda leaf: leaf[:, t], nest)
    if name == "hidden_states":  # [B, layers, H] in a window, [layers, B, H] in a network
        step = map_present(lambda leaf: arrays.xp.moveaxis(leaf, 0, 1), step)
    return step
