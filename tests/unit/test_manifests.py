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
PATCHES = {"shards-gateway/networkpolicy.yaml", "shards-gateway/service.yaml", "shards-gateway/sidecar.yaml"}
VERSIONS = ("1.31", "1.34")

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", [name for name in FILES if Path(name).name not in FOREIGN and name not in PATCHES])
def test_manifest_follows_the_schema(name: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validator.validate(read(name), version, strict=True)


@pytest.mark.parametrize("folder", [".", "gateway", "shards", "shards-gateway"])
def test_kustomization_names_every_manifest_beside_it(folder: str) -> None:
    document = read(f"{folder}/kustomization.yaml")
    named = {*document["resources"], *(patch["path"] for patch in document.get("patches", ()))} - {"../shards"}
    assert {*named, "kustomization.yaml"} == {path.name for path in (FOLDER / folder).glob("*.yaml")}
    if shutil.which("kubectl"):
        assert built(folder)


def built(folder: str) -> list[Any]:
    """Return what kustomize makes of a folder."""
    line = [shutil.which("kubectl") or pytest.skip("kubectl is not installed"), "kustomize", str(FOLDER / folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", VERSIONS)
def test_shards_with_their_gateways_follow_the_schema(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    made = {document["kind"]: document for document in built("shards-gateway")}
    for kind, document in made.items():
        if kind != "Certificate":
            validator.validate(document, version, strict=True)
    shard, gateway = made["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    # Nothing outside the pod reaches the server, and its gateway calls it as docker/gateway/run says for one namespace.
    assert {"name": "REVERB_WRITER__BIND", "value": "127.0.0.1"} in shard["env"]
    assert {"name": "GATEWAY_SOURCE", "value": "127.0.0.2"} in gateway["env"]
    assert {port["port"] for port in made["Service"]["spec"]["ports"]} == {8443, 8080}
    assert {port["port"] for rule in made["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]} == {8443, 8080}


def test_service_of_the_shards_is_the_target_of_clients() -> None:
    service, shards = read("shards/service.yaml"), read("shards/statefulset.yaml")["spec"]
    assert service["spec"]["clusterIP"] == "None"  # its name has an address for each shard
    assert not service["spec"].get("publishNotReadyAddresses")  # and for none that does not serve
    assert service["spec"]["selector"].items() <= shards["template"]["metadata"]["labels"].items()
    assert shards["serviceName"] == service["metadata"]["name"] == "replay-shards"
    assert read("shards/poddisruptionbudget.yaml")["spec"]["maxUnavailable"] == 1
    (count,) = read("shards/kustomization.yaml")["replicas"]
    assert count == {"name": "replay-shards", "count": shards["replicas"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_and_claim_of_the_ray_cluster_follow_the_schema(version: str) -> None:
    """KubeRay's own kind has no schema here: what it takes from Kubernetes, its pods and the claim, is checked."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    cluster, claim = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "raycluster.yaml").read_text())
    validator.validate(claim, version, strict=True)
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    for group in (cluster["spec"]["headGroupSpec"], workers):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        validator.validate(pod, version, strict=True)
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (volume,) = workers["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("folder", [".", "shards"])
def test_probes_and_ports_are_those_of_the_configuration(folder: str) -> None:
    schema = pytest.importorskip("reverb_writer_server.config.schema", reason="the server is not installed")
    config = schema.load(FOLDER / folder / "server.toml", {})
    (container,) = read(f"{folder}/statefulset.yaml")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"reverb": config.port, "http": config.http_port}
    assert {
        port["port"] for rule in read(f"{folder}/networkpolicy.yaml")["spec"]["ingress"] for port in rule["ports"]
    } == {*ports.values()}
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert config.bind == config.http_host == "0.0.0.0"  # noqa: S104  # or no other pod reaches it
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(config.checkpoints.directory.is_relative_to(mount) for mount in mounts)


@pytest.mark.parametrize("folder", [".", "shards"])
def test_pod_runs_as_the_user_of_its_image_and_may_write_only_its_volumes(folder: str) -> None:
    pod = read(f"{folder}/statefulset.yaml")["spec"]["template"]["spec"]
    (uid,) = re.findall(r"^USER (\d+)$", (ROOT / "docker" / "server.Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(uid)
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not pod["automountServiceAccountToken"]


def test_only_labelled_pods_reach_the_server_and_the_gateway_is_one() -> None:
    for folder in (".", "shards"):
        reverb = read(f"{folder}/networkpolicy.yaml")["spec"]["ingress"][0]["from"]
        assert reverb == [{"podSelector": {"matchLabels": {"replay-client": "true"}}}]
    assert read("gateway/deployment.yaml")["spec"]["template"]["metadata"]["labels"]["replay-client"] == "true"


def test_permissions_of_the_manifests_are_those_of_the_image() -> None:
    theirs = ROOT / "docker" / "gateway" / "permissions.txt"
    for folder in ("gateway", "shards-gateway"):
        assert (FOLDER / folder / "permissions.txt").read_text() == theirs.read_text()


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
