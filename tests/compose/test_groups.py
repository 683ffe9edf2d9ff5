"""Workers with ranks on several pods: the rendered objects, and these pods at work."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.harness.checked_load import body_of, stream
from benchmarks.harness.docker_engine import ROOT
from shared.link.endpoint import PORTS
from shared.link.keys import public_path, secret_path
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig
from tests.compose.helm import Object, render
from tests.compose.pods import group_of, pods_of, running, variables_of
from tests.compose.test_chart import (
    LEAST,
    MOST,
    SCALED,
    assert_clean,
    component,
    example_of,
    of_kind,
    rules,
)

GROUPS: Object = {
    **LEAST,
    "settings": {"drain-timeout-s": 20, "tensor-parallel-size": 4},
    "worker": {"hosts": 2, "replicas": 3},
}
EPHEMERAL = range(32768, 61000)  # of Linux: /proc/sys/net/ipv4/ip_local_port_range
ADMIN = 9100


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(GROUPS)


def workers(objects: list[Object]) -> Object:
    (only,) = of_kind(objects, "LeaderWorkerSet").values()
    return only


def test_helm_finds_nothing_wrong_with_groups():
    assert_clean(GROUPS)


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_pods_and_all_else_of_groups_are_valid(objects: list[Object], version: str):
    validate = pytest.importorskip("kubernetes_validate").validate
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **template["metadata"]}}
        | {"spec": template["spec"]}
        for name, template in group_of(workers(objects), 2)
    ]
    others = [each for each in objects if each["kind"] != "LeaderWorkerSet"]
    assert len(pods) == 2
    assert len(others) >= 15
    for each in [*pods, *others]:
        validate(each, version, strict=True)


def test_a_group_takes_the_place_of_a_pod(objects: list[Object]):
    assert set(of_kind(objects, "Deployment")) == {
        f"chat-shoal-{service}" for service in ("gateway", "tokenizer", "scheduler")
    }
    spec = workers(objects)["spec"]
    assert spec["replicas"] == 3
    assert spec["leaderWorkerTemplate"]["size"] == 2
    assert "replicas" not in workers(render(MOST | GROUPS | {"worker": SCALED_GROUPS}))["spec"]


SCALED_GROUPS = {"hosts": 2, "autoscaling": {**SCALED, "prometheus": "http://prometheus:9090"}}


def test_the_example_of_the_documentation_is_taken():
    spec = workers(render(example_of("my-groups.yaml")))["spec"]
    assert spec["replicas"] == 2
    assert spec["leaderWorkerTemplate"]["size"] == 4


def test_groups_are_scaled_as_a_whole():
    objects = render(GROUPS | {"worker": SCALED_GROUPS})
    (scaled,) = of_kind(objects, "ScaledObject").values()
    target = scaled["spec"]["scaleTargetRef"]
    made = workers(objects)
    assert target == {"name": made["metadata"]["name"]} | {
        key: made[key] for key in ("apiVersion", "kind")
    }


def test_each_pod_reads_which_ranks_it_has_and_where_the_first_one_is(
    objects: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    file = tmp_path / "shoal.yml"
    (settings,) = of_kind(objects, "ConfigMap").values()
    file.write_text(settings["data"]["shoal.yml"])
    read = []
    for _, template in group_of(workers(objects), 1):
        with monkeypatch.context() as patch:
            for name, value in variables_of(template, "10.1.2.3").items():
                patch.setenv(name, value)
            patch.setenv("SHOAL_CONFIG", str(file))
            read.append(load_settings(WorkerConfig, [], "shoal worker"))
    assert not caplog.records, "no variable and no line was unknown"
    first, other = read
    assert [each.ranks_of_host for each in read] == [range(2), range(2, 4)]
    assert first.master_addr == "10.1.2.3"
    assert other.master_addr == "chat-shoal-worker-1.chat-shoal-worker.default"
    assert first.scheduler_address == ["tcp://chat-shoal-scheduler"]
    assert other.scheduler_address == [], "the first rank alone knows it"


def test_a_rank_sees_the_keys_of_a_worker(objects: list[Object]):
    for _, template in group_of(workers(objects)):
        (only,) = template["spec"]["containers"]
        mounts = {each["name"]: each["mountPath"] for each in only["volumeMounts"]}
        secrets = {
            each["secret"]["secretName"]: mounts[each["name"]]
            for each in template["spec"]["volumes"]
            if "secret" in each
        }
        assert secrets == {
            "shoal-keys-public": str(public_path(Path("/keys"), "worker").parent),
            "shoal-keys-worker": str(secret_path(Path("/keys"), "worker").parent),
        }


def test_ranks_reach_each_other_and_the_first_one_the_scheduler(objects: list[Object]):
    accepted: dict[tuple[Any, Any], range] = {}
    dialled: dict[tuple[Any, Any], range] = {}
    for policy in of_kind(objects, "NetworkPolicy").values():
        service = component(policy["spec"]["podSelector"]["matchLabels"])
        for rule, peer, _ in rules(policy["spec"]["ingress"], "from"):
            accepted[peer, service] = ports_of(rule)
        for rule, peer, _ in rules(policy["spec"]["egress"], "to"):
            dialled[service, peer] = ports_of(rule)
    ours = {"worker", "rank"}
    of_ranks = {pair: ports for pair, ports in accepted.items() if ours & set(pair)}
    assert of_ranks.pop(("worker", "scheduler")) == range(5572, 5573)
    assert of_ranks == {pair: dialled[pair] for pair in of_ranks}
    assert set(of_ranks) == {("worker", "rank"), ("rank", "worker"), ("rank", "rank")}
    for ports in of_ranks.values():
        assert {PORTS["worker", "worker"], PORTS["worker", "worker"] + 1} <= set(ports)
        assert set(EPHEMERAL) <= set(ports)
        assert ADMIN not in ports
    asked = {pair for pair in dialled if ours & set(pair)} - set(of_ranks)
    assert asked == {("worker", "scheduler"), ("worker", None), ("rank", None)}
    assert dialled["rank", None] == range(53, 54)


def ports_of(rule: Object) -> range:
    first = rule["ports"][0]
    return range(first["port"], first.get("endPort", first["port"]) + 1)


def test_one_budget_is_for_all_pods_of_all_groups(objects: list[Object]):
    budget = of_kind(objects, "PodDisruptionBudget")["chat-shoal-worker"]["spec"]
    selector = budget["selector"]
    (kinds,) = selector["matchExpressions"]
    for _, template in group_of(workers(objects)):
        labels = template["metadata"]["labels"]
        assert selector["matchLabels"].items() <= labels.items()
        assert labels[kinds["key"]] in kinds["values"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_names_of_groups_leave_room_for_the_suffix_of_kubernetes():
    objects = render(GROUPS, release="r" * 53)
    label = f"{workers(objects)['metadata']['name']}-999-{2**32 - 1}"  # controller-revision-hash
    assert len(label) <= 63


@pytest.mark.parametrize("settings", [{"tensor-parallel-size": 2}, {"pipeline-parallel-size": 2}])
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_may_share_more_memory_than_a_container_has(settings: Object, hosts: int):
    objects = render(GROUPS | {"settings": settings, "worker": {"hosts": hosts}})
    templates = [each for name, each in pods_of(objects) if "-worker-" in name]
    assert len(templates) == hosts
    for template in templates:
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in template["spec"]["volumes"]
        (only,) = template["spec"]["containers"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in only["volumeMounts"]


NUM_TOKENS = 150
AT_WORK: Object = {
    "model": {"volume": {"hostPath": {"path": str(ROOT / "models")}}, "path": "shoal-tiny"},
    "settings": {"drain-timeout-s": 30, "num-threads": 1, "dtype": "float32"},
    "gateway": {"replicas": 1},
}


@pytest.mark.parametrize(
    ("hosts", "setting"),
    [
        pytest.param(2, "tensor-parallel-size", marks=pytest.mark.slow),
        pytest.param(3, "pipeline-parallel-size", marks=pytest.mark.slow),
    ],
)
async def test_streams_end_whole_when_pods_of_a_group_are_told_to_stop(
    tmp_path: Path, hosts: int, setting: str
):
    """All at once, as in an update, and a further rank alone, as in an eviction."""
    values = AT_WORK | {"settings": AT_WORK["settings"] | {setting: hosts}}
    objects = render(values | {"worker": {"hosts": hosts}})
    names = [name for name, _ in group_of(workers(objects))]
    subnet = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    async with running(objects, tmp_path, subnet) as cluster:
        await cluster.until_ready()
        gateway = cluster.pods["chat-shoal-gateway-x"]
        text = await text_of(f"http://{gateway.address}:8000")

        for told in (names, names[1:2]):
            group = [cluster.pods[name] for name in names]
            begun = asyncio.Event()
            coming = asyncio.create_task(text_of(f"http://{gateway.address}:8000", begun))
            await begun.wait()
            await cluster.deleted(cluster.pods[name] for name in told)
            assert await coming == text
            assert [pod.codes for pod in group if pod.name in told] == [[0]] * len(told)
            for name in told:
                cluster.start(name)
            await cluster.until_ready()
            assert await text_of(f"http://{gateway.address}:8000") == text
        assert cluster.pods[names[0]].codes == [1], "it was not told to stop, and is started again"


async def text_of(url: str, begun: asyncio.Event | None = None) -> str:
    times_s: list[float] = []
    async with aiohttp.ClientSession() as session:
        coming = asyncio.create_task(stream(session, url, body_of(3, NUM_TOKENS), times_s))
        while begun is not None and not coming.done() and len(times_s) < 5:
            await asyncio.sleep(0.01)
        if begun is not None:
            begun.set()
        return await coming
