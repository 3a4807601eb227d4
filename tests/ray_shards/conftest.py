"""A Ray cluster of a head without processors and three nodes of one each, on this machine; servers are real ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns of what it will do one day
os.environ["RAY_DEDUP_LOGS"] = "0"

ray = pytest.importorskip("ray", reason="Ray is not installed: `make ray` has it")
from ray.cluster_utils import Cluster  # noqa: E402

import reverb_writer as rw  # noqa: E402
import reverb_writer.ray as rwr  # noqa: E402

SERVER_PYTHON = os.environ.get("REVERB_WRITER_SERVER_PYTHON", "")
NUM_NODES = 3
STORE_BYTES = 80 * 2**20  # the least that Ray takes; no data pass through it

Start = Callable[..., rwr.ReplayCluster]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(300))  # a shard takes seconds to start, and more on a busy machine
        item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))  # Ray's own sockets and files
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


def new_ray(num_nodes: int) -> Any:
    if not SERVER_PYTHON:
        pytest.skip("REVERB_WRITER_SERVER_PYTHON names no interpreter that has dm-reverb")
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        },
    )
    for _ in range(num_nodes):
        made.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    ray.init(address=made.address, log_to_driver=False)
    return made


@pytest.fixture(scope="session")
def cluster_of_ray() -> Iterator[Any]:
    made = new_ray(NUM_NODES)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def machines(cluster_of_ray: Any) -> Any:
    """The cluster of Ray, when the tests before have left it."""
    for name in rwr.ReplayCluster.names():  # a test that failed has left it
        rwr.ReplayCluster.remove(name, 60.0)
    eventually(lambda: ray.available_resources().get("CPU") == NUM_NODES, "Ray has ended all that was there before")
    return cluster_of_ray


@pytest.fixture
def start(machines: Any, tmp_path: Path) -> Iterator[Start]:
    """`start(name, tables, shards, **options)` starts a cluster, which ends with the test."""
    with contextlib.ExitStack() as clusters:

        def begin(name: str, tables: list[rw.TableConfig], shards: int = 2, **options: Any) -> rwr.ReplayCluster:
            options = {"python": SERVER_PYTHON, "memory_bytes": 10**8, "checkpoint_every_s": 0, **options}
            cluster = rwr.ReplayCluster.start(name, tables, shards, **options)
            clusters.callback(cluster.stop, 60.0)
            return cluster

        yield begin
