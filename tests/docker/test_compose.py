"""The images and the compose file, with a real engine: it runs, survives, and keeps to its limits."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from compose import Project, docker, engine
from service_process import eventually, run_command

import reverb_writer as rw

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not engine(), reason="there is no Docker engine on this machine"),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates that the user of the gateway may read."""
    folder = tmp_path_factory.mktemp("certificates")
    assert run_command("certs", str(folder), "--days", "2").returncode == 0
    return folder


@pytest.fixture(scope="module")
def project(certificates: Path) -> Iterator[Project]:
    """Server, two actors and a learner; the learner has sampled."""
    project = Project(
        f"reverb-writer-test-{os.getpid()}", CERTIFICATES=str(certificates), GATEWAY_USER=str(os.getuid())
    )
    project.build("replay", "actor")
    with contextlib.closing(project):
        project("up", "--detach", "--scale", "actor=2", "actor", "learner")  # in any order: these come first
        project("up", "--detach", "--no-recreate", "--scale", "actor=2", "replay", "actor", "learner")
        project.wait_for("replay", "samples", 1000)
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
    inserts = project.tables()["replay"]["inserts"]
    project("kill", "replay")
    project("start", "replay")
    eventually(project.tables, "the server is back")
    assert "restored checkpoint" in project("logs", "replay")
    project.wait_for("replay", "inserts", inserts + 50)


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


def test_gateway_lets_in_who_has_a_certificate(project: Project, certificates: Path) -> None:
    project.build("gateway")
    project("--profile", "tls", "up", "--detach", "--no-recreate", "--scale", "actor=2")
    address = f"localhost:{project.gateway_port}"
    tls = rw.TLS(certificates / "ca.crt", certificates / "client.crt", certificates / "client.key")
    with rw.Client(address, tls) as client:
        assert len(list(client.sample("replay", 10))) == 10
    with rw.Client(address, rw.TLS(certificates / "ca.crt")) as client, pytest.raises(rw.ReverbWriterError):
        client.server_info(timeout_s=2.0)


# Two containers in one network namespace, and a client with the process number of the server.

_SAMPLE_OURS = "import reverb_writer as rw; print(len(list(rw.Client('127.0.0.1:8000').sample('replay', 10))))"
_SAMPLE_THEIRS = "import reverb; print(len(list(reverb.Client('127.0.0.1:8000').sample('replay', 10))))"
_AS_NUMBER = """
import os, sys
number = int(sys.argv[1])
while True:
    child = os.fork()
    if not child:
        if os.getpid() == number:
            os.execvp("python", ["python", "-c", sys.argv[2]])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if child == number:
        print("ended with", os.waitstatus_to_exitcode(status))
        break
    if child > number:
        sys.exit("too late")
"""


@pytest.mark.parametrize(
    ("script", "expected"), [(_SAMPLE_OURS, "ended with 0"), (_SAMPLE_THEIRS, f"ended with {-signal.SIGSEGV}")]
)
def test_our_client_samples_where_that_of_dm_reverb_crashes(project: Project, script: str, expected: str) -> None:
    find = "grep -l reverb[.]chil[d] /proc/[0-9]*/cmdline | head -1 | cut -d/ -f3"
    number = project.run("replay", "sh", "-c", find).stdout.strip()
    network = f"container:{project.container('replay')}"
    line = ["run", "--rm", "--network", network, "--entrypoint", "python", "reverb-writer-server"]
    done = docker(*line, "-c", _AS_NUMBER, number, script, check=False)
    assert expected in done.stdout, done.stdout + done.stderr
