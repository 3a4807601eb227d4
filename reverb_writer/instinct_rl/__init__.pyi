# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer.instinct_rl.datasets import RolloutDataset as RolloutDataset
from reverb_writer.instinct_rl.datasets import RolloutFileBase as RolloutFileBase
from reverb_writer.instinct_rl.pickles import convert_trajectories as convert_trajectories
from reverb_writer.instinct_rl.storages import ActionLabelRollout as ActionLabelRollout
from reverb_writer.instinct_rl.storages import QueueRolloutStorage as QueueRolloutStorage
from reverb_writer.instinct_rl.storages import RolloutStorage as RolloutStorage
from reverb_writer.instinct_rl.storages import SarsaRolloutStorage as SarsaRolloutStorage
from reverb_writer.rollouts.replay_buffer import ReplayBuffer as ReplayBuffer
