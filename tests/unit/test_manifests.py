"""The manifests and the unit say what the server can do, in words that Kubernetes and systemd know."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "reverb-writer-server.service"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
FOREIGN = {"kustomization.yaml", "certificate.yaml"}  # kustomize's and cert-manager's own kinds
VERSIONS = ("1.31", "1.34")

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in FILES if Path(name).name not in FOREIGN])
def test_manifest_follows_the_schema(name: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validator.validate(read(name), version, strict=True)


@pytest.mark.parametrize("folder", [".", "gateway"])
def test_kustomization_names_every_manifest_beside_it(folder: str) -> None:
    listed = read(f"{folder}/kustomization.yaml")["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in (FOLDER / folder).glob("*.yaml")}
    if kubectl := shutil.which("kubectl"):
        subprocess.run([kubectl, "kustomize", str(FOLDER / folder)], capture_output=True, check=True, timeout=60)


def test_probes_and_ports_are_those_of_the_configuration() -> None:
    schema = pytest.importorskip("reverb_writer_server.config.schema", reason="the server is not installed")
    config = schema.load(FOLDER / "server.toml", {})
    (container,) = read("statefulset.yaml")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"reverb": config.port, "http": config.http_port}
    assert {port["port"] for rule in read("networkpolicy.yaml")["spec"]["ingress"] for port in rule["ports"]} == {
        *ports.values()
    }
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert config.bind == config.http_host == "0.0.0.0"  # noqa: S104  # or no other pod reaches it
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(config.checkpoints.directory.is_relative_to(mount) for mount in mounts)


def test_pod_runs_as_the_user_of_its_image_and_may_write_only_its_volumes() -> None:
    pod = read("statefulset.yaml")["spec"]["template"]["spec"]
    (uid,) = re.findall(r"^USER (\d+)$", (ROOT / "docker" / "server.Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(uid)
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not pod["automountServiceAccountToken"]


def test_only_labelled_pods_reach_the_server_and_the_gateway_is_one() -> None:
    reverb = read("networkpolicy.yaml")["spec"]["ingress"][0]["from"]
    assert reverb == [{"podSelector": {"matchLabels": {"replay-client": "true"}}}]
    assert read("gateway/deployment.yaml")["spec"]["template"]["metadata"]["labels"]["replay-client"] == "true"


def test_permissions_of_the_manifests_are_those_of_the_image() -> None:
    ours, theirs = FOLDER / "gateway" / "permissions.txt", ROOT / "docker" / "gateway" / "permissions.txt"
    assert ours.read_text() == theirs.read_text()


def test_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text())
    assert "WatchdogSec=" in text
    assert "Type=notify" in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("=replay\n", "=root\n"))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
