"""Rollouts with the actions that an expert would have taken."""

from __future__ import annotations

from typing import Any, ClassVar

from reverb_writer.rollouts import storage_records
from reverb_writer.rollouts.queue_storage import QueueRolloutStorage


class ActionLabelRollout(QueueRolloutStorage):
    """A `QueueRolloutStorage` for imitation learning: transitions and minibatches have `action_labels`.

    Attributes:
        action_labels: in the shape of the actions.
    """

    Transition = storage_records.LabelTransition
    MiniBatch = storage_records.LabelMiniBatch

    _LIKE: ClassVar = {"action_labels": "actions"}
    _ALSO_NEEDED = ("action_labels",)

    action_labels: Any
