# The public names of this package, once: type checkers read them here, and so does `reverb_writer.lazy`.

from reverb_writer import environments as environments
from reverb_writer import rollouts as rollouts
from reverb_writer.client.client import Client as Client
from reverb_writer.client.client import Sample as Sample
from reverb_writer.client.variables import Variables as Variables
from reverb_writer.episodes import Episode as Episode
from reverb_writer.episodes import EpisodeBatch as EpisodeBatch
from reverb_writer.errors import ClosedError as ClosedError
from reverb_writer.errors import FormatError as FormatError
from reverb_writer.errors import IncompleteError as IncompleteError
from reverb_writer.errors import MissingExtraError as MissingExtraError
from reverb_writer.errors import OutOfRangeError as OutOfRangeError
from reverb_writer.errors import ReplayTimeoutError as ReplayTimeoutError
from reverb_writer.errors import ReverbWriterError as ReverbWriterError
from reverb_writer.errors import ServerUnavailableError as ServerUnavailableError
from reverb_writer.errors import SpecError as SpecError
from reverb_writer.errors import StructureError as StructureError
from reverb_writer.errors import UnknownKeyError as UnknownKeyError
from reverb_writer.errors import UnsafeDataError as UnsafeDataError
from reverb_writer.local.server import LocalServer as LocalServer
from reverb_writer.reading.batches import Batch as Batch
from reverb_writer.reading.read_options import ReadOptions as ReadOptions
from reverb_writer.reading.replay_dataset import ReplayDataset as ReplayDataset
from reverb_writer.reading.slice_dataset import ContiguousDataset as ContiguousDataset
from reverb_writer.schedules import LinearSchedule as LinearSchedule
from reverb_writer.steps import Trajectory as Trajectory
from reverb_writer.tables import MinSize as MinSize
from reverb_writer.tables import Prioritized as Prioritized
from reverb_writer.tables import Queue as Queue
from reverb_writer.tables import SampleToInsertRatio as SampleToInsertRatio
from reverb_writer.tables import Stack as Stack
from reverb_writer.tables import TableConfig as TableConfig
from reverb_writer.transport.channel import TLS as TLS
from reverb_writer.windows import EndOfEpisode as EndOfEpisode
from reverb_writer.windows import WindowSpec as WindowSpec
from reverb_writer.writing.accumulator import TrajectoryAccumulator as TrajectoryAccumulator
from reverb_writer.writing.observers import EpisodeObserver as EpisodeObserver
from reverb_writer.writing.observers import SequenceObserver as SequenceObserver
from reverb_writer.writing.observers import TrajectoryObserver as TrajectoryObserver
from reverb_writer.writing.sequence_writer import SequenceWriter as SequenceWriter
from reverb_writer.writing.session import ObserverStats as ObserverStats
from reverb_writer.writing.vector import VectorObserver as VectorObserver
from reverb_writer.writing.vector import VectorSequenceObserver as VectorSequenceObserver
from reverb_writer.writing.window_targets import WindowTarget as WindowTarget

__version__: str
