"""The server's configuration: precedence, errors that say what is allowed, and descriptions of tables."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reverb_writer_server.config.keys import ConfigError
from reverb_writer_server.config.schema import KEYS, ServedTable, ServerConfig, load
from reverb_writer_server.machine import available_bytes
from reverb_writer_server.observability.banner import describe, memory_lines, table_lines

from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.tables import MinSize, Prioritized, Queue, SampleToInsertRatio, TableConfig


def read(tmp_path: Path, text: str, environment: dict[str, str] | None = None, **flags: Any) -> ServerConfig:
    file = tmp_path / "server.toml"
    file.write_text(text)
    return load(file, environment or {}, {tuple(name.split("__")): value for name, value in flags.items()})


def tables(tmp_path: Path, text: str, environment: dict[str, str] | None = None) -> dict[str, TableConfig]:
    return {table.config.name: table.config for table in read(tmp_path, text, environment).tables}


# What is configured.


def test_without_anything_there_is_one_table_and_the_defaults() -> None:
    config = load(None, {})
    assert config.tables == (ServedTable(TableConfig("replay")),)
    assert (config.port, config.http_port, config.checkpoints_directory) == (8000, 0, None)
    assert (config.checkpoints_keep, config.checkpoints_restore) == (3, "latest")
    assert config.checkpoints_on_mismatch == "refuse"


def test_samplers_removers_and_rate_limiters_have_plain_names(tmp_path: Path) -> None:
    """`tests/properties/tables` has all tables; these keys are as a person writes them."""
    text = """
        [tables.weighted]
        sampler = "prioritized"
        sampler_exponent = 0.6
        remover = "min_heap"
        rate_limiter = "ratio"
        samples_per_insert = 8
        min_size = 100
        error_buffer = 200
        max_times_sampled = 2
        [tables.queue]
        rate_limiter = "queue"
        max_size = 9
    """
    assert tables(tmp_path, text) == {
        "weighted": TableConfig(
            "weighted", 1_000_000, Prioritized(0.6), "min_heap", SampleToInsertRatio(8, 100, 200), 2
        ),
        "queue": TableConfig("queue", 9, "fifo", "fifo", Queue(9), 1),
    }


def test_signature_is_told_by_leaf_and_gets_the_steps_of_an_item(tmp_path: Path) -> None:
    text = """
        [tables.replay]
        sequence_length = 20
        [tables.replay.signature]
        reward = "float32"
        text = "string"
        parts = ["int64[?, 3]", "bool"]
        observation.rgb = "uint8[84, 84, 4]"
    """
    assert tables(tmp_path, text)["replay"].signature == {
        "reward": ArraySpec((20,), np.dtype(np.float32), "reward"),
        "text": ArraySpec((20,), np.dtype(object), "text"),
        "parts": [ArraySpec((20, None, 3), np.dtype(np.int64), "0"), ArraySpec((20,), np.dtype(bool), "1")],
        "observation": {"rgb": ArraySpec((20, 84, 84, 4), np.dtype(np.uint8), "rgb")},
    }


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = "port = 1\nhttp.port = 1\ncheckpoints.keep = 1"
    environment = {"REVERB_WRITER__PORT": "2", "REVERB_WRITER__HTTP__PORT": "2"}
    config = read(tmp_path, file, environment, port=3)
    assert (config.port, config.http_port, config.checkpoints_keep, config.http_host) == (3, 2, 1, "127.0.0.1")


def test_sizes_of_the_file_hold_where_no_option_names_them(tmp_path: Path) -> None:
    text = """
        [tables.replay]
        max_size = 500
        min_size = 7
        [tables.q]
        rate_limiter = "queue"
        max_size = 20
    """
    replay, q = (table.config for table in read(tmp_path, text, tables__replay__max_size=901).tables)
    assert (replay.max_size, replay.rate_limiter) == (901, MinSize(7))
    assert (q.max_size, q.max_times_sampled) == (20, 1)


@pytest.mark.parametrize("key", [key for key in KEYS if not key.startswith("tables.")])
def test_every_key_can_be_set_by_a_variable(key: str) -> None:
    one = KEYS[key]
    value = one.options[-1] if one.options else {int: "7", float: "7", str: "text"}[one.types[-1]]
    together = {
        "cluster.": {"CLUSTER__SHARDS": "8", "CLUSTER__SHARD": "3"},
        "checkpoints.safe": {"CHECKPOINTS__KEEP": "7"},
    }
    others = next((keys for start, keys in together.items() if key.startswith(start)), {})
    environment = {f"REVERB_WRITER__{name}": other for name, other in others.items()}
    load(None, {**environment, f"REVERB_WRITER__{key.upper().replace('.', '__')}": value})


def test_variables_reach_tables_of_the_file_and_make_new_ones(tmp_path: Path) -> None:
    environment = {
        "REVERB_WRITER__TABLES__MY_TABLE__MAX_SIZE": "5",
        "REVERB_WRITER__TABLES__NEW__SIGNATURE": '{obs = "uint8[3]"}',
        "REVERB_WRITER__TABLES__NEW__RATE_LIMITER": "ratio",
        "REVERB_WRITER__TABLES__NEW__SAMPLES_PER_INSERT": "2",
        "REVERB_WRITER__TABLES__NEW__ERROR_BUFFER": "[0, 10]",
    }
    made = tables(tmp_path, "[tables.My-Table]\nmin_size = 2", environment)
    assert made["My-Table"] == TableConfig("My-Table", 5, rate_limiter=MinSize(2))
    assert made["new"].rate_limiter == SampleToInsertRatio(2, 1, (0, 10))
    assert made["new"].signature == {"obs": ArraySpec((None, 3), np.dtype(np.uint8), "obs")}


# Errors.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 70000", r"`port`: got 70000 (integer), allowed: an integer from 0 to 65535."),
        ('port = "8000"', r'`port`: got "8000" (string), allowed: an integer from 0 to 65535.'),
        ("port = true", r"`port`: got true (boolean), allowed: an integer from 0 to 65535."),
        ("port =", r"is not valid TOML:"),
        ('bind = "10.0.0.1"', '`bind`: got "10.0.0.1" (string), allowed: "127.0.0.1" or "0.0.0.0"'),
        ("prot = 1", r"unknown key `prot`. Did you mean `port`? Allowed: port"),
        ("[http]\nprot = 1", "unknown key `http.prot`. Did you mean `port`? Allowed in [http]: port, host, max_"),
        ("http = 3", "`http`: got 3 (integer), allowed: a section [http] with port, host"),
        ("tables = 3", "`tables`: got 3 (integer), allowed: a section [tables] with a section for each"),
        ("tables.a = 3", r"`tables.a`: got 3 (integer), allowed: a section [tables.a] with max_size, "),
        ("tables.a.sampler = 'unifrom'", r'`tables.a.sampler`: got "unifrom" (string), allowed: "uniform" or "fifo"'),
        ("tables.a.min_size = 0", r"`tables.a.min_size`: got 0 (integer), allowed: an integer from 1 to"),
        ("[tables.a]\nmin_size = 9\nmax_size = 3", r"`min_size` must be <= `max_size`, got 9 > 3"),
        ("tables.a.samples_per_insert = 3", r'allowed: nothing here; set rate_limiter = "ratio" to keep a ratio.'),
        ("tables.a.sampler_exponent = 3", r'it belongs to sampler = "prioritized".'),
        ("tables.a.rate_limiter = 'ratio'", r"`tables.a.samples_per_insert`: got nothing, allowed: a number >= 0"),
        ("[tables.a]\nrate_limiter = 'queue'\nmin_size = 3", r"a queue sets it itself."),
        (
            "[tables.a]\nrate_limiter = 'ratio'\nsamples_per_insert = 8\nerror_buffer = 3",
            r"`error_buffer` must be >= max(1, `samples_per_insert`) = 8, got 3",
        ),
        ("tables.a.signature.obs = 'uint9[3]'", r"`signature.obs`: got 'uint9[3]', allowed: a dtype and a shape"),
    ],
)
def test_what_cannot_work_is_refused_by_file_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, text)
    assert str(refusal.value).startswith(f"{tmp_path / 'server.toml'}: ")
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PROT", "1", "unknown key `prot`. Did you mean `port`?"),
        ("CHECKPOINTS__KEEP", "many", '`checkpoints.keep`: got "many" (string), allowed: an integer from 1'),
        ("HTTP", "3", '`http`: got "3" (string), allowed: a section [http] with port, host, max_silence_s.'),
        ("TABLES__A__MAXSIZE", "3", "unknown key `tables.a.maxsize`. Did you mean `max_size`?"),
    ],
)
def test_variable_that_cannot_work_is_refused_by_name(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(None, {f"REVERB_WRITER__{variable}": value})
    assert str(refusal.value).startswith(f"environment variable REVERB_WRITER__{variable}: ")
    assert message in str(refusal.value)


def test_other_variables_of_the_project_are_nothing_to_the_server() -> None:
    assert load(None, {"REVERB_WRITER_SERVER_PYTHON": "x", "HOME": "y"}) == load(None, {})


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        load(tmp_path / "none.toml", {})


def test_file_may_be_json_as_programs_write_it(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text('{"port": 8001, "tables": {"a": {"max_size": 5, "signature": {"obs": "uint8[4]"}}}}')
    config = load(file, {})
    assert (config.port, config.tables[0].config.max_size) == (8001, 5)
    file.write_text('{"port": "8001"}')
    with pytest.raises(ConfigError, match=r'config: `port`: got "8001" \(string\), allowed: an integer'):
        load(file, {})
    file.write_text('{"port": 8001')
    with pytest.raises(ConfigError, match=r"config: is not valid JSON: .* line 1 column 14"):
        load(file, {})


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        # Each insert raises diff by 8 - 3 = 5, and 1000 / 5 = 200.
        ("error_buffer = 200\nmax_times_sampled = 3", "each insert raises diff by 5 permanently. After 200 inserts"),
        ("error_buffer = [0, 700]", "max_diff 700 is below"),  # told, and no Python warning
    ],
)
def test_ratio_out_of_reach_and_what_a_table_warns_of_are_told(tmp_path: Path, more: str, advice: str) -> None:
    text = "[tables.a]\nrate_limiter = 'ratio'\nsamples_per_insert = 8\nmin_size = 100\n"
    (sentence,) = (line for line in table_lines(read(tmp_path, text + more).tables) if "note:" in line)
    assert advice in sentence


# Descriptions.


def test_tables_are_described() -> None:
    table = TableConfig("a", 5000, "lifo", "uniform", SampleToInsertRatio(8, 100, 200), 4)
    assert describe(table) == [
        "holds up to 5,000 items; when it is full, an insert removes any item, with equal probability",
        "samples the newest item, each at most 4 times",
        "blocks samples while it holds fewer than 100 items, or when inserts x 8 - samples would fall below 600",
        "blocks inserts when inserts x 8 - samples would rise above 1,000, once it holds 100",
        "a learner takes 8 samples per insert and may fall 50 inserts behind",
    ]
    assert describe(TableConfig("a", rate_limiter=MinSize(5)))[2:] == [
        "blocks samples while it holds fewer than 5 items",
        "never blocks inserts",
    ]


# Reverb's textproto.

TEXTPROTO = """
port: 8008
tables { table_name: "uniform" max_size: 100 max_times_sampled: 0
  sampler { uniform: true } remover { fifo: true }
  rate_limiter { samples_per_insert: 1 min_size_to_sample: 10
                 min_diff: -1.7976931348623157e+308 max_diff: 1.7976931348623157e+308 } }
tables { table_name: "weighted" max_size: 50
  sampler { prioritized { priority_exponent: 0.8 } } remover { heap { min_heap: true } }
  rate_limiter { samples_per_insert: 4 min_size_to_sample: 5 min_diff: 0 max_diff: 40 } }
tables { table_name: "queue" max_size: 3 max_times_sampled: 1
  sampler { fifo: true } remover { fifo: true }
  rate_limiter { samples_per_insert: 1 min_size_to_sample: 1 min_diff: 0 max_diff: 3 } }
"""


def test_textproto_of_reverb_is_read(tmp_path: Path) -> None:
    file = tmp_path / "server.textproto"
    file.write_text(TEXTPROTO)
    config = load(file, {"REVERB_WRITER__HTTP__PORT": "1"})
    assert (config.port, config.http_port) == (8008, 1)
    assert [table.config for table in config.tables] == [
        TableConfig("uniform", 100, rate_limiter=MinSize(10)),
        TableConfig("weighted", 50, Prioritized(0.8), "min_heap", SampleToInsertRatio(4, 5, (0, 40))),
        TableConfig.queue("queue", 3),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_size: 50", "max_sice: 50", "line 7"),
        ("max_diff: 40", "max_diff: 3", "must span >= 2 x"),
        ("sampler { uniform: true }", "", "a selector must be fifo, lifo, uniform, heap or prioritized, got none"),
    ],
)
def test_textproto_that_cannot_work_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "server.pbtxt"
    file.write_text(TEXTPROTO.replace(old, new))
    with pytest.raises(ConfigError, match=message) as refusal:
        load(file, {})
    assert str(file) in str(refusal.value)


# Memory. A step of 84 x 84 x 4 bytes and a float32 has 28,228 bytes, in two columns.

SIGNATURE = {"rgb": ArraySpec((20, 84, 84, 4), np.dtype(np.uint8)), "reward": ArraySpec((20,), np.dtype(np.float32))}


# Chunks have 20 steps for S = 1 and 30, 5 for S = 5; a window of 20 steps touches 1.95 of the former on average.
@pytest.mark.parametrize(
    ("remover", "stride", "episode", "steps", "slices", "chunks"),
    [
        ("fifo", 1, None, 1000 + 19, 1.95, 0.05),
        ("fifo", 5, None, 5000 + 15, 4, 1),
        ("fifo", 30, None, 20_000, 1, 1),
        ("fifo", 1, 21, 20_000, 1.5, 1),  # two windows and two chunks an episode
        ("uniform", 1, None, 39_000, 1.95, 1.95),
    ],
)
def test_overlapping_windows_share_their_chunks_where_the_oldest_goes_first(
    remover: Any, stride: int, episode: int | None, steps: int, slices: float, chunks: float
) -> None:
    config = TableConfig("a", 1000, remover=remover, signature=SIGNATURE)
    one = ServedTable(config, 20, stride, episode_length=episode).estimate()
    assert (one.steps, one.step_bytes) == (steps, 84 * 84 * 4 + 4)
    held = 1000 * (600 + 2 * (145 * slices + 1400 * chunks))
    num_steps = steps - (20 - min(stride, 20) if episode is None and remover == "fifo" else 0)
    assert one.total_bytes == pytest.approx(held + 1.15 * num_steps * 28_228, rel=1e-6)
    assert one.save_bytes == pytest.approx(1000 * (600 + 2 * 85 * slices))


def test_estimate_says_what_it_supposes_and_is_called_no_bound() -> None:
    config = replace(load(None, {}), tables=(ServedTable(TableConfig("a", 1000, signature=SIGNATURE), 20, 10),))
    (line, in_all), _ = memory_lines(config)
    assert line.startswith("memory of table `a`: about ")
    assert line.endswith("bytes before compression)")
    assert in_all.startswith("total memory: about ")


def test_total_of_memory_is_told_though_some_tables_have_no_estimate() -> None:
    tables = (ServedTable(TableConfig("a")), ServedTable(TableConfig("b"), 4))
    lines, is_excess = memory_lines(replace(load(None, {}), tables=tables))
    assert lines[:2] == [
        "memory of table `a`: unknown, set its signature and sequence_length",
        "memory of table `b`: unknown, set its signature",
    ]
    assert lines[2].startswith("total memory: at least 572.2 MiB, without `a`, `b` (572.2 MiB for the processes), ")
    assert not is_excess


def test_memory_of_what_is_not_described_is_unknown() -> None:
    assert ServedTable(TableConfig("a")).estimate().total_bytes is None
    unknown = {"x": ArraySpec((5, None), np.dtype(np.uint8))}
    assert ServedTable(TableConfig("a", signature=unknown)).estimate().total_bytes is None


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 2**20), ("max\n", math.inf)])
def test_limit_of_the_container_counts_if_there_is_one(tmp_path: Path, text: str, limit: float) -> None:
    machine = available_bytes(tmp_path)
    (tmp_path / "memory.max").write_text(text)
    assert available_bytes(tmp_path) == min(machine, limit)


def test_limit_of_the_unit_or_of_the_job_that_it_is_in_counts(tmp_path: Path) -> None:
    group = tmp_path / "system.slice/replay.service"
    group.mkdir(parents=True)
    (own := tmp_path / "own").write_text("1:name=systemd:/x\n0::/system.slice/replay.service\n")
    (group.parent / "memory.max").write_text("1048576\n")
    assert available_bytes(tmp_path, own) == 2**20
    (group / "memory.max").write_text("4096\n")
    assert available_bytes(tmp_path, own) == 4096


# Several servers with one file.

CLUSTER = """
cluster.shards = 4
checkpoints.directory = "checkpoints"
[tables.replay]
max_size = 1000
rate_limiter = "ratio"
samples_per_insert = 2.0
min_size = 100
error_buffer = 80.0
[tables.weights]
max_size = 1
"""


def test_each_server_of_a_cluster_serves_its_share(tmp_path: Path) -> None:
    for shard in range(4):
        config = read(tmp_path, CLUSTER, {"REVERB_WRITER__CLUSTER__SHARD": str(shard)})
        replay, weights = (table.config for table in config.tables)
        assert (replay.max_size, weights.max_size) == (250, 1)
        assert replay.rate_limiter == SampleToInsertRatio(2, 25, 20)
        assert config.checkpoints_directory == Path(f"checkpoints/shard-{shard}")
        assert (config.cluster_shard, config.cluster_shards) == (shard, 4)


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (CLUSTER, {}, "`cluster.shard`: got nothing, allowed: 0 to 3, because `cluster.shards` is 4."),
        (CLUSTER, {"cluster__shard": 4}, "command line: `cluster.shard`: got 4, allowed: 0 to 3"),
        ("", {"cluster__shard": 1}, "`cluster.shard`: got 1, allowed: 0 to 0, because `cluster.shards` is 1."),
        (
            CLUSTER,
            {"cluster__shard": 0, "tables__replay__error_buffer": 7.0},
            "`tables.replay`: table `replay`: sizes and bounds are those of all 4 shards together",
        ),
    ],
)
def test_share_that_is_none_or_would_not_work_is_refused(
    tmp_path: Path, text: str, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, text, **flags)
