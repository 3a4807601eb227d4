"""How old the policy was that acted in a sample. Pure.

learner: variables.publish(weights) -> version -> actor: variables.version -> `policy_version`, a leaf of each step
    -> info.policy_versions, of a sample's oldest row -> info.policy_ages = the learner's version - that
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.decoding.samples import Column
from reverb_writer.errors import StructureError
from reverb_writer.nests import join_paths, named_leaves

LEAF = "policy_version"
"""Name of the leaf, anywhere in the nest of a step, that holds the version of the weights that chose its action."""


def versions_of(columns: Sequence[Column], pack: Callable[[Sequence[Any]], Any]) -> npt.NDArray[np.int64]:
    """Return [B] the version of each sample's oldest row; 0 where no row has one, as a step without an action.

    Raises:
        StructureError: no leaf is named `policy_version`, or it is not one integer a step.
    """
    paths, numbers = named_leaves(pack(range(len(columns))), "a step")
    found = [number for path, number in zip(paths, numbers, strict=True) if path.split("/")[-1] == LEAF]
    if len(found) != 1:
        raise StructureError(
            f"`policy` needs one leaf named `{LEAF}` in the steps of the table, which has {join_paths(paths)}. Record "
            f'it: `record(env, observer, extras=lambda: {{"{LEAF}": variables.version}})`.'
        )
    column = columns[found[0]]
    rows = column.rows
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise StructureError(f"`{paths[found[0]]}` must be one integer a step, for the age of the policy.")
    newest = np.iinfo(np.int64).max
    versions = np.where(rows > 0, rows, newest).astype(np.int64)
    starts = np.cumsum(column.lengths) - column.lengths
    oldest = np.minimum.reduceat(versions, starts)
    return np.where(oldest == newest, 0, oldest)


def ages_of(versions: npt.NDArray[np.int64], current: int) -> npt.NDArray[np.int64]:
    """Return [B] how many versions ago each sample's policy was the learner's.

    -1 where its version is not known, or newer than the learner's, as after a restart of a learner that has not
    published yet.

    >>> ages_of(np.array([7, 10, 0, 12]), 10)
    array([ 3,  0, -1, -1])
    """
    return np.where((versions > 0) & (versions <= current), current - versions, -1)
