# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer.rollouts.minibatches import split_and_pad_trajectories as split_and_pad_trajectories
from reverb_writer.rollouts.minibatches import unpad_trajectories as unpad_trajectories
from reverb_writer.rollouts.storage import RolloutStorage as RolloutStorage
from reverb_writer.rollouts.storage_kinds import ActionLabelRollout as ActionLabelRollout
from reverb_writer.rollouts.storage_kinds import QueueRolloutStorage as QueueRolloutStorage
from reverb_writer.rollouts.storage_kinds import SarsaRolloutStorage as SarsaRolloutStorage
