"""Options of the command line change what they name, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_process import service

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FILE = """
    [tables.replay]
    max_size = 500
    min_size = 7
    [tables.q]
    rate_limiter = "queue"
    max_size = 20
"""


def test_table_of_the_file_and_one_that_only_an_option_names(tmp_path: Path) -> None:
    with service(tmp_path, FILE, "--table", "q", "--table", "new") as server, rw.Client(server.address) as client:
        tables = client.server_info()
    assert {name: table.max_size for name, table in tables.items()} == {"replay": 500, "q": 20, "new": 1_000_000}


def test_servers_of_a_cluster_serve_their_shares_of_one_file(tmp_path: Path) -> None:
    file = f'cluster.shards = 2\ncheckpoints.directory = "{tmp_path}/checkpoints"\n{FILE}'
    with (
        service(tmp_path, file, "--shard", "0") as first,
        service(tmp_path, file, "--shard", "1") as second,
        rw.Client([first.address, second.address]) as client,
    ):
        tables = client.server_info()
        assert [server.max_size for server in tables["replay"].servers] == [250, 250]
        assert [server.rate_limiter.min_size_to_sample for server in tables["replay"].servers] == [4, 4]
        assert (tables["replay"].max_size, tables["q"].max_size) == (500, 20)
        assert len(client.checkpoint().splitlines()) == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["shard-0", "shard-1"]
