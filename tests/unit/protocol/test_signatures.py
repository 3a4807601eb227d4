"""Signatures: nests as bytes and back, names that Python cannot have, and those that cannot be read."""

from __future__ import annotations

import collections
import logging
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import tree

from reverb_writer.errors import StructureError
from reverb_writer.protocol import messages, signatures
from reverb_writer.protocol.messages import DataType, StructuredValue
from reverb_writer.protocol.signatures import ArraySpec


class Row(NamedTuple):
    reward: Any
    action: Any


FLOAT = ArraySpec((None, 3), np.dtype(np.float32), "x")
SCALAR = ArraySpec((), np.dtype(np.int64))


def reparsed(nest: Any) -> Any:
    """Encode a nest and decode its bytes, as a client does with a server's reply."""
    return signatures.decode(StructuredValue.FromString(signatures.encode(nest).SerializeToString()))


def nested(depth: int) -> Any:
    nest: Any = FLOAT
    for _ in range(depth):
        nest = {"a": nest}  # takes the most levels of protobuf's
    return nest


def cyclic() -> Any:
    nest: list[Any] = []
    nest.append(nest)
    return nest


@pytest.mark.parametrize(
    "nest",
    [
        SCALAR,
        FLOAT,
        ArraySpec(None, np.dtype(np.bool_), "of any rank"),
        ArraySpec((0, None), np.dtype(object)),
        [],
        (),
        {},
        [FLOAT, SCALAR],
        (FLOAT, [SCALAR, (FLOAT,)]),
        {"b": FLOAT, "a": {"": SCALAR}},
        {"a": None, "b": (None,)},
        nested(signatures.MAX_DEPTH),
    ],
    ids=repr,
)
def test_a_nest_is_decoded_as_it_was_encoded(nest: Any) -> None:
    result = reparsed(nest)
    assert result == nest
    tree.assert_same_structure(result, nest)


def test_the_deepest_signature_can_be_read_within_the_messages_of_a_server() -> None:
    info, table = messages.ServerInfoResponse(), messages.PriorityTableCheckpoint()
    for signature in (info.table_info.add().signature, table.signature):
        signature.CopyFrom(signatures.encode(nested(signatures.MAX_DEPTH)))
    assert messages.ServerInfoResponse.FromString(info.SerializeToString()) == info
    assert messages.PriorityTableCheckpoint.FromString(table.SerializeToString()) == table


def test_dicts_are_decoded_in_the_order_of_the_columns() -> None:
    nest = collections.OrderedDict(b=FLOAT, a=SCALAR)
    result = reparsed(nest)
    assert list(result) == ["a", "b"]
    assert type(result) is dict
    assert tree.flatten(result) == tree.flatten(nest) == [SCALAR, FLOAT]


def test_a_named_tuple_is_decoded_with_its_field_names() -> None:
    assert signatures.decode(StructuredValue()) is None
    result = reparsed(Row(reward=FLOAT, action=[SCALAR]))
    assert type(result).__name__ == "Row"
    assert result._asdict() == {"reward": FLOAT, "action": [SCALAR]}
    assert result.reward == FLOAT
    assert type(reparsed(Row(FLOAT, SCALAR))) is type(reparsed(Row(SCALAR, FLOAT)))


def test_names_that_python_cannot_have_are_replaced_in_place() -> None:
    value = StructuredValue()
    value.named_tuple_value.name = "my class"
    for key in ("z", "class", "_y", "z", "b c", "a"):
        value.named_tuple_value.values.add(key=key, value=signatures.encode(ArraySpec((), np.dtype("i4"), key)))
    result = signatures.decode(value)
    assert result._fields == ("z", "_1", "_2", "_3", "_4", "a")
    assert [spec.name for spec in tree.flatten(result)] == ["z", "class", "_y", "z", "b c", "a"]


def test_bounds_are_not_read() -> None:
    value = StructuredValue()
    value.bounded_tensor_spec_value.dtype = DataType.DT_UINT8
    value.bounded_tensor_spec_value.shape.dim.add(size=-1)
    assert signatures.decode(value) == ArraySpec((None,), np.dtype(np.uint8))


@pytest.mark.parametrize(
    ("hexadecimal", "reason"),
    [
        ("92 02 02 08 01", "signature: expected a tensor spec, list"),  # 34 { 1: 1 }, a SparseTensorSpec
        ("9a 03 04 0a 02 60 06", "signature, leaf `0`: expected a tensor spec, list"),  # 51 [ 12: 3, an int ]
        ("a2 03 06 0a 02 0a 00 0a 00", "signature, leaf `1`: expected a tensor"),  # 52 [ None, nothing ]
        ("8a 02 02 18 15", "dtype DT_VARIANT (21), which is never decoded"),  # 33 { 3: 21 }
        # 33 { 2: { 2: { 1: -2 } }, 3: 1 }
        ("8a 02 11 12 0d 12 0b 08 fe ff ff ff ff ff ff ff ff 01 18 01", "shape [-2], expected sizes >= 0, or -1"),
        ("8a 02 15 12 11 12 02 08 02 12 0b 08 fe ff ff ff ff ff ff ff ff 01 18 01", "shape [2, -2], expected sizes"),
    ],
    ids=["type spec", "value", "unset element", "VARIANT", "shape", "a size of a shape"],
)
def test_a_signature_that_cannot_be_read_is_none_and_logged_once(
    hexadecimal: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    value = StructuredValue.FromString(bytes.fromhex(hexadecimal))
    with caplog.at_level(logging.WARNING):
        assert signatures.decode(value) is None
        assert signatures.decode(value) is None
    (record,) = caplog.records  # each reason once in a process
    assert reason in record.getMessage()
    assert record.getMessage().endswith("Items of the table are read as flat tuples of columns.")


def test_a_dtype_that_needs_ml_dtypes_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    value = StructuredValue()
    value.dict_value.fields.add(key="a").value.tensor_spec_value.dtype = DataType.DT_BFLOAT16
    assert signatures.decode(value) is None
    assert "leaf `a`" in caplog.text
    assert "Install `ml_dtypes`" in caplog.text


@pytest.mark.parametrize(
    ("nest", "reason"),
    [
        (np.zeros(3), "signature: ndarray, expected ArraySpec, list"),
        ({"a": [SCALAR, 3]}, "leaf `a/1`: int, expected ArraySpec"),
        ({"a": {1: SCALAR}}, "leaf `a`: key 1 of type int, expected str"),
        ({"a": ArraySpec((), np.dtype("M8[s]"))}, r"leaf `a`: dtype datetime64\[s\] cannot be stored"),
        (Row(SCALAR, ArraySpec((), np.dtype("V3"))), "leaf `action`: dtype"),
        (nested(signatures.MAX_DEPTH + 1), "nested more than 31 deep"),
        (cyclic(), "nested more than 31 deep"),
    ],
    ids=["array", "number", "key", "dtype", "field", "deep", "cyclic"],
)
def test_what_reverb_cannot_store_is_refused(nest: Any, reason: str) -> None:
    with pytest.raises(StructureError, match=reason):
        signatures.encode(nest)


def test_a_spec_takes_what_numpy_takes() -> None:
    spec = ArraySpec([np.int64(3), None], np.float32)  # type: ignore[arg-type]
    assert spec == ArraySpec((3, None), np.dtype("f4"))
    assert type(spec.shape[0]) is int  # type: ignore[index]
