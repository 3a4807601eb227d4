# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer.files.exporting import export_items as export_items
from reverb_writer.files.exporting import export_saved as export_saved
from reverb_writer.files.importing import Journal as Journal
from reverb_writer.files.importing import Transferred as Transferred
from reverb_writer.files.importing import import_trajectories as import_trajectories
from reverb_writer.files.importing import send_trajectory as send_trajectory
from reverb_writer.files.minari import from_minari as from_minari
from reverb_writer.files.rollout_dataset import RolloutDataset as RolloutDataset
from reverb_writer.files.rollout_dataset import RolloutFileBase as RolloutFileBase
from reverb_writer.files.rollout_writer import RolloutWriter as RolloutWriter
from reverb_writer.files.shuffled_transitions import ShuffledTransitions as ShuffledTransitions
from reverb_writer.files.trajectory_file import StoredTrajectory as StoredTrajectory
from reverb_writer.files.trajectory_file import list_trajectories as list_trajectories
from reverb_writer.files.transition_fields import TransitionBatch as TransitionBatch
