"""What a table is in Python, it is on a shard's server: its configuration says all of it."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tree
from hypothesis import example, given
from hypothesis import strategies as st

import reverb_writer as rw
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables.table_dicts import table_to_dict

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.config.schema import load

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
sizes = st.integers(1000, 2**31 - 1)  # of tables whose limiters below can work
selectors = st.sampled_from(["fifo", "lifo", "uniform", "max_heap", "min_heap"]) | st.builds(
    rw.Prioritized, st.floats(0, 100)
)
ratios = st.builds(
    rw.SampleToInsertRatio,
    st.floats(0.01, 50),
    st.integers(1, 1000),
    st.floats(50, 1000) | st.tuples(st.floats(-1000, 0), st.floats(50_000, 100_000)),
)


@st.composite
def signatures(draw: st.DrawFn) -> Any:
    """Return a nest of arrays with as many steps each: a number, or unknown."""
    steps = draw(st.none() | st.integers(1, 100))
    shapes = st.lists(st.none() | st.integers(0, 5), max_size=3).map(lambda shape: (steps, *shape))
    kinds = st.sampled_from([np.dtype(name) for name in ("f4", "f8", "i4", "u1", "?", "c8", "O")])
    leaf = st.builds(ArraySpec, shapes, kinds)
    nest = st.recursive(
        leaf,
        lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3),
        max_leaves=5,
    )
    return draw(nest)


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "name": names,
    "max_size": sizes,
    "sampler": selectors,
    "remover": selectors,
    "rate_limiter": st.builds(rw.MinSize, st.integers(1, 1000)) | ratios,
    "max_times_sampled": st.integers(0, 2**31 - 1),
    "signature": st.none() | signatures(),
}
queues = st.builds(
    lambda kind, name, size, signature: kind(name, size, signature),
    st.sampled_from([rw.TableConfig.queue, rw.TableConfig.stack]),
    *(FIELDS[field] for field in ("name", "max_size", "signature")),
)


def nameless(table: rw.TableConfig) -> rw.TableConfig:
    """Return the table without the names of its arrays, which are for messages only."""
    if table.signature is None:
        return table
    signature = tree.map_structure(lambda leaf: ArraySpec(leaf.shape, leaf.dtype), table.signature)
    return dataclasses.replace(table, signature=signature)


def test_every_field_of_a_table_is_tried() -> None:
    assert [field.name for field in dataclasses.fields(rw.TableConfig)] == [*FIELDS]


@given(st.builds(rw.TableConfig, **FIELDS) | queues)
@example(rw.TableConfig("*"))  # also the name of all tables in the list of keys
@pytest.mark.filterwarnings("ignore:`error_buffer`")  # a rule that may keep writers waiting
def test_server_has_the_table_that_was_asked_for(table: rw.TableConfig) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.json"
        file.write_text(json.dumps({"tables": {table.name: table_to_dict(table)}}))
        (served,) = load(file, {}).tables
    assert nameless(served.config) == nameless(table)
