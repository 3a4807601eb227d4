"""The columns of a written step: its leaves, and flags if they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from reverb_writer.errors import StructureError
from reverb_writer.nests import join_paths, named_leaves, packer, structure_of
from reverb_writer.protocol import tensors
from reverb_writer.protocol.signatures import ArraySpec, check_signature, spec_tensor
from reverb_writer.rows import PADDING
from reverb_writer.rows.kinds import FLAGS
from reverb_writer.steps import StepStructure
from reverb_writer.windows import EndOfEpisode
from reverb_writer.writing.window_target import WindowTarget

STORED_FLAGS: Final[Mapping[str, Callable[[Any], Any]]] = {**FLAGS, "mask": lambda kinds: (kinds & PADDING) == 0}
"""The leaves that `store_flags` adds, and their values by the kinds of the rows."""


class StepLayout:
    """The columns of a step structure, with or without flags that repeat the kinds of rows. Immutable.

    Attributes:
        structure: structure of the given steps, without flags.
        paths, dtypes, shapes: per column, without the axes of time and environments.
        pack: function that makes the nest of a step or a window from its columns.
        encoded_spec: spec of a step, as the last tensor of each chunk.
        padding_step: columns of a padding step, without flags.
    """

    def __init__(self, structure: StepStructure, *, store_flags: bool) -> None:
        """Take a structure; add the leaves of `STORED_FLAGS` if `store_flags`.

        Raises:
            StructureError: the flags cannot be added, because a step is no dict or has a leaf of such a name.
        """
        self.structure, self.padding_step = structure, structure.padding_step()
        self.paths, self.dtypes, self.shapes = structure.paths, structure.dtypes, structure.shapes
        self._flags = STORED_FLAGS if store_flags else {}
        nest = structure.pack(list(map(ArraySpec, self.shapes, self.dtypes)))
        if store_flags:
            if not isinstance(nest, dict) or STORED_FLAGS.keys() & nest.keys():
                raise StructureError(
                    f"`store_flags` adds the leaves {join_paths([*STORED_FLAGS])} to each step, so a step must be a "
                    f"dict without them; got {join_paths(structure.paths)}."
                )
            nest = {**nest, **dict.fromkeys(STORED_FLAGS, ArraySpec((), np.dtype(bool)))}
            self.paths, specs = named_leaves(nest, "step")
            self.dtypes, self.shapes = tuple(spec.dtype for spec in specs), tuple(spec.shape for spec in specs)
        self.pack = packer(structure_of(nest))
        self.encoded_spec = spec_tensor(nest, with_kinds=True)

    def columns(self, columns: Sequence[Any], kinds: Any) -> list[Any]:
        """Return the columns of rows with these leaves and kinds: the leaves, and flags if they are stored."""
        if not self._flags:
            return list(columns)
        given = dict(zip(self.structure.paths, columns, strict=True))
        return [given[path] if path in given else self._flags[path](kinds) for path in self.paths]

    def check(self, target: WindowTarget, signatures: Mapping[str, Any]) -> None:
        """Raise `StructureError` if Reverb cannot store a column, or a window does not match its table's signature."""
        for dtype, path in zip(self.dtypes, self.paths, strict=True):
            try:
                tensors.dtype_number(dtype)
            except StructureError as error:
                raise StructureError(f"leaf `{path}`: {error}") from None
        length, is_cut = target.spec.sequence_length, target.spec.end_of_episode is EndOfEpisode.TRUNCATE
        for table in target.tables:
            if (signature := signatures[table]) is not None:
                check_signature(table, signature, self.paths, self.dtypes, self.shapes, length=length, is_cut=is_cut)
