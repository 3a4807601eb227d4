"""Message classes of Reverb's protocol, built from one readable table.

The table below lists the messages of Reverb 0.14 that this client sends and receives. Parsers skip fields that are not
in it. The import of this module builds the classes from the table. They are registered in this package's own descriptor
pool, so they do not conflict with dm-reverb or TensorFlow, which may register the same names in the same process. There
is no generated code, which would require one version of protobuf.

How to read the table:

    Message                       a message; `Outer.Inner` is nested in `Outer`
      name: type = 3              field number 3; a type is a scalar or another message
      name: repeated type = 4     any number of fields
      kind/name: type = 5         at most one of the fields that start with `kind/` is set

A class has its message's name, without the package; classes of views have other names. They are typed as `Any` because
their fields exist only at run time.

Source: Reverb 0.14 (`schema.proto`, `reverb_service.proto`); TensorFlow 2.15 (`tensor.proto`, `tensor_shape.proto`,
`types.proto`, `struct.proto`); protobuf (`timestamp.proto`).
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Methods of the service. InsertStream and SampleStream stream in both directions; other methods have one request and
# one response. The client never calls InitializeConnection, which returns memory addresses.
INSERT_STREAM: Final = "/deepmind.reverb.ReverbService/InsertStream"
SAMPLE_STREAM: Final = "/deepmind.reverb.ReverbService/SampleStream"
SERVER_INFO: Final = "/deepmind.reverb.ReverbService/ServerInfo"
MUTATE_PRIORITIES: Final = "/deepmind.reverb.ReverbService/MutatePriorities"
RESET: Final = "/deepmind.reverb.ReverbService/Reset"
INITIALIZE_CONNECTION: Final = "/deepmind.reverb.ReverbService/InitializeConnection"
CHECKPOINT: Final = "/deepmind.reverb.ReverbService/Checkpoint"


class DataType(enum.IntEnum):
    """Numbers of TensorFlow's dtypes; the number of a reference type is larger by 100."""

    DT_INVALID = 0
    DT_FLOAT = 1
    DT_DOUBLE = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 5
    DT_INT8 = 6
    DT_STRING = 7
    DT_COMPLEX64 = 8
    DT_INT64 = 9
    DT_BOOL = 10
    DT_QINT8 = 11
    DT_QUINT8 = 12
    DT_QINT32 = 13
    DT_BFLOAT16 = 14
    DT_QINT16 = 15
    DT_QUINT16 = 16
    DT_UINT16 = 17
    DT_COMPLEX128 = 18
    DT_HALF = 19
    DT_RESOURCE = 20
    DT_VARIANT = 21
    DT_UINT32 = 22
    DT_UINT64 = 23
    DT_FLOAT8_E5M2 = 24
    DT_FLOAT8_E4M3FN = 25
    DT_INT4 = 29
    DT_UINT4 = 30


_SCHEMA: Final = {
    "google.protobuf": """
        Timestamp
          seconds: int64 = 1                # since 1970, UTC
          nanos: int32 = 2
    """,
    "tensorflow": """
        TensorProto
          dtype: int32 = 1                  # a DataType
          tensor_shape: TensorShapeProto = 2
          tensor_content: bytes = 4         # a snappy block; for strings the lengths, then the bytes, uncompressed
          string_val: repeated bytes = 8    # strings, if tensor_content is empty

        TensorShapeProto
          dim: repeated TensorShapeProto.Dim = 2
          unknown_rank: bool = 3
        TensorShapeProto.Dim
          size: int64 = 1                   # -1: unknown, in signatures only
          name: string = 2

        StructuredValue                     # the signature of a table: a nest of tensor specs
          kind/none_value: NoneValue = 1
          kind/tensor_spec_value: TensorSpecProto = 33
          kind/bounded_tensor_spec_value: BoundedTensorSpecProto = 35
          kind/list_value: ListValue = 51
          kind/tuple_value: TupleValue = 52
          kind/dict_value: DictValue = 53
          kind/named_tuple_value: NamedTupleValue = 54
        NoneValue
        TensorSpecProto
          name: string = 1
          shape: TensorShapeProto = 2
          dtype: int32 = 3
        BoundedTensorSpecProto              # the bounds, fields 4 and 5, are not read: Reverb does not check them
          name: string = 1
          shape: TensorShapeProto = 2
          dtype: int32 = 3
        ListValue
          values: repeated StructuredValue = 1
        TupleValue
          values: repeated StructuredValue = 1
        DictValue
          fields: repeated PairValue = 1    # declared as a map by TensorFlow; a map is these bytes
        NamedTupleValue
          name: string = 1
          values: repeated PairValue = 2
        PairValue
          key: string = 1
          value: StructuredValue = 2
    """,
    "deepmind.reverb": """
        ChunkData                           # some steps of an episode; one tensor per column
          chunk_key: uint64 = 1
          sequence_range: SequenceRange = 2
          delta_encoded: bool = 4           # integer tensors hold differences between steps
          data: ChunkData.Data = 5
          data_tensors_len: int32 = 6       # must be the number of tensors in `data`
          data_uncompressed_size: int64 = 7
        ChunkData.Data
          tensors: repeated tensorflow.TensorProto = 1
        SequenceRange
          episode_id: uint64 = 1
          start: int32 = 2                  # index in the episode of the first step
          end: int32 = 3                    # and of the last one, inclusive
          sparse: bool = 4                  # steps between them are missing

        PrioritizedItem                     # a sampled item: slices of chunks, per column
          key: uint64 = 1
          table: string = 2
          priority: double = 5
          times_sampled: int32 = 6
          inserted_at: google.protobuf.Timestamp = 7
          flat_trajectory: FlatTrajectory = 8
        FlatTrajectory
          columns: repeated FlatTrajectory.Column = 1
        FlatTrajectory.Column
          chunk_slices: repeated FlatTrajectory.ChunkSlice = 1
          squeeze: bool = 2                 # one step, given without its time dimension
        FlatTrajectory.ChunkSlice
          chunk_key: uint64 = 1
          offset: int32 = 2                 # steps
          length: int32 = 3
          index: int32 = 4                  # index of the tensor in the chunk

        InsertStreamRequest
          chunks: repeated ChunkData = 1
          items: repeated PrioritizedItem = 2
          keep_chunk_keys: repeated uint64 = 3
        InsertStreamResponse
          keys: repeated uint64 = 1         # keys of items that are in their table now

        SampleStreamRequest
          table: string = 1
          num_samples: int64 = 2
          rate_limiter_timeout: Timeout = 3 # loses samples in 0.14: never sent by this client
        Timeout
          milliseconds: int64 = 1
        SampleStreamResponse
          entries: repeated SampleStreamResponse.SampleEntry = 1
        SampleStreamResponse.SampleEntry    # a sample, or a part of one
          info: SampleInfo = 1              # in the first part only
          data: repeated ChunkData = 2
          end_of_sequence: bool = 3         # the last part
        SampleInfo
          item: PrioritizedItem = 1
          probability: double = 2
          table_size: int64 = 3
          rate_limited: bool = 4

        MutatePrioritiesRequest
          table: string = 1
          updates: repeated KeyWithPriority = 2
          delete_keys: repeated uint64 = 3
        MutatePrioritiesResponse
        KeyWithPriority
          key: uint64 = 1
          priority: double = 2

        ResetRequest
          table: string = 1
        ResetResponse

        InitializeConnectionResponse        # a table's place in memory, if client and server share a process
          address: int64 = 1

        CheckpointRequest
        CheckpointResponse
          checkpoint_path: string = 1       # on the server

        ServerInfoRequest
        ServerInfoResponse
          tables_state_id: Uint128 = 1      # random, new at each start of the server
          table_info: repeated TableInfo = 2
        Uint128
          high: uint64 = 1
          low: uint64 = 2
        TableInfo
          sampler_options: KeyDistributionOptions = 1
          remover_options: KeyDistributionOptions = 2
          max_size: int64 = 3
          max_times_sampled: int32 = 4      # below 1: without limit
          rate_limiter_info: RateLimiterInfo = 5
          signature: tensorflow.StructuredValue = 6
          current_size: int64 = 7
          name: string = 8
          num_episodes: int64 = 9
          num_deleted_episodes: int64 = 10
          num_unique_samples: int64 = 11
          table_worker_time: TableWorkerTime = 12
        KeyDistributionOptions
          distribution/fifo: bool = 1
          distribution/uniform: bool = 2
          distribution/prioritized: KeyDistributionOptions.Prioritized = 3
          distribution/heap: KeyDistributionOptions.Heap = 4
          distribution/lifo: bool = 6
          is_deterministic: bool = 7
        KeyDistributionOptions.Prioritized
          priority_exponent: double = 1
        KeyDistributionOptions.Heap
          min_heap: bool = 1
        RateLimiterInfo                     # min_diff <= inserts * samples_per_insert - samples <= max_diff
          samples_per_insert: double = 1
          min_diff: double = 2
          max_diff: double = 3
          min_size_to_sample: int64 = 4
          insert_stats: RateLimiterCallStats = 5
          sample_stats: RateLimiterCallStats = 6
        RateLimiterCallStats
          completed: int64 = 2
        TableWorkerTime                     # milliseconds since the table was made
          running_ms: int64 = 1
          sampling_ms: int64 = 2
          inserting_ms: int64 = 3
          sleeping_ms: int64 = 4
          waiting_for_sampling_ms: int64 = 5  # the rate limiter blocks inserts
          waiting_for_inserts_ms: int64 = 6   # the rate limiter blocks samples

        ReverbServerConfig                  # input of dm-reverb's own server command, as text
          tables: repeated PriorityTableCheckpoint = 1
          port: int32 = 2
        PriorityTableCheckpoint             # a table in a checkpoint, without its items
          table_name: string = 1
          rate_limiter: RateLimiterCheckpoint = 3
          sampler: KeyDistributionOptions = 4
          remover: KeyDistributionOptions = 5
          max_size: int64 = 6
          max_times_sampled: int32 = 7
          num_deleted_episodes: int64 = 8
          signature: tensorflow.StructuredValue = 9
          num_unique_samples: int64 = 10
        RateLimiterCheckpoint
          samples_per_insert: double = 2
          min_diff: double = 3
          max_diff: double = 4
          min_size_to_sample: int64 = 5
          sample_count: int64 = 6
          insert_count: int64 = 7
          delete_count: int64 = 8
    """,
}

# Views: the messages of Reverb and TensorFlow again, with `bytes` for fields of some types.
_VIEWS: Final = {
    # Trajectories (see `trajectory_parsing`), shapes of tensors, and chunks that are not in the cache are parsed later.
    "reverb_writer.sampled": {"ChunkData", "FlatTrajectory", "TensorShapeProto"},
    # For `reverb_writer.local`, which keeps chunks and trajectories as received bytes.
    "reverb_writer.stored": {"ChunkData", "FlatTrajectory", "PrioritizedItem"},
}
_OF_VIEWS: Final = {
    "SampledResponse": "reverb_writer.sampled.SampleStreamResponse",
    "SampledChunk": "reverb_writer.sampled.ChunkData",
    "SampledInfo": "reverb_writer.sampled.SampleInfo",
    "StoredRequest": "reverb_writer.stored.InsertStreamRequest",
    "StoredItem": "reverb_writer.stored.PrioritizedItem",
}

_LINE = re.compile(r"(?:(?P<oneof>\w+)/)?(?P<name>\w+): (?P<repeated>repeated )?(?P<type>[\w.]+) = (?P<number>\d+)")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {name: _Field.Type.Value(f"TYPE_{name.upper()}") for name in
            ("bool", "int32", "int64", "uint64", "double", "string", "bytes")}  # fmt: skip


def _describe(message: Any, line: str, package: str) -> None:
    """Add the field in a line of the table to the message's descriptor."""
    match = _LINE.fullmatch(line)
    if match is None:
        raise SyntaxError(f"a field is `name: type = number`, got `{line}`.")
    field = message.field.add(name=match["name"], number=int(match["number"]))
    field.label = _Field.LABEL_REPEATED if match["repeated"] else _Field.LABEL_OPTIONAL
    kind = match["type"]
    if package in _VIEWS:
        kind = kind.removeprefix("tensorflow.")
        kind = "bytes" if kind in _VIEWS[package] else kind
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = kind if kind.startswith(tuple(_SCHEMA)) else f"{package}.{kind}"
    if match["oneof"]:
        if match["oneof"] not in (oneof.name for oneof in message.oneof_decl):
            message.oneof_decl.add(name=match["oneof"])
        field.oneof_index = len(message.oneof_decl) - 1


def _build() -> dict[str, Any]:
    """Return the message classes of the tables, by full name."""
    pool = descriptor_pool.DescriptorPool()
    descriptors: dict[str, Any] = {}
    files: list[str] = []
    both = _SCHEMA["tensorflow"] + _SCHEMA["deepmind.reverb"]
    for package, table in {**_SCHEMA, **dict.fromkeys(_VIEWS, both)}.items():
        file = descriptor_pb2.FileDescriptorProto(name=package, package=package, syntax="proto3", dependency=files)
        message: Any = None
        for line in (line.partition("#")[0].strip() for line in table.splitlines()):
            if ":" in line:
                _describe(message, line, package)
            elif line:
                outer, _, name = line.rpartition(".")
                siblings = descriptors[f"{package}.{outer}"].nested_type if outer else file.message_type
                message = descriptors[f"{package}.{line}"] = siblings.add(name=name)
        pool.AddSerializedFile(file.SerializeToString())
        files.append(package)
    # Only the used classes of views are made: a class takes longer than a descriptor.
    names = [name for name in descriptors if not name.startswith(tuple(_VIEWS))]
    classes = {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        for name in (*names, *_OF_VIEWS.values())
    }
    for full_name, nested in classes.items():
        outer, _, name = full_name.rpartition(".")
        if outer in classes and not hasattr(classes[outer], name):  # pure-Python protobuf sets no nested classes
            setattr(classes[outer], name, nested)
    return classes


_CLASSES: Final = _build()
for _name, _class in _CLASSES.items():
    _package, _, _own_name = _name.rpartition(".")
    if _package in _SCHEMA:
        globals()[_own_name] = _class
globals().update({name: _CLASSES[full_name] for name, full_name in _OF_VIEWS.items()})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
