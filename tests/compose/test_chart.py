"""The Helm chart, rendered by the real helm: valid, and consistent with settings, images and
links."""

import math
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from benchmarks.harness.docker_engine import DOCKERFILE, ROOT
from cli.chart_schema import SCHEMA, with_settings
from cli.settings_help import SERVICES
from shared.link.endpoint import PORTS
from shared.link.keys import public_path, secret_path
from shared.settings.load import load_settings
from shared.version import VERSION
from shared.wire.messages import ServiceName
from tests.compose.exported import assert_exported
from tests.compose.helm import CHART, Object, Refused, render, run_helm

VOLUME = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
LEAST: Object = {"model": {"volume": VOLUME, "path": "qwen3-8b"}}
SCALED = {"enabled": True}
MOST: Object = {
    "model": {"volume": {"hostPath": {"path": "/data/hub"}}, "name": "Qwen/Qwen3-8B"},
    "image": {"prefix": "registry.example/shoal/", "tag": "0.1.0"},
    "settings": {
        "drain-timeout-s": 90.5,
        "max-model-len": 4096,
        "allowed-origins": ["https://page.example"],
        "tensor-parallel-size": 2,
        "speculative-config": {"method": "none"},
    },
    "secrets": {"apiKeys": "clients", "adminToken": "admin", "reasoningKey": "reasoning"},
    "ingress": {"enabled": True, "className": "nginx", "host": "x.example", "tlsSecret": "tls"},
    "gateway": {"autoscaling": SCALED, "nodeSelector": {"disk": "fast"}},
    "tokenizer": {"autoscaling": SCALED, "tolerations": [{"operator": "Exists"}]},
    "worker": {
        "gpus": 2,
        "runtimeClassName": "nvidia",
        "autoscaling": {**SCALED, "prometheus": "http://prometheus:9090"},
    },
    "encoder": {"replicas": 2},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
        "metrics": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "gatewayEgress": [{"ports": [{"port": 4318}]}],
    },
    "monitoring": {"podMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
}
# Objects of operators, without schemas in Kubernetes.
FOREIGN = {"PodMonitor", "PrometheusRule", "ScaledObject"}


def test_the_chart_has_the_version_of_its_images() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["version"] == VERSION


@pytest.fixture(scope="module", params=["least", "most"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(LEAST if request.param == "least" else MOST)


@pytest.fixture(scope="module")
def most() -> list[Object]:
    return render(MOST)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[Object]) -> dict[str, Object]:
    """The pods of each service, and of encoders, as the Deployment describes them."""
    found = of_kind(objects, "Deployment").values()
    return {component(each["spec"]["selector"]["matchLabels"]): each["spec"] for each in found}


def component(labels: dict[str, Any]) -> Any:
    return labels["app.kubernetes.io/component"]


def service_of(component: str) -> ServiceName:
    return "worker" if component == "encoder" else cast(ServiceName, component)


def container(deployment: Object) -> Object:
    (only,) = deployment["template"]["spec"]["containers"]
    return only


def variables(deployment: Object) -> dict[str, str]:
    """Values from a Secret are placeholders."""
    return {each["name"]: each.get("value", "x" * 32) for each in container(deployment)["env"]}


def test_helm_finds_nothing_wrong_with_the_chart():
    for values in (LEAST, MOST):
        assert_clean(values)


def assert_clean(values: Object) -> None:
    text = run_helm("lint", "--strict", str(CHART), "--values", "-", input=yaml.safe_dump(values))
    assert "0 chart(s) failed" in text


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_all_objects_are_valid(objects: list[Object], version: str):
    validate = pytest.importorskip("kubernetes_validate").validate
    ours = [each for each in objects if each["kind"] not in FOREIGN]
    assert len(ours) >= 15
    for each in ours:
        validate(each, version, strict=True)


def test_a_wrong_object_is_not_valid():
    library = pytest.importorskip("kubernetes_validate")
    (service, *_) = of_kind(render(LEAST), "Service").values()
    service["spec"]["ports"][0]["port"] = "http"
    with pytest.raises(library.ValidationError, match="'http' is not of type"):
        library.validate(service, "1.37", strict=True)


def test_the_schema_of_values_knows_the_settings_as_they_are() -> None:
    assert SCHEMA.read_text() == with_settings(SCHEMA.read_text()), (
        "the settings changed: run `make docs`"
    )


def test_services_read_their_settings_from_the_chart(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    file = tmp_path / "shoal.yml"
    (settings,) = of_kind(objects, "ConfigMap").values()
    file.write_text(settings["data"]["shoal.yml"])
    names = of_kind(objects, "Service")
    for name, deployment in pods(objects).items():
        service = service_of(name)
        with monkeypatch.context() as patch:
            for variable, value in variables(deployment).items():
                patch.setenv(variable, value)
            patch.setenv("SHOAL_CONFIG", str(file))
            config = load_settings(SERVICES[service], [], f"shoal {service}")
        drain_s = yaml.safe_load(file.read_text())["drain-timeout-s"]
        assert config.drain_timeout_s == drain_s
        for address in dialled(config):
            its = names[address.removeprefix("tcp://")]["spec"]
            assert its["clusterIP"] == "None"
            assert its["publishNotReadyAddresses"]
    assert not caplog.records, "no variable and no line was unknown"


def dialled(config: Any) -> list[str]:
    return [
        address
        for name in ("tokenizer_address", "scheduler_address", "encoder_address")
        for address in getattr(config, name, [])
    ]


def test_a_pod_sees_its_own_secret_key_where_its_service_looks_for_it(objects: list[Object]):
    for name, deployment in pods(objects).items():
        service = service_of(name)
        folder = Path(variables(deployment)["SHOAL_KEYS"])
        mounts = {each["name"]: each["mountPath"] for each in container(deployment)["volumeMounts"]}
        secrets = {
            each["secret"]["secretName"]: mounts[each["name"]]
            for each in deployment["template"]["spec"]["volumes"]
            if "secret" in each and each["secret"]["secretName"].startswith("shoal-keys-")
        }
        assert secrets == {
            "shoal-keys-public": str(public_path(folder, service).parent),
            f"shoal-keys-{service}": str(secret_path(folder, service).parent),
        }


def test_images_are_built_by_compose(most: list[Object]):
    built = {service["image"].split(":")[0] for service in compose("docker-compose.yml").values()}
    built |= {service["image"].split(":")[0] for service in compose("compose/gpu.yml").values()}
    for objects, prefix, tag in (
        (render(LEAST), "", "latest"),
        (most, "registry.example/shoal/", "0.1.0"),
    ):
        for deployment in pods(objects).values():
            name, _, its_tag = container(deployment)["image"].removeprefix(prefix).partition(":")
            assert name in built
            assert its_tag == tag
    assert "worker-gpu" in container(pods(most)["worker"])["image"]
    assert "worker-cpu" in container(pods(render(LEAST))["worker"])["image"]


def compose(file: str) -> Object:
    return yaml.safe_load((ROOT / file).read_text())["services"]


def test_pods_may_do_as_little_as_containers_of_the_stack(objects: list[Object]):
    (uid,) = map(int, re.findall(r"useradd --uid (\d+)", DOCKERFILE.read_text()))
    for deployment in pods(objects).values():
        pod, limits = deployment["template"]["spec"], container(deployment)["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == uid
        assert not pod["automountServiceAccountToken"]
        assert not pod["enableServiceLinks"], "SHOAL_PORT would be a Service's address"
        assert limits["readOnlyRootFilesystem"]
        assert not limits["allowPrivilegeEscalation"]
        assert limits["capabilities"] == {"drop": ["ALL"]}


def test_probes_match_the_health_checks_of_the_images(objects: list[Object]):
    stages = DOCKERFILE.read_text().split("\nFROM ")
    checks = {
        stage.split()[2]: re.findall(r'"probe", "(/\w+)"', stage)
        for stage in stages
        if " AS " in stage.split("\n")[0]
    }
    for service, deployment in pods(objects).items():
        (path,) = checks.get(service) or checks["runtime"]
        its = container(deployment)
        (admin,) = [each["containerPort"] for each in its["ports"] if each["name"] == "admin"]
        assert f"SHOAL_ADMIN_PORT={admin}" in DOCKERFILE.read_text()
        for probe in ("startupProbe", "livenessProbe"):
            assert its[probe]["httpGet"] == {"path": path, "port": "admin"}
        ready = path if service == "scheduler" else "/ready"
        assert its["readinessProbe"]["httpGet"] == {"path": ready, "port": "admin"}


@pytest.mark.parametrize("drain_s", [0, 29.5, 600])
def test_pods_are_killed_some_seconds_after_their_drain_must_be_over(drain_s: float):
    objects = render({**LEAST, "settings": {"drain-timeout-s": drain_s}})
    for service, deployment in pods(objects).items():
        hook = container(deployment).get("lifecycle", {}).get("preStop", {})
        _, pause = hook.get("exec", {}).get("command", ["sleep", "0"])
        spare = deployment["template"]["spec"]["terminationGracePeriodSeconds"] - int(pause)
        assert spare == math.ceil(drain_s) + 15
        assert (service == "gateway") == bool(hook), "others say themselves that they leave"


def test_network_policies_allow_the_links_of_the_mesh_and_no_others(objects: list[Object]):
    links: set[tuple[str, str, int]] = {
        (dialler, listener, port) for (listener, dialler), port in PORTS.items()
    }
    if "encoder" in pods(objects):
        links |= {("worker", "encoder", PORTS["worker", "worker"])}
    accepted, dialled, others = set(), set(), set()
    for policy in of_kind(objects, "NetworkPolicy").values():
        spec = policy["spec"]
        service = component(spec["podSelector"]["matchLabels"])
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        for rule, peer, ports in rules(spec["ingress"], "from"):
            accepted |= {(peer, service, port) for port in ports if peer}
            others |= {("in", service, port) for port in ports if not peer}
            assert rule.get("from") or ports == [8000]
        for _, peer, ports in rules(spec["egress"], "to"):
            dialled |= {(service, peer, port) for port in ports if peer}
            others |= {("out", service, port) for port in ports if not peer}
    assert accepted == dialled == links
    names = {("out", service, 53) for service in ("gateway", "tokenizer", "worker")}
    metrics = {("in", service, 9100) for service in (*SERVICES, "encoder")}
    assert others - metrics - {("out", "gateway", 4318)} == names | {("in", "gateway", 8000)}


def rules(given: list[Object], side: str) -> list[tuple[Object, str | None, list[int]]]:
    """Each rule with its peer service, if it is one of ours, and its ports."""
    found = []
    for rule in given:
        selectors = [each.get("podSelector", {}) for each in rule.get(side, [])]
        peers = [component(each["matchLabels"]) for each in selectors if each]
        assert len(peers) <= 1
        peer = peers[0] if peers else None
        found.append((rule, peer, [each["port"] for each in rule["ports"]]))
    return found


def test_without_a_peer_for_metrics_nobody_but_the_kubelet_gets_to_an_admin_port():
    policies = of_kind(render(LEAST), "NetworkPolicy").values()
    ports = [ports for each in policies for _, _, ports in rules(each["spec"]["ingress"], "from")]
    assert ports
    assert all(9100 not in each for each in ports)


def test_names_of_a_long_release_are_short_enough():
    objects = render(LEAST, release="r" * 53)
    assert all(len(each["metadata"]["name"]) <= 63 for each in objects)


def test_autoscaled_services_have_no_replicas_of_their_own(most: list[Object]):
    for service, deployment in pods(most).items():
        assert ("replicas" in deployment) == (service in ("scheduler", "encoder"))
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in most
               if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")]  # fmt: skip
    assert sorted(targets) == [f"chat-shoal-{name}" for name in ("gateway", "tokenizer", "worker")]


def test_workers_are_scaled_by_figures_that_the_scheduler_exports(most: list[Object]):
    (scaled,) = of_kind(most, "ScaledObject").values()
    (trigger,) = scaled["spec"]["triggers"]
    assert_exported(trigger["metadata"]["query"])
    (monitor,) = of_kind(most, "PodMonitor").values()
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component", "job=scheduler"
    (admin,) = monitor["spec"]["podMetricsEndpoints"]
    assert admin == {"port": "admin", "path": "/metrics"}


def test_alerts_match_the_stack(most: list[Object]):
    (rule,) = of_kind(most, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((ROOT / "compose/prometheus/rules.yml").read_text())


def test_a_worker_with_gpus_gets_them_and_makes_room_before_its_successor_comes(most: list[Object]):
    worker = pods(most)["worker"]
    assert container(worker)["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert worker["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    others = [pods(most)[service] for service in ("gateway", "tokenizer", "scheduler")]
    for each in [*others, pods(render(LEAST))["worker"]]:
        assert each["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_an_encoder_has_one_device_like_a_worker(most: list[Object]):
    encoder = pods(most)["encoder"]
    assert container(encoder)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container(encoder)["image"] == container(pods(most)["worker"])["image"]
    assert variables(encoder)["SHOAL_TENSOR_PARALLEL_SIZE"] == "1"
    without = render(LEAST)
    assert "encoder" not in pods(without)
    assert "SHOAL_ENCODER_ADDRESS" not in variables(pods(without)["worker"])


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"settings": {"max-model-length": 4096}}, "property max-model-length is not allowed"),
        ({"settings": {"block-size": 9999}}, "settings.block-size: .* less than or equal to 256"),
        ({"settings": {"port": 80}}, "property port is not allowed"),
        ({"settings": {"api-key": "secret"}}, "property api-key is not allowed"),
        ({"worker": {"gpu": 1}}, "worker: Additional property gpu is not allowed"),
        ({"gateway": {"replicas": -1}}, "gateway.replicas: .* greater than or equal to 0"),
        ({"worker": {"gpus": 2}}, "worker.gpus is 2 and settings.tensor-parallel-size is 1"),
        ({"worker": {"hosts": 0}}, "worker.hosts: .* greater than or equal to 1"),
        (
            {"worker": {"hosts": 2, "gpus": 2}},
            "worker.hosts is 2 and worker.gpus is 2: .* on CPUs only",
        ),
        (
            {"worker": {"hosts": 2}, "settings": {"pipeline-parallel-size": 3}},
            "worker.hosts is 2, and settings make 3 of a worker's ranks",
        ),
        ({"worker": {"hosts": 2}}, "worker.hosts is 2, and settings make 1 of a worker's ranks"),
        ({"settings": {"nnodes": 2}}, "property nnodes is not allowed"),
        ({"model": {"volume": {}, "path": "x"}}, "model.volume is empty"),
        ({"model": {"volume": VOLUME}}, "model.path and model.name are empty"),
        (
            {"model": {"volume": VOLUME, "path": "x", "name": "a/b"}},
            'model.path is "x" and model.name is "a/b"',
        ),
        ({"ingress": {"enabled": True}}, "ingress.host is empty"),
        ({"worker": {"autoscaling": SCALED}}, "worker.autoscaling.prometheus is empty"),
        ({"worker": {"autoscaling": {"min": 0}}}, "worker.autoscaling.min: .* or equal to 1"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(values: Object, text: str):
    with pytest.raises(Refused, match=text):
        render(LEAST | values)


def test_the_example_of_the_documentation_is_taken():
    worker = pods(render(example_of("my-values.yaml")))["worker"]
    assert worker["replicas"] == 2


def example_of(name: str) -> Object:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (example,) = re.findall(rf"```yaml\n(# {name}.*?)```", page, re.DOTALL)
    return yaml.safe_load(example)


def test_every_value_is_in_the_schema_and_has_a_default_of_its_kind():
    assert render(LEAST), "the schema closes every object, and helm checks the defaults"
    schema = yaml.safe_load(SCHEMA.read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert unset(schema, values) == {"global"}


def unset(schema: Object, values: Object, path: str = "") -> set[str]:
    """Names in the schema but not in the values, except settings."""
    found = set()
    for name, each in schema.get("properties", {}).items():
        if path + name == "settings":
            continue
        if name not in values:
            found.add(path + name)
        elif "properties" in each:
            found |= unset(each, values[name], f"{path}{name}.")
    return found
