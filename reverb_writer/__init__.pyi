# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer import environments as environments
from reverb_writer import episodes as episodes
from reverb_writer import errors as errors
from reverb_writer import files as files
from reverb_writer import rollouts as rollouts
from reverb_writer import rows as rows
from reverb_writer import shards as shards
from reverb_writer import slices as slices
from reverb_writer.accumulator.accumulator import TrajectoryAccumulator as TrajectoryAccumulator
from reverb_writer.client.server_calls import Sample as Sample
from reverb_writer.episodes import Episode as Episode
from reverb_writer.episodes import EpisodeBatch as EpisodeBatch
from reverb_writer.local.server import LocalServer as LocalServer
from reverb_writer.reading.transforms import burn_in as burn_in
from reverb_writer.reading.transforms import frame_stack as frame_stack
from reverb_writer.reading.transforms import split_windows as split_windows
from reverb_writer.replay.client import Client as Client
from reverb_writer.replay.episode_returns import EpisodeReturns as EpisodeReturns
from reverb_writer.replay.item_writer import ItemWriter as ItemWriter
from reverb_writer.replay.mixed_dataset import MixedDataset as MixedDataset
from reverb_writer.replay.observers import EpisodeObserver as EpisodeObserver
from reverb_writer.replay.observers import SequenceObserver as SequenceObserver
from reverb_writer.replay.observers import TrajectoryObserver as TrajectoryObserver
from reverb_writer.replay.replay_dataset import ReplayDataset as ReplayDataset
from reverb_writer.replay.slice_dataset import SliceDataset as SliceDataset
from reverb_writer.replay.variables import Variables as Variables
from reverb_writer.slices.batch import Batch as Batch
from reverb_writer.steps import Trajectory as Trajectory
from reverb_writer.tables import MinSize as MinSize
from reverb_writer.tables import Prioritized as Prioritized
from reverb_writer.tables import SampleToInsertRatio as SampleToInsertRatio
from reverb_writer.tables import TableConfig as TableConfig
from reverb_writer.transitions import NStepTransitions as NStepTransitions
from reverb_writer.transitions import Transitions as Transitions
from reverb_writer.transitions import n_step as n_step
from reverb_writer.transitions import returns as returns
from reverb_writer.transitions import to_transitions as to_transitions
from reverb_writer.transport.wire import TLS as TLS
from reverb_writer.windows import EndOfEpisode as EndOfEpisode
from reverb_writer.windows import WindowSpec as WindowSpec
from reverb_writer.writing.stream_options import ObserverStats as ObserverStats

__version__: str
