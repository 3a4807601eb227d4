"""Signatures between us, TensorFlow's coder and a server of dm-reverb's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reverb_writer_server import ReplayServer

import reverb_writer as rw
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.signatures import ArraySpec

tf = pytest.importorskip("tensorflow")
struct_pb2 = pytest.importorskip("tensorflow.core.protobuf.struct_pb2")
coder = pytest.importorskip("tensorflow.python.saved_model.nested_structure_coder")
trajectory = pytest.importorskip("tf_agents.trajectories.trajectory")
tensor_spec = pytest.importorskip("tensorflow.python.framework.tensor_spec")


def spec(shape: Any, dtype: Any, name: str = "") -> ArraySpec:
    return ArraySpec(shape, np.dtype(dtype), name)


THEIRS = {
    "leaf": tf.TensorSpec([None, 3], tf.float32, "x"),
    "scalar": tf.TensorSpec([], tf.bool),
    "any rank": tf.TensorSpec(None, tf.string),
    "half": tf.TensorSpec([2], tf.float16),
    "dict": {"b": tf.TensorSpec([1], tf.uint8), "a": [tf.TensorSpec([], tf.int64), (tf.TensorSpec([], tf.bfloat16),)]},
    "trajectory": trajectory.Trajectory(
        step_type=tf.TensorSpec([None], tf.int32, "step_type"),
        observation={"x": tf.TensorSpec([None, 0], tf.complex64)},
        action=[tf.TensorSpec([None], tf.int64)],
        policy_info=(),
        next_step_type=tf.TensorSpec([None], tf.int32),
        reward=tf.TensorSpec([None], tf.float64),
        discount=tf.TensorSpec([None], tf.float32),
    ),
}
OURS = {
    "leaf": spec((None, 3), "f4", "x"),
    "scalar": spec((), "?"),
    "any rank": spec(None, object),
    "half": spec((2,), "f2"),
    "dict": {"a": [spec((), "i8"), (spec((), tf.bfloat16.as_numpy_dtype),)], "b": spec((1,), "u1")},
    "trajectory": trajectory.Trajectory(
        step_type=spec((None,), "i4", "step_type"),
        observation={"x": spec((None, 0), "c8")},
        action=[spec((None,), "i8")],
        policy_info=(),
        next_step_type=spec((None,), "i4"),
        reward=spec((None,), "f8"),
        discount=spec((None,), "f4"),
    ),
}


@pytest.mark.parametrize("name", list(OURS))
def test_what_one_coder_encodes_the_other_decodes(name: str) -> None:
    encoded = coder.encode_structure(THEIRS[name]).SerializeToString()
    nest = signatures.decode(messages.StructuredValue.FromString(encoded))
    assert nest == OURS[name]
    assert getattr(nest, "_fields", None) == getattr(OURS[name], "_fields", None)
    encoded = signatures.encode(OURS[name]).SerializeToString()
    nest = coder.decode_proto(struct_pb2.StructuredValue.FromString(encoded))
    tf.nest.assert_same_structure(nest, THEIRS[name], check_types=name != "trajectory")
    for ours, theirs in zip(tf.nest.flatten(nest), tf.nest.flatten(THEIRS[name]), strict=True):
        assert (ours.shape, ours.dtype, ours.name or None) == (theirs.shape, theirs.dtype, theirs.name)


@pytest.mark.parametrize("kind", [ReplayServer, rw.LocalServer])
def test_a_server_takes_their_specs_and_tells_ours(kind: Any) -> None:
    tables = [rw.TableConfig(name, signature=nest) for name, nest in {**THEIRS, "none": None}.items()]
    with kind(tables) as server, rw.Client(server) as client:
        nests = {name: info.signature for name, info in client.server_info().items()}
    assert nests == {**OURS, "none": None}
