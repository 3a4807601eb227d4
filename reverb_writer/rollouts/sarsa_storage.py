"""Rollouts with the observation after each action."""

from __future__ import annotations

from typing import Any

import tree

from reverb_writer.errors import IncompleteError
from reverb_writer.nests import write_row
from reverb_writer.rollouts import storage_records
from reverb_writer.rollouts.storage import RolloutStorage

_NEXT = {"next_observations": "observations", "next_critic_observations": "critic_observations"}
_FINAL = {"final_observations": "observations", "final_critic_observations": "critic_observations"}


class SarsaRolloutStorage(RolloutStorage):
    """A `RolloutStorage` whose minibatches have next observations, always of the same episode.

    The next observation of a row is the observation of the next row, or `next_observations` of the newest transition.
    Where an episode ended, it is `final_observations` of the transition, or if that is None the row's own observation:
    never the first one of the next episode.

    Attributes:
        next_observations: in the shape of the observations.
        next_critic_observations: in the shape of the critic's observations; None if the storage has none.
    """

    Transition = storage_records.SarsaTransition
    MiniBatch = storage_records.SarsaMiniBatch

    _LIKE = _NEXT

    _knows_next = True

    next_observations: Any
    next_critic_observations: Any

    def _read(self, transition: Any) -> dict[str, Any]:
        row = super()._read(transition)
        for field, like in _FINAL.items():
            given, shape = getattr(transition, field), self._shapes[like]
            if given is not None and shape is not None:
                row[field] = self._arrays.conform(field, given, shape, self.num_envs)
        return row

    def _append(self, row: dict[str, Any]) -> None:
        ended = row["dones"][:, 0] != 0
        self._knows_next = bool(ended.all()) or all(name in row for name, like in _NEXT.items() if like in row)
        for (name, like), final in zip(_NEXT.items(), _FINAL, strict=True):
            if like in row:
                own = row[like]
                row[name] = self._arrays.where(ended, row.pop(final, own), row.get(name, own))
                if self.step:
                    self._link(name, own)
        super()._append(row)

    def _link(self, name: str, following: Any) -> None:
        """Set the next observation of the previous row, where its episode continues."""
        ended = self.dones[self.step - 1][:, 0] != 0
        before = tree.map_structure(lambda leaf: leaf[self.step - 1], getattr(self, name))
        write_row(getattr(self, name), self.step - 1, self._arrays.where(ended, before, following))

    def _columns(self) -> dict[str, Any]:
        if not self._knows_next:
            raise IncompleteError(
                "the newest transition needs `next_observations`: no other row holds the observation after it. Set it "
                "before `add_transitions`."
            )
        return super()._columns()
