"""Reverb for every Python: write and sample replay data without TensorFlow.

The names below load when they are first touched, so `import reverb_writer` costs next to nothing.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from reverb_writer.lazy import lazy_names

if "grpc" not in sys.modules:
    # gRPC's own handlers let one forked child in five crash, even one that does not use gRPC, such as the worker of a
    # data loader. Without them none does. Read by gRPC when it is imported; who has set it already has the last word.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if TYPE_CHECKING:
    from reverb_writer import environments as environments
    from reverb_writer import rollouts as rollouts
    from reverb_writer.accumulator import TrajectoryAccumulator as TrajectoryAccumulator
    from reverb_writer.client import Client as Client
    from reverb_writer.client import Sample as Sample
    from reverb_writer.episode import Episode as Episode
    from reverb_writer.episode import EpisodeBatch as EpisodeBatch
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
    from reverb_writer.observers import EpisodeObserver as EpisodeObserver
    from reverb_writer.observers import SequenceObserver as SequenceObserver
    from reverb_writer.observers import TrajectoryObserver as TrajectoryObserver
    from reverb_writer.reading.batches import Batch as Batch
    from reverb_writer.reading.contiguous import ContiguousBatch as ContiguousBatch
    from reverb_writer.reading.contiguous import ContiguousDataset as ContiguousDataset
    from reverb_writer.reading.replay import ReplayDataset as ReplayDataset
    from reverb_writer.session import ObserverStats as ObserverStats
    from reverb_writer.steps import Trajectory as Trajectory
    from reverb_writer.tables import MinSize as MinSize
    from reverb_writer.tables import Prioritized as Prioritized
    from reverb_writer.tables import Queue as Queue
    from reverb_writer.tables import SampleToInsertRatio as SampleToInsertRatio
    from reverb_writer.tables import Stack as Stack
    from reverb_writer.tables import TableConfig as TableConfig
    from reverb_writer.targets import Target as Target
    from reverb_writer.variables import Variables as Variables
    from reverb_writer.vector import VectorObserver as VectorObserver
    from reverb_writer.windowing import EndOfEpisode as EndOfEpisode
    from reverb_writer.windowing import WindowSpec as WindowSpec
    from reverb_writer.wire.channel import TLS as TLS
    from reverb_writer.writer import SequenceWriter as SequenceWriter

__version__ = "0.1.0"

_MODULE_OF = {
    "Batch": "reading.batches",
    "Client": "client",
    "ClosedError": "errors",
    "ContiguousBatch": "reading.contiguous",
    "ContiguousDataset": "reading.contiguous",
    "EndOfEpisode": "windowing",
    "Episode": "episode",
    "EpisodeBatch": "episode",
    "EpisodeObserver": "observers",
    "FormatError": "errors",
    "IncompleteError": "errors",
    "MinSize": "tables",
    "MissingExtraError": "errors",
    "ObserverStats": "session",
    "OutOfRangeError": "errors",
    "Prioritized": "tables",
    "Queue": "tables",
    "ReplayDataset": "reading.replay",
    "ReplayTimeoutError": "errors",
    "ReverbWriterError": "errors",
    "Sample": "client",
    "SampleToInsertRatio": "tables",
    "SequenceObserver": "observers",
    "SequenceWriter": "writer",
    "ServerUnavailableError": "errors",
    "SpecError": "errors",
    "Stack": "tables",
    "StructureError": "errors",
    "TLS": "wire.channel",
    "TableConfig": "tables",
    "Target": "targets",
    "Trajectory": "steps",
    "TrajectoryAccumulator": "accumulator",
    "TrajectoryObserver": "observers",
    "UnknownKeyError": "errors",
    "UnsafeDataError": "errors",
    "Variables": "variables",
    "VectorObserver": "vector",
    "WindowSpec": "windowing",
}

_PACKAGES = frozenset({"environments", "rollouts"})
"""Packages that are touched as `rw.NAME`, without an import of their own."""

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULE_OF, _PACKAGES)
