"""Data of the acting policy: log-probabilities, values, hidden states, the version of its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tree

from reverb_writer.errors import SpecError, StructureError
from reverb_writer.leaves import host_array


class PolicyExtras:
    """Copies what a function returns before each step, and has zeros of the same shapes for an episode's last step."""

    def __init__(self, read: Callable[[], Any], num_envs: int | None = None) -> None:
        """Set the function.

        Args:
            read: returns a nest; with leaves [N, ...] for N environments.
            num_envs: N; None for a single environment.
        """
        if not callable(read):
            raise SpecError(
                f"`extras` must be a function without arguments that returns a nest, got {type(read).__name__}."
            )
        self._read, self._num_envs = read, num_envs
        self.zeros: Any = None

    def read(self, resetting: Any = None) -> Any:
        """Return what belongs to the action that is about to be taken, as arrays of its own.

        Args:
            resetting: [N] bool, environments that this step resets: their action has no effect, and their row is zeros.
        """
        nest = tree.map_structure(lambda leaf: host_array(leaf).copy(), self._read())
        if self._num_envs is not None:
            for path, leaf in tree.flatten_with_path(nest):
                if leaf.shape[:1] != (self._num_envs,):
                    raise StructureError(
                        f"`extras`, leaf `{'/'.join(map(str, path))}` has shape {leaf.shape}, expected "
                        f"({self._num_envs}, ...): one row an environment."
                    )
        if self.zeros is None:
            self.zeros = tree.map_structure(np.zeros_like, nest)
        if resetting is not None and resetting.any():
            for leaf in tree.flatten(nest):
                leaf[resetting] = 0
        return nest
