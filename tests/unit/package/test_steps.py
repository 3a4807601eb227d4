"""What a step must look like, and which values fit a leaf: converted where nothing is lost, refused otherwise."""

from __future__ import annotations

import array
import collections
import re
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from reading import spec

import reverb_writer as rw
from reverb_writer.errors import StructureError
from reverb_writer.leaves import Fit, fit, padded_rows
from reverb_writer.steps import FIRST, LAST, MID, StepStructure, Trajectory


class Pair(NamedTuple):
    left: Any
    right: Any


class Tensor:
    """A foreign tensor: it has a dtype of its own kind, and NumPy can read it."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)
        self.dtype = f"tensor({self._values.dtype})"
        self.shape = list(self._values.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._values if dtype is None else self._values.astype(dtype)


def f32(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


def trajectory(step_type: int = MID, next_step_type: int = MID, value: int = 7) -> Trajectory:
    return Trajectory(
        step_type=np.int32(step_type),
        observation={"rgb": np.full((2, 2), value, np.uint8), "name": np.array("x")},
        action=np.int64(value),
        policy_info=(),
        next_step_type=np.int32(next_step_type),
        reward=np.float32(value),
        discount=np.float32(1),
    )


# Leaves and their paths. `tests/properties/protocol/test_nests.py` compares them with dm-tree's.


def test_leaves_come_in_order_with_their_paths() -> None:
    nest = ({2: 1, 10: 3, -1: 4}, {"b": Pair(right=6, left=5), "a": [{}, ()]})
    structure = StepStructure(nest)
    assert structure.paths == ("0/-1", "0/2", "0/10", "1/b/left", "1/b/right")
    assert [int(leaf) for leaf in structure.flatten(nest, 0)] == [4, 1, 3, 5, 6]
    assert structure.pack([4, 1, 3, 5, 6]) == nest
    assert StepStructure(5).paths == ("",)


def test_dtypes_are_native_and_strings_are_objects() -> None:
    structure = StepStructure({"a": np.zeros(3, ">f8"), "b": "text", "c": b"bytes", "d": np.array(["x", "yz"])})
    assert structure.dtypes == (np.dtype("=f8"), np.dtype(object), np.dtype(object), np.dtype(object))
    assert structure.shapes == ((3,), (), (), (2,))


def test_example_may_change_afterwards() -> None:
    step = {"a": 1, "b": 2}
    structure = StepStructure(step)
    step["c"] = 3
    assert structure.paths == ("a", "b")
    assert structure.pack([4, 5]) == {"a": 4, "b": 5}
    assert structure.flatten({"a": 4, "b": 5}, 1) == [4, 5]


# A spec beforehand.


def test_spec_is_as_good_as_a_first_step() -> None:
    example = {"a": spec((2,), np.float32), "s": spec((), np.object_)}
    structure = StepStructure(example, is_spec=True)
    assert (structure.dtypes, structure.shapes) == ((np.dtype(np.float32), np.dtype(object)), ((2,), ()))
    assert structure.flatten({"a": f32(1, 2), "s": "x"}, 0)[1] == b"x"
    with pytest.raises(StructureError, match=r"step 3, leaf `a`: float64 \(2,\), expected float32 \(2,\)"):
        structure.flatten({"a": np.zeros(2), "s": "x"}, 3)


@pytest.mark.parametrize("shape", [None, (None, 3), (3, None)])
def test_spec_with_unknown_sizes_is_refused(shape: Any) -> None:
    with pytest.raises(StructureError, match=r"step, leaf `a`: shape .*None.* expected one without unknown sizes"):
        StepStructure({"a": spec(shape, np.float32)}, is_spec=True)


# What is refused at the first step.


def test_an_object_with_dtype_and_shape_that_is_no_array_is_refused() -> None:
    with pytest.raises(StructureError, match=r"first step, leaf `a`: .* is not an array, number or string"):
        StepStructure({"a": spec((2,), np.float32)})


@pytest.mark.parametrize(
    "leaf", [range(3), memoryview(b"ab"), array.array("f", [1.0])], ids=lambda leaf: str(type(leaf))
)
def test_a_sequence_that_is_neither_list_nor_tuple_is_refused_by_name(leaf: Any) -> None:
    with pytest.raises(StructureError, match=r"`part/0/a`: .* is neither .* Turn it into an array"):
        StepStructure({"part": [{"a": leaf}], "b": 0})


NO_LEAVES: list[Any] = [(), {}, [], {"a": (), "b": [{}]}]
NO_STRINGS = np.array([1, "a"], object), np.array({}, object)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        *((empty, "at least one leaf") for empty in NO_LEAVES),
        *(({"a": [leaf]}, r"`a/0`: \w+ is not an array, number or") for leaf in (None, object(), {1}, *NO_STRINGS)),
        ({1: 2, "a": 3}, "first step: .*sort"),
    ],
)
def test_first_step_that_cannot_be_stored_is_refused(example: Any, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        StepStructure(example)


# What is refused later. Nothing about the structure changes by it.


STRUCTURES = [
    ({"a": 1, "b": 2}, {"a": 1}, "Missing: `b`; unexpected: none."),
    ({"a": 1, "b": 2}, {"a": 1, "c": 2}, "Missing: `b`; unexpected: `c`."),
    ({"a": 1, "b": 2}, {"a": 1, "b": {"x": 2}}, "Missing: `b`; unexpected: `b/x`."),
    ({"a": 1, "b": {"x": 2}}, {"a": 1, "b": {}}, "Missing: `b/x`; unexpected: none."),
    ({"a": 1, "b": 2, "c": {}}, {"a": 1, "b": 2, "c": 3}, "Missing: none; unexpected: `c`."),
    ([1, 2], [1, 2, 3], "Missing: none; unexpected: `2`."),
    (1, [1], "Missing: an array without a nest; unexpected: `0`."),
    (Pair(1, 2), {"left": 1}, "Missing: `right`; unexpected: none."),
]


@pytest.mark.parametrize(("first", "later", "message"), STRUCTURES, ids=str)
def test_step_of_another_structure_is_refused_by_its_paths(first: Any, later: Any, message: str) -> None:
    structure = StepStructure(first)
    with pytest.raises(StructureError) as refusal:
        structure.flatten(later, 17)
    assert str(refusal.value) == f"step 17: its leaves are not those of the first step. {message}"


def test_later_keys_that_cannot_be_sorted_are_refused() -> None:
    with pytest.raises(StructureError, match=r"step 4: .*sort"):
        StepStructure({"a": 3}).flatten({1: 2, "a": 3}, 4)


@pytest.mark.parametrize("later", [collections.OrderedDict(b=2, a=1), MappingProxyType({"b": 2, "a": 1})])
def test_other_containers_of_the_same_paths_are_taken(later: Any) -> None:
    assert StepStructure({"a": 3, "b": 4}).flatten(later, 0) == [1, 2]


LEAVES = [
    (f32(1, 2), f32(1, 2, 3), "float32 (3,), expected float32 (2,)"),
    (np.int32(1), np.uint32(1), "uint32 (), expected int32 ()"),
    (np.uint8(1), -1, "int64 (), expected uint8 ()"),
    (np.uint8(1), 256, "int64 (), expected uint8 ()"),
    (np.float32(1), 1e39, "float64 (), expected float32 ()"),
    (np.int64(1), 2**63, "uint64 (), expected int64 ()"),
    (np.int64(1), 2**70, "int (), expected int64 ()"),
    (np.float64(1), 10**400, "int (), expected float64 ()"),
    (np.float32(1), None, "NoneType (), expected float32 ()"),
    ("text", np.array(["text"]), "<U4 (1,), expected strings ()"),
    (f32(1), 1.0, "float64 (), expected float32 (1,)"),
]


@pytest.mark.parametrize(("first", "later", "message"), LEAVES)
def test_leaf_that_differs_is_refused_by_its_path(first: Any, later: Any, message: str) -> None:
    structure = StepStructure({"good": 1, "observation": {"bad": first}})
    with pytest.raises(StructureError) as refusal:
        structure.flatten({"good": 1, "observation": {"bad": later}}, 17)
    assert str(refusal.value) == f"step 17, leaf `observation/bad`: {message} as in the first step."
    with pytest.raises(StructureError) as refusal:
        StepStructure(first).flatten(later, 17)
    assert str(refusal.value) == f"step 17: {message} as in the first step."


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array({"a": 1}, object), "dict is not a string"),
        (np.array(3, object), "int is not a string"),
        (None, "NoneType is not a string"),
        ("\ud800", r"'\\ud800' is not Unicode: surrogates not allowed. Pass it as bytes."),
    ],
)
def test_what_is_no_string_is_refused_where_the_first_step_had_one(leaf: Any, message: str) -> None:
    with pytest.raises(StructureError, match=f"step 2, leaf `s`: {message}"):
        StepStructure({"s": "first"}).flatten({"s": leaf}, 2)


class Unreadable:
    """Stands for a tensor of PyTorch with a gradient."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Use tensor.detach().numpy() instead.")


def test_tensor_that_numpy_cannot_read_is_refused_by_its_path() -> None:
    with pytest.raises(StructureError, match=r"^first step, leaf `a/b`: Use tensor\.detach"):
        StepStructure({"a": {"b": Unreadable()}})
    with pytest.raises(StructureError, match=r"^step 3, leaf `a/b`: Use tensor\.detach"):
        StepStructure({"a": {"b": 1.0}}).flatten({"a": {"b": Unreadable()}}, 3)


# What is converted, because nothing is lost by it.

CONVERTED = [
    (np.float16(1), float("inf"), np.float16("inf")),
    (np.float64(1), 2**70, np.float64(2**70)),
    (np.complex64(1), 0.5, np.complex64(0.5)),
    (np.int8(1), -128, np.int8(-128)),
    (np.uint8(1), 255, np.uint8(255)),
    (np.float32(1), 0.1, np.float32(0.1)),
    (np.bool_(True), False, np.False_),
    (np.int32(1), True, np.int32(1)),
    (np.uint64(1), 2**64 - 1, np.uint64(2**64 - 1)),
    (f32(1, 2), np.array([3, 4], ">f4"), f32(3, 4)),
    (f32(1, 2), np.array([3, 9, 4], "f4")[::2], f32(3, 4)),
    (np.zeros((2, 3)), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)),
    (f32(1, 2), Tensor(f32(3, 4)), f32(3, 4)),
    (Tensor(f32(1, 2)), Tensor(f32(3, 4)), f32(3, 4)),
]


@pytest.mark.parametrize(("first", "later", "expected"), CONVERTED)
def test_leaf_is_converted_without_loss(first: Any, later: Any, expected: Any) -> None:
    (leaf,) = StepStructure({"x": first}).flatten({"x": later}, 0)
    assert leaf.dtype == expected.dtype
    assert leaf.dtype.isnative
    np.testing.assert_array_equal(leaf, expected, strict=True)


@pytest.mark.parametrize("value", [0.5, 2, True])
def test_python_number_is_a_good_bfloat16(value: float) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    (leaf,) = StepStructure({"x": bfloat16(1)}).flatten({"x": value}, 0)
    assert (leaf.dtype, float(leaf)) == (np.dtype(bfloat16), value)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ("ä", "ä".encode()),
        ("nul\0", b"nul\0"),
        (b"\xff\0\0", b"\xff\0\0"),
        (np.str_("x"), b"x"),
        (np.array("x"), b"x"),
        (np.array("x", object), b"x"),
        ("", b""),
    ],
)
def test_string_is_taken_byte_by_byte(leaf: Any, expected: bytes) -> None:
    (taken,) = StepStructure({"s": "first"}).flatten({"s": leaf}, 0)
    assert (type(taken), taken) == (bytes, expected)


# Batches.


def test_batched_structure_goes_without_the_batch() -> None:
    structure = StepStructure({"x": np.zeros((3, 2)), "n": np.zeros(3, int)}, batch_size=3)
    assert (structure.paths, structure.shapes) == (("n", "x"), ((), (2,)))
    assert [leaf.shape for leaf in structure.flatten({"x": np.ones((3, 2)), "n": np.ones(3, int)}, 0)] == [(3,), (3, 2)]


@pytest.mark.parametrize("leaf", [np.zeros((2, 3)), np.zeros(()), 1.0])
def test_first_batch_of_another_size_is_refused(leaf: Any) -> None:
    with pytest.raises(StructureError, match=r"first step, leaf `b`: shape .* expected \(3, \.\.\.\)"):
        StepStructure({"a": np.zeros(3), "b": leaf}, batch_size=3)


@pytest.mark.parametrize("example", [{"x": spec((2,), float)}, {"x": np.zeros(2)}, {"x": Tensor(np.zeros(2))}])
def test_spec_of_a_batch_is_that_of_one_environment(example: Any) -> None:
    structure = StepStructure(example, batch_size=2, is_spec=True)
    assert structure.shapes == ((2,),)
    structure.flatten({"x": np.zeros((2, 2))}, 0)
    with pytest.raises(StructureError, match=r"leaf `x`: float64 \(2,\), expected float64 \(2, 2\)"):
        structure.flatten({"x": np.zeros(2)}, 0)


# Padding steps.


def test_padding_of_a_trajectory_is_a_boundary_of_zeros() -> None:
    structure = StepStructure(trajectory())
    leaves = structure.padding_step()
    padding = structure.pack(leaves)
    assert (int(padding.step_type), int(padding.next_step_type)) == (LAST, FIRST)
    assert (int(padding.action), float(padding.reward), float(padding.discount)) == (0, 0, 0)
    assert padding.observation["rgb"].tolist() == [[0, 0], [0, 0]]
    assert padding.observation["name"] == b""
    assert padding.policy_info == ()
    dtypes = structure.dtypes
    assert all(np.asarray(leaf, dtype).dtype == dtype for leaf, dtype in zip(leaves, dtypes, strict=True))


def test_padding_of_other_nests_is_zeros_of_their_dtypes_and_shapes() -> None:
    step = {"is_last": True, "step_type": np.int8(2), "x": np.ones((2, 3), np.float16), "s": np.array(["a", "b"])}
    padding = StepStructure(step).pack(StepStructure(step).padding_step())
    assert padding["is_last"].dtype == bool
    assert (padding["step_type"].dtype, int(padding["step_type"])) == (np.int8, 0)
    assert (padding["x"].dtype, padding["x"].tolist()) == (np.float16, [[0, 0, 0]] * 2)
    assert padding["s"].tolist() == [b"", b""]
    assert not padding["is_last"]


def test_padding_of_a_batch_is_that_of_one_environment() -> None:
    structure = StepStructure({"x": np.ones((4, 2), np.int16)}, batch_size=4)
    assert [(leaf.dtype, leaf.shape) for leaf in structure.padding_step()] == [(np.int16, (2,))]


# Which values fit a leaf, by policy, and which options fit a class.


F4, F8, I4, U1, B, STRINGS, C8 = map(np.dtype, ("f4", "f8", "i4", "u1", "?", "O", "c8"))
SAFE, ROUNDED, LOSSY = {*Fit}, {Fit.LOSSLESS, Fit.LOSSY}, {Fit.LOSSY}

CASES = [
    (np.float32(1), F4, SAFE),
    (np.array(1, ">f4"), F4, SAFE),
    (1.5, F4, SAFE),
    (1, F4, SAFE),
    (True, I4, SAFE),
    (np.float64(0.1), F4, ROUNDED),
    (np.int64(3), U1, ROUNDED),
    (np.float64(3), U1, ROUNDED),
    (3.0, U1, ROUNDED),
    (np.bool_(1), F8, ROUNDED),
    (np.float32(1), C8, ROUNDED),
    (np.float64(1e300), F4, LOSSY),
    (1e300, F4, LOSSY),
    (np.float64(0.5), I4, LOSSY),
    (300, U1, LOSSY),
    (np.nan, I4, LOSSY),
    (2, B, LOSSY),
    (np.complex64(1), F4, set()),
    (np.datetime64(1, "s"), F4, set()),
    (1.0, STRINGS, set()),
    ("text", STRINGS, SAFE),
    (b"text", STRINGS, SAFE),
    ("text", F4, set()),
]


@pytest.mark.parametrize("policy", Fit)
@pytest.mark.parametrize(("value", "dtype", "policies"), CASES)
@pytest.mark.filterwarnings("error")
def test_a_value_fits_by_policy(value: Any, dtype: Any, policies: set[Fit], policy: Fit) -> None:
    if policy not in policies:
        with pytest.raises(StructureError, match=r"^here: "):
            fit(value, dtype, (), "here", "as there", policy)
        return
    found = np.asarray(fit(value, dtype, (), "here", "as there", policy), None if dtype != STRINGS else STRINGS)
    assert found.shape == ()
    assert found.dtype == dtype
    if policies >= ROUNDED and dtype != STRINGS:
        np.testing.assert_allclose(found, value, rtol=1e-6)


def test_another_shape_is_refused_whatever_the_policy() -> None:
    for policy in Fit:
        with pytest.raises(StructureError) as caught:
            fit(np.zeros((2, 1), np.float32), F4, (2,), "here", "as there", policy)
        assert str(caught.value) == "here: float32 (2, 1), expected float32 (2,) as there."


def test_a_number_that_does_not_fit_is_named_with_what_to_do() -> None:
    with pytest.raises(StructureError) as caught:
        fit(np.array([1.0, 1.9]), I4, (2,), "here", "as there", Fit.LOSSLESS, "Round it.")
    assert str(caught.value) == "here: 1.9 (float64) does not fit into int32. Round it."


@pytest.mark.parametrize("dtype", ["f4", "O"])
def test_padding_is_zeros_or_empty_strings(dtype: str) -> None:
    leaf = np.array([[b"a", b"b"]], "O") if dtype == "O" else np.ones((1, 2), dtype)
    padded = padded_rows(leaf, 3)
    assert padded.dtype == leaf.dtype
    assert padded[0].tolist() == leaf[0].tolist()
    assert padded[1:].tolist() == [[b"", b""] if dtype == "O" else [0, 0]] * 2


ADDRESS = "localhost:1"  # nothing connects to it: the arguments are checked first


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (rw.TrajectoryObserver, {"max_dely_s": 1}, "'max_dely_s'. Did you mean 'max_delay_s'?"),
        (rw.EpisodeObserver, {"on_blok": "raise"}, "'on_blok'. Did you mean 'on_block'?"),
        (rw.SequenceObserver, {"qqq": 1}, "'qqq'."),
        (rw.ReplayDataset, {"timeout": 1}, "'timeout'. Did you mean 'timeout_s'?"),
    ],
)
def test_misspelt_option_is_refused_with_a_similar_name(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}.. got an unexpected keyword argument {re.escape(text)}$"):
        kind(ADDRESS, "replay", 2, **options)
