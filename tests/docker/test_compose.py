"""The images and the compose file, with a real engine: it runs, survives, and keeps to its limits."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from waiting import eventually

import reverb_writer as rw

ROOT = Path(__file__).parents[2]
_DOCKER = shutil.which("docker") or "docker"
_BUILD_S = 1800
_CALL_S = 300


def engine() -> bool:
    """Return whether there is a Docker engine."""
    return shutil.which("docker") is not None and not _quiet([_DOCKER, "info"])


def _compose_command() -> list[str]:
    """Return Compose v2 if it is there, else docker-compose 1.29."""
    return [_DOCKER, "compose"] if not _quiet([_DOCKER, "compose", "version"]) else ["docker-compose"]


def _quiet(line: list[str]) -> int:
    return subprocess.run(line, capture_output=True, timeout=60, check=False).returncode


def docker(*arguments: str, check: bool = True, timeout_s: float = _CALL_S) -> subprocess.CompletedProcess[str]:
    """Run docker."""
    return subprocess.run([_DOCKER, *arguments], capture_output=True, text=True, timeout=timeout_s, check=check)


class Project:
    """The services, until it is closed."""

    def __init__(self, name: str, **environment: str) -> None:
        """Choose ports; nothing is started. `environment` may be changed between calls."""
        self.http_port, self.port, self.gateway_port = free_port(), free_port(), free_port()
        self._name = name
        self.environment = {
            **os.environ,
            "REPLAY_PORT": str(self.port),
            "REPLAY_HTTP_PORT": str(self.http_port),
            "GATEWAY_PORT": str(self.gateway_port),
            **environment,
        }
        self._command = _compose_command()

    def __call__(self, *arguments: str, timeout_s: float = _CALL_S) -> str:
        """Run Compose and return what it says."""
        line = [*self._command, "-f", str(ROOT / "docker-compose.yml"), "-p", self._name, *arguments]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=timeout_s, check=False, env=self.environment, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def build(self, *services: str) -> None:
        """Build images."""
        self("build", *services, timeout_s=_BUILD_S)

    def container(self, service: str) -> str:
        """Return the identity of a service's only container."""
        return self("ps", "--all", "-q", service).split()[0]

    def inspect(self, service: str) -> dict[str, Any]:
        """Return what the engine knows of a service's container."""
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)).stdout)[0]
        return found

    def run(self, service: str, *line: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in a service's container."""
        return docker("exec", self.container(service), *line, check=check)

    def status(self) -> dict[str, Any]:
        """Return what the status page shows."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/status.json", timeout=30) as reply:
            value: dict[str, Any] = json.load(reply)
        return value

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each table; none while the server does not answer."""
        try:
            return {table["name"]: table for table in self.status()["tables"]}
        except OSError:
            return {}

    def wait_for(self, table: str, figure: str, at_least: float) -> None:
        """Wait until a figure of a table is that high."""
        eventually(lambda: self.tables().get(table, {}).get(figure, -1) >= at_least, f"{table}: {figure} >= {at_least}")

    def close(self) -> None:
        """Remove containers, networks and volumes."""
        self("down", "--volumes", "--timeout", "30")


pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not engine(), reason="there is no Docker engine on this machine"),
]

OWNER = 4321  # a user and a group
CLIENT = ["reverb-writer-client", "python"]
SERVER = ["--server", "replay:8000"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for certificates that belongs to a user whom no image knows."""
    folder = tmp_path_factory.mktemp("parent") / "certificates"
    for parent in [folder.parent, *folder.parent.parents[:2]]:
        parent.chmod(0o755)
    os.chown(folder.parent, OWNER, OWNER)
    return folder


@pytest.fixture(scope="module")
def project(certificates: Path) -> Iterator[Project]:
    """Server, two actors and a learner; the learner has sampled."""
    project = Project(
        f"reverb-writer-test-{os.getpid()}",
        CERTIFICATES=str(certificates),
        CERTIFICATES_PARENT=str(certificates.parent),
    )
    project.build("replay", "actor")
    with contextlib.closing(project):
        project("up", "--detach", "--scale", "actor=2", "actor", "learner")  # in any order: these come first
        project("up", "--detach", "--no-recreate", "--scale", "actor=2", "replay", "actor", "learner")
        project.wait_for("cartpole", "samples", 1000)
        yield project


def test_health_check_asks_the_server(project: Project) -> None:
    eventually(lambda: project.inspect("replay")["State"]["Health"]["Status"] == "healthy", "it is healthy")


@pytest.mark.parametrize("service", ["replay", "learner"])
def test_nothing_runs_as_root_nor_may_write_or_do_more_than_it_needs(project: Project, service: str) -> None:
    processes = docker("top", project.container(service), "-eo", "uid,pid").stdout.splitlines()[1:]
    assert {line.split()[0] for line in processes} == {"10001"}
    status = project.run(service, "cat", "/proc/1/status").stdout
    capabilities = {line.split()[1] for line in status.splitlines() if line.startswith("Cap")}
    assert capabilities == {"0" * 16}
    assert "NoNewPrivs:\t1" in status
    refused = project.run(service, "sh", "-c", "touch /usr/x", check=False)
    assert "Read-only file system" in refused.stderr


def test_only_loopback_is_published(project: Project) -> None:
    bindings = project.inspect("replay")["HostConfig"]["PortBindings"]
    assert {binding["HostIp"] for of_port in bindings.values() for binding in of_port} == {"127.0.0.1"}
    assert not project.inspect("learner")["HostConfig"]["PortBindings"]


def test_limit_of_the_container_is_the_one_that_the_server_knows(project: Project) -> None:
    limit = project.inspect("replay")["HostConfig"]["Memory"]
    assert limit == 4 * 2**30
    assert project.status()["memory"]["available_bytes"] == limit


def test_killed_server_comes_back_with_its_checkpoint_and_actors_go_on(project: Project) -> None:
    project.run("replay", "reverb-writer-server", "checkpoints", "save", "localhost:8000")
    eventually(lambda: project.status()["checkpoints"]["kept"], "the checkpoint is kept")
    inserts = project.tables()["cartpole"]["inserts"]
    project("kill", "replay")
    project("start", "replay")
    eventually(project.tables, "the server is back")
    assert "restored checkpoint" in project("logs", "replay")
    project.wait_for("cartpole", "inserts", inserts + 50)


def test_stop_leaves_a_checkpoint_within_the_grace_period(project: Project) -> None:
    before = project.status()["checkpoints"]["name"]
    project("stop", "replay")
    state = project.inspect("replay")["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False)
    project("start", "replay")
    eventually(project.tables, "the server is back")
    assert project.status()["checkpoints"]["name"] > before
    listed = project.run("replay", "reverb-writer-server", "checkpoints", "list", "/data/checkpoints").stdout
    assert all(line.endswith("complete") for line in listed.splitlines())


def test_actor_and_learner_say_how_it_goes(project: Project) -> None:
    eventually(lambda: "recent mean return" in project("logs", "actor"), "the actor says its return")
    eventually(lambda: "mean value of a state" in project("logs", "learner"), "the learner says its updates")


@pytest.mark.parametrize("end", [("kill", "--signal", "TERM"), ("stop",)])
@pytest.mark.parametrize(("script", "said"), [("learner", "updates"), ("actor", "episodes")])
def test_program_that_is_told_to_stop_ends_in_order(
    project: Project, script: str, said: str, end: tuple[str, ...]
) -> None:
    line = ["run", "--detach", *network(project), *CLIENT, f"examples/{script}.py", *SERVER]
    container = docker(*line).stdout.strip()
    try:
        eventually(lambda: said in docker("logs", container).stdout, "it works")
        docker(*end, container)
        assert docker("wait", container).stdout.strip() == "0"
    finally:
        docker("rm", "--force", container)


def network(project: Project) -> list[str]:
    return ["--network", next(iter(project.inspect("replay")["NetworkSettings"]["Networks"]))]


def test_certificates_are_made_in_the_image_and_read_whoever_owns_them(project: Project, certificates: Path) -> None:
    project("run", "--rm", "--user", f"{OWNER}:{OWNER}", "certs", "--days", "2")
    assert (certificates / "gateway" / "server.pem").stat().st_uid == OWNER
    project.build("gateway")
    project("--profile", "tls", "up", "--detach", "--no-recreate", "gateway")
    address = f"localhost:{project.gateway_port}"
    clients = certificates / "clients"
    tls = rw.TLS(clients / "ca.crt", clients / "client.crt", clients / "client.key")
    with rw.Client(address, tls) as client:
        assert len(list(client.sample("cartpole", 10, timeout_s=60))) == 10
    with rw.Client(address, rw.TLS(clients / "ca.crt")) as client, pytest.raises(rw.errors.PermissionDeniedError):
        client.server_info(timeout_s=20.0)
    processes = docker("top", project.container("gateway"), "-eo", "user,pid,args").stdout.splitlines()
    assert {line.split()[0] for line in processes if "nginx" in line} == {"nobody"}
    project("stop", "gateway")
    assert project.inspect("gateway")["State"]["ExitCode"] == 0


def test_certificates_in_a_folder_of_another_user_are_refused_with_the_remedy(certificates: Path) -> None:
    mount = f"{certificates.parent}:/work"
    done = docker("run", "--rm", "--volume", mount, "reverb-writer-server", "certs", "/work/others", check=False)
    assert done.returncode == 1
    assert "user 10001 cannot write it" in done.stderr
    assert '--user "$(id -u):$(id -g)"' in done.stderr


def test_bind_mount_of_root_is_refused_with_the_user_that_it_should_belong_to(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    done = docker("run", "--rm", "--volume", f"{tmp_path}:/data", "reverb-writer-server", check=False)
    assert done.returncode == 1
    assert "/data/checkpoints: cannot be used" in done.stderr
    assert "chown 10001" in done.stderr


# A server for programs of one's own.


@pytest.fixture(scope="module")
def alone(project: Project) -> Iterator[Project]:
    """The service `replay` and nothing else; `project` has built its image."""
    alone = Project(f"reverb-writer-alone-{os.getpid()}")
    with contextlib.closing(alone):
        alone("up", "--detach", "replay")
        eventually(alone.tables, "the server serves")
        yield alone


def test_programs_of_the_readme_work_with_the_server_alone(alone: Project) -> None:
    address = f"localhost:{alone.port}"
    with rw.TrajectoryObserver(address, "replay", sequence_length=20, stride_length=10) as observer:
        for number in range(10_000):
            step = {"observation": np.zeros(4, np.float32), "reward": np.float32(number)}
            observer(step, end_of_episode=number % 20 == 19)
    with rw.ReplayDataset(address, "replay", batch_size=256) as dataset:
        assert next(iter(dataset)).data["observation"].shape == (256, 20, 4)


def test_other_size_on_the_same_volume_is_served_where_a_variable_says_so(alone: Project) -> None:
    with rw.Client(f"localhost:{alone.port}") as client:
        client.insert([np.zeros(3)], {"replay": 1.0})
    alone("stop", "replay")
    alone.environment["REVERB_WRITER__TABLES__REPLAY__MAX_SIZE"] = "77"
    alone.environment["REVERB_WRITER__CHECKPOINTS__ON_MISMATCH"] = "config"
    alone("up", "--detach", "replay")
    eventually(lambda: alone.tables().get("replay", {}).get("max_size") == 77, "the new size is served")


# What is in the images.


@pytest.mark.parametrize("image", ["reverb-writer-server", "reverb-writer-client", "reverb-writer-gateway"])
def test_image_has_nothing_that_installs_or_builds(project: Project, image: str) -> None:
    project.build("gateway")
    script = (
        "find / -xdev -path /proc -prune -o -name site-packages -print -o -name pip -print -o -name ensurepip -print"
    )
    found = docker("run", "--rm", "--entrypoint", "sh", "--user", "0", image, "-c", script).stdout.split()
    assert not [path for path in found if path.endswith(("/pip", "/ensurepip"))]
    packages = docker("run", "--rm", "--entrypoint", "sh", image, "-c", "ls " + " ".join(found)).stdout.split()
    unwanted = {"pip", "setuptools", "hatchling", "wheel", "clang", "tensorboard", "keras", "cyclonedx_py"}
    assert not unwanted & set(packages)


@pytest.mark.parametrize("image", ["reverb-writer-server", "reverb-writer-client"])
def test_image_has_a_list_of_all_its_packages(project: Project, image: str) -> None:
    script = (
        "import importlib.metadata as m, json; "
        "components = json.load(open('/opt/venv/sbom.cdx.json'))['components']; "
        "listed = {one['name'].lower(): one['version'] for one in components}; "
        "there = {one.name.lower(): one.version for one in m.distributions()}; "
        "assert there and all(listed[name] == version for name, version in there.items()), (there, listed)"
    )
    docker("run", "--rm", "--entrypoint", "python", image, "-c", script)


# The image of a Ray node: Ray in it starts, and so does the server that its shards run on.

BUILD_S = 1800
PROGRAM = """
import reverb_writer as rw, reverb_writer.ray as rwr
table = rw.TableConfig("replay", 100)
with rwr.ReplayCluster.start("image", [table], python="/opt/venv/bin/python", checkpoints="/tmp/replay") as cluster:
    print(cluster.status().is_serving)
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * BUILD_S)
def test_cluster_starts_in_the_image() -> None:
    tag = f"reverb-writer-test-{os.getpid()}"
    for name, options in (("server", ()), ("ray", ("--build-arg", f"SERVER={tag}-server"))):
        file = ROOT / "docker" / f"{name}.Dockerfile"
        docker("build", "--file", str(file), "--tag", f"{tag}-{name}", *options, str(ROOT), timeout_s=BUILD_S)
    done = docker("run", "--rm", "--shm-size", "1g", f"{tag}-ray", "python", "-c", PROGRAM)
    assert "True" in done.stdout.splitlines()  # Ray may print lines of its actors after it
    assert docker("run", "--rm", f"{tag}-ray", "leave-ray").stdout == ""
