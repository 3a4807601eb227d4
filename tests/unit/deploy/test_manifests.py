"""The manifests and the unit say what the server can do, in words that Kubernetes and systemd know."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import reverb_writer as rw

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "kubernetes"
UNIT = ROOT / "deploy" / "systemd" / "reverb-writer-server.service"
VERSIONS = ("1.31", "1.34")

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def built(folder: Path = FOLDER) -> dict[str, Any]:
    """Return what kustomize makes of the manifests, by kind; of config maps the last."""
    line = [shutil.which("kubectl") or pytest.skip("kubectl is not installed"), "kustomize", str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(done.stdout)}


@pytest.fixture
def complete(tmp_path: Path) -> dict[str, Any]:
    """What kustomize makes of the manifests, the lines of the components uncommented."""
    copy = shutil.copytree(FOLDER, tmp_path / "deploy" / "kubernetes")
    shutil.copytree(ROOT / "docker" / "gateway", tmp_path / "docker" / "gateway")
    file = copy / "kustomization.yaml"
    text, count = re.subn(r"^# (components:|  - \w+  #)", r"\1", file.read_text(), flags=re.MULTILINE)
    assert count == 3
    file.write_text(text)
    return built(copy)


@pytest.mark.parametrize("version", VERSIONS)
def test_servers_alone_and_with_gateways_and_metrics_follow_the_schema(version: str, complete: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    alone = built()
    assert {*alone} == {"ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet"}
    known = {*complete} - {"Certificate", "ServiceMonitor"}  # kinds of cert-manager and of the Prometheus Operator
    for document in (*alone.values(), *(complete[kind] for kind in known)):
        validator.validate(document, version, strict=True)


def test_only_the_gateway_reaches_the_server_beside_it(complete: dict[str, Any]) -> None:
    server, gateway = complete["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    # The gateway calls the server as docker/gateway/run says for one namespace.
    assert {"name": "REVERB_WRITER__BIND", "value": "127.0.0.1"} in server["env"]
    assert {"name": "GATEWAY_SOURCE", "value": "127.0.0.2"} in gateway["env"]
    assert {port["port"] for port in complete["Service"]["spec"]["ports"]} == {8443, 8080}
    allowed = {port["port"] for rule in complete["NetworkPolicy"]["spec"]["ingress"] for port in rule["ports"]}
    assert allowed == {8443, 8080}


def test_every_manifest_belongs_to_a_kustomization() -> None:
    named = {*FOLDER.rglob("kustomization.yaml")}
    for file in [*named]:
        document = yaml.safe_load(file.read_text())
        paths = [*document["resources"], *(patch["path"] for patch in document.get("patches", ()))]
        named |= {file.parent / path for path in paths}
    assert named == {*FOLDER.rglob("*.yaml")}


def test_every_image_has_a_place_and_a_tag_that_does_not_move() -> None:
    kustomization = read("kustomization.yaml")
    text = "".join(map(Path.read_text, sorted(FOLDER.rglob("*.yaml"))))
    images = re.findall(r"image: (\S+)\n +imagePullPolicy: IfNotPresent", text)
    assert sorted(images) == sorted(image["name"] for image in kustomization["images"])
    assert {image["newTag"] for image in kustomization["images"]} == {rw.__version__}


def test_certificate_has_the_names_that_clients_of_any_namespace_use(complete: dict[str, Any]) -> None:
    service, namespace = complete["Service"]["metadata"]["name"], read("kustomization.yaml")["namespace"]
    names = {*complete["Certificate"]["spec"]["dnsNames"]}
    for suffix in ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local"):
        assert {f"{service}{suffix}", f"*.{service}{suffix}"} <= names


def test_server_reads_the_certificate_whose_end_is_a_metric(complete: dict[str, Any]) -> None:
    pod = complete["StatefulSet"]["spec"]["template"]["spec"]
    server = pod["containers"][0]
    (path,) = (entry["value"] for entry in server["env"] if entry["name"] == "REVERB_WRITER__GATEWAY__CERTIFICATE")
    (mount,) = (mount for mount in server["volumeMounts"] if Path(path).is_relative_to(mount["mountPath"]))
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["secret"]["secretName"] == complete["Certificate"]["spec"]["secretName"]
    assert volume["secret"]["items"] == [{"key": "tls.crt", "path": Path(path).name}]  # and not the key beside it


def test_prometheus_finds_the_metrics(complete: dict[str, Any]) -> None:
    monitor, service = complete["ServiceMonitor"]["spec"], complete["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_service_is_the_target_of_clients() -> None:
    service, servers = read("server/service.yaml"), read("server/statefulset.yaml")["spec"]
    assert service["spec"]["clusterIP"] == "None"  # its name has an address for each server
    assert service["spec"]["publishNotReadyAddresses"]  # so that clients wait for one that restores
    assert service["spec"]["selector"].items() <= servers["template"]["metadata"]["labels"].items()
    assert servers["serviceName"] == service["metadata"]["name"]
    assert servers["podManagementPolicy"] == "Parallel"  # a mended configuration reaches pods that are not ready
    (count,) = read("kustomization.yaml")["replicas"]
    assert count == {"name": service["metadata"]["name"], "count": servers["replicas"]}


def ray_documents() -> dict[tuple[str, str], Any]:
    """Return the documents of KubeRay's manifest, by kind and name."""
    documents = yaml.safe_load_all((ROOT / "deploy" / "kuberay" / "raycluster.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.mark.parametrize("version", VERSIONS)
def test_ray_cluster_follows_the_schema(version: str) -> None:
    """KubeRay's own kind has no schema here: its pods and all that stands beside it are checked."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    documents = ray_documents()
    cluster = documents.pop(("RayCluster", "replay"))
    for one in documents.values():
        validator.validate(one, version, strict=True)
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    for group in (cluster["spec"]["headGroupSpec"], workers):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": group["template"]}
        validator.validate(pod, version, strict=True)
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (volume,) = workers["template"]["spec"]["volumes"]
    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in documents


def test_control_store_of_ray_outlives_its_head() -> None:
    documents = ray_documents()
    options = documents["RayCluster", "replay"]["spec"]["gcsFaultToleranceOptions"]
    name, _, port = options["redisAddress"].partition(":")
    assert documents["Service", name]["spec"]["ports"] == [{"name": "redis", "port": int(port)}]
    redis = documents["StatefulSet", name]["spec"]
    (container,) = redis["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"] == options["redisPassword"]["valueFrom"]
    (mount,) = container["volumeMounts"]
    assert f"--dir {mount['mountPath']} --appendonly yes --requirepass" in container["command"][-1]
    assert mount["name"] in {claim["metadata"]["name"] for claim in redis["volumeClaimTemplates"]}
    labels = redis["template"]["metadata"]["labels"]
    policy = documents["NetworkPolicy", name]["spec"]
    assert documents["Service", name]["spec"]["selector"] == redis["selector"]["matchLabels"] == labels
    assert policy["podSelector"]["matchLabels"] == labels


def test_only_the_pods_of_ray_and_its_operator_reach_its_dashboard_and_clients_reach_the_shards() -> None:
    documents = ray_documents()
    head = documents["RayCluster", "replay"]["spec"]["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert "dashboard" not in {port["name"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    policy = documents["NetworkPolicy", "replay-ray"]["spec"]
    own = {"matchLabels": {"ray.io/cluster": "replay"}}  # KubeRay's label
    assert policy["podSelector"] == own
    ray, clients = policy["ingress"]
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    assert [one["podSelector"] for one in ray["from"]] == [own, operator]
    assert clients["from"] == [{"podSelector": {"matchLabels": {"replay-client": "true"}}}]
    (shards,) = clients["ports"]
    assert "port=8000" in (ROOT / "deploy" / "kuberay" / "raycluster.yaml").read_text()
    assert shards["port"] == 8000


def test_image_of_ray_is_that_of_its_dockerfile() -> None:
    text = (ROOT / "docker" / "ray.Dockerfile").read_text()
    cluster = ray_documents()["RayCluster", "replay"]["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == f"ray-replay:{rw.__version__}"
        assert pod["securityContext"]["runAsUser"] == int(re.findall(r"^USER (\d+)$", text, re.MULTILINE)[-1])
    (leave,) = workers["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert f"COPY docker/{Path(leave).name} {leave}" in text
    (version,) = re.findall(r"^ray\[default\]==(\S+)", (ROOT / "constraints" / "ray.txt").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == version


def variables_of_image() -> dict[str, str]:
    """Return the keys of the configuration that the server's image sets, as environment variables."""
    text = (ROOT / "docker" / "server.Dockerfile").read_text()
    return dict(re.findall(r"\b(REVERB_WRITER__\w+)=(\S+)", text))


def test_probes_and_ports_are_those_of_the_configuration() -> None:
    schema = pytest.importorskip("reverb_writer_server.config.schema", reason="the server is not installed")
    config = schema.load(FOLDER / "server.toml", variables_of_image())
    (container,) = read("server/statefulset.yaml")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"reverb": config.port, "http": config.http_port}
    rules = read("server/networkpolicy.yaml")["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {*ports.values()}
    assert rules[0]["from"] == [{"podSelector": {"matchLabels": {"replay-client": "true"}}}]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/readyz", "liveness": "/livez", "readiness": "/readyz"}
    assert config.bind == config.http_host == "0.0.0.0"  # noqa: S104  # or no other pod reaches it
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert any(config.checkpoints_directory.is_relative_to(mount) for mount in mounts)


def test_pod_runs_as_the_user_of_its_image_and_may_write_only_its_volumes() -> None:
    pod = read("server/statefulset.yaml")["spec"]["template"]["spec"]
    (uid,) = re.findall(r"^USER (\d+)$", (ROOT / "docker" / "server.Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(uid)
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    assert not pod["automountServiceAccountToken"]


def paths_in(container: dict[str, Any]) -> set[Path]:
    """Return the paths that variables of a container have."""
    return {Path(entry["value"]) for entry in container["env"] if entry.get("value", "").startswith("/")}


def test_variables_probes_and_mounts_of_every_pod_name_what_the_pod_has(complete: dict[str, Any]) -> None:
    servers, ray = complete["StatefulSet"]["spec"], ray_documents()
    cluster, redis = ray["RayCluster", "replay"]["spec"], ray["StatefulSet", "replay-redis"]["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (servers, redis, cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in group.get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in pod.get("volumes", ())} | claims
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        assert mounted == volumes
        for container in pod["containers"]:
            folders = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert all(any(path.is_relative_to(one) for one in folders) for path in paths_in(container))
            ports = {port["name"] for port in container.get("ports", ())}
            probes = [probe for name, probe in container.items() if name.endswith("Probe")]
            assert all((probe.get("httpGet") or probe["tcpSocket"])["port"] in ports for probe in probes)
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] or (
                container["name"] == "gateway"  # may take more than it needs
            )


def test_gateway_has_the_ports_and_the_files_that_its_variables_name(complete: dict[str, Any]) -> None:
    pod = complete["StatefulSet"]["spec"]["template"]["spec"]
    server, gateway = pod["containers"]
    told = {entry["name"]: entry["value"] for entry in gateway["env"]}
    assert gateway["ports"] == [{"name": "tls", "containerPort": int(told["GATEWAY_PORT"])}]
    assert told["REVERB_ADDRESS"] == f"127.0.0.1:{server['ports'][0]['containerPort']}"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    of = {mount["mountPath"]: volumes[mount["name"]] for mount in gateway["volumeMounts"]}
    secret = of[told["CERTIFICATES"]]["secret"]
    assert secret["secretName"] == complete["Certificate"]["spec"]["secretName"]
    assert {item["path"] for item in secret["items"]} == {"server.pem", "ca.crt"}
    folder, name = told["PERMISSIONS"].rsplit("/", 1)
    permissions = complete["ConfigMap"]  # the last of two
    assert permissions["metadata"]["name"] == of[folder]["configMap"]["name"]
    assert permissions["data"] == {name: (ROOT / "docker" / "gateway" / name).read_text()}


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity such as 8Gi, 8G or 4g."""
    number, unit = re.fullmatch(r"(\d+)([GMgm])i?", quantity).groups()  # type: ignore[union-attr]
    return int(number) << {"g": 30, "m": 20}[unit.lower()]


def memory_and_alert(manifest: str) -> tuple[int, int]:
    """Return the limit of a server's memory in a manifest, and the `memory.alert_bytes` that it sets."""
    if manifest == "kubernetes":
        (server,) = read("server/statefulset.yaml")["spec"]["template"]["spec"]["containers"]
        (alert,) = re.findall(r"alert_bytes = ([\d_]+)", (FOLDER / "server.toml").read_text())
        return bytes_of(server["resources"]["limits"]["memory"]), int(alert)
    if manifest == "kuberay":
        (workers,) = ray_documents()["RayCluster", "replay"]["spec"]["workerGroupSpecs"]
        (worker,) = workers["template"]["spec"]["containers"]
        told = {entry["name"]: entry["value"] for entry in worker["env"]}
        return bytes_of(worker["resources"]["limits"]["memory"]), int(told["REVERB_WRITER__MEMORY__ALERT_BYTES"])
    if manifest == "systemd":
        text = UNIT.read_text()
    else:
        replay = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["replay"]
        text = "\n".join([f"MemoryMax={replay['mem_limit']}", *replay["environment"]])
    (limit,) = re.findall(r"^MemoryMax=(?:\S+:-)?(\d+[Gg])", text, re.MULTILINE)
    (alert,) = re.findall(r"MEMORY__ALERT_BYTES=(?:\S+:-)?(\d+)", text)
    return bytes_of(limit), int(alert)


@pytest.mark.parametrize("manifest", ["compose", "kubernetes", "kuberay", "systemd"])
def test_server_writes_a_checkpoint_before_it_has_all_of_its_memory(manifest: str) -> None:
    """Slurm's script computes it: tests/integration/deploy/test_slurm.py."""
    limit, alert = memory_and_alert(manifest)
    assert 0.8 < alert / limit < 0.95


def test_every_service_of_compose_has_a_health_check_and_is_built_or_pulled() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    dockerfile = (ROOT / services["replay"]["build"]["dockerfile"]).read_text()
    assert re.search(r'^HEALTHCHECK .* CMD \["/usr/local/bin/healthcheck"\]$', dockerfile, re.MULTILINE)
    without = {name for name, service in services.items() if "healthcheck" not in service}
    once = {name for name, service in services.items() if service.get("healthcheck") == {"disable": True}}
    assert (without, once) == ({"replay"}, {"certs"})  # the image's; it runs once
    ours = {name for name, service in services.items() if service["image"].startswith("reverb-writer")}
    assert ours == {name for name, service in services.items() if "build" in service}


def test_configurations_to_start_from_differ_only_where_they_must() -> None:
    schema = pytest.importorskip("reverb_writer_server.config.schema", reason="the server is not installed")
    files = (ROOT / "docker" / "server.toml", FOLDER / "server.toml")
    image, kubernetes = (schema.load(file, variables_of_image()) for file in files)
    example = schema.load(ROOT / "examples" / "server.toml", {})
    kinds = ("port", "bind", "http", "checkpoints")
    names = [one.name for one in dataclasses.fields(example) if one.name.startswith(kinds)]

    def differing(one: Any, other: Any) -> set[str]:
        return {name for name in names if getattr(one, name) != getattr(other, name)}

    assert differing(image, kubernetes) == {"checkpoints_every_s"}  # the demo's is short
    assert differing(example, kubernetes) == {"bind", "http_host", "checkpoints_directory"}


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
