"""The transitions of a batch with the values before and after them, for the functions of `rw.returns`."""

from __future__ import annotations

from typing import Any

from reverb_writer.arrays import any_true
from reverb_writer.errors import StructureError
from reverb_writer.nests import fields_of, leaf_at
from reverb_writer.rows.layouts import steps_and_mask
from reverb_writer.transitions.pairing import is_record, paired, steps_fields
from reverb_writer.transitions.records import Transitions


def is_batch(steps: Any) -> bool:
    """Return whether this is a `Batch` or the nest of its data, not transitions or an array."""
    if isinstance(steps, Transitions):
        return False
    return is_record(steps) or fields_of(steps_and_mask(steps)[0]) is not None


def with_values(batch: Any, values: Any) -> tuple[Transitions, Any, Any]:
    """Return the transitions of a batch, which may lack observations and actions, with values before and after them.

    If `values` is the name of a leaf, both values are its rows. An array is returned unchanged, with None.

    Raises:
        StructureError: as in `to_transitions`; or the leaf does not exist, or lacks values of final observations.
    """

    def of_values(data: Any) -> dict[str, Any]:
        fields = {"observation": (), "action": (), **steps_fields(data, ("reward",))}
        return {**fields, "observation": leaf_at(fields, values)} if isinstance(values, str) else fields

    found, ends = paired(batch, of_values)
    if not isinstance(values, str):
        return found, values, None
    before, after = found.observation, found.next_observation
    if before.ndim == found.mask.ndim + 1 and before.shape[-1] == 1 and before.ndim > found.reward.ndim:
        before, after = before[..., 0], after[..., 0]
    if before.ndim == found.mask.ndim:
        # Recorders store zeros where they have no final value. They do not count where the discount is 0.
        lacks = found.mask & ends & (before != 0) & (after == 0)
        shape, discount = tuple(lacks.shape), found.discount
        if tuple(getattr(discount, "shape", ())) in (shape, (*shape, 1)):
            lacks = lacks & (discount.reshape(shape) != 0)
        if any_true(lacks):
            raise StructureError(
                f"`{values}` is 0 on final observations of truncated episodes, because the recorder has no value "
                "there. Give `record` the values of final observations (`final_extras`), or pass the critic's values "
                "of all rows instead of the name."
            )
    return found, before, after
