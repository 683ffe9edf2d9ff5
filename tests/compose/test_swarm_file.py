"""compose/swarm.yml agrees with docker-compose.yml."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.docker_engine import ROOT
from shared.link.keys import SERVICES, public_path, secret_path
from shared.wire.messages import ServiceName

Service = dict[str, Any]

KEYS = Path("/keys")


def read(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / path).read_text())
    return content


SWARM = read("compose/swarm.yml")
COMPOSE = read("docker-compose.yml")


@pytest.mark.parametrize("service", ["edge", *SERVICES])
def test_services_match_their_definition_in_compose(service: str):
    ours, other = SWARM["services"][service], COMPOSE["services"][service]
    assert ours["image"].replace("${IMAGE_PREFIX:-}", "") == other["image"]
    for name in ("networks", "init", "read_only", "cap_drop", "stop_grace_period"):
        assert ours[name] == other[name], name
    assert compared(ours) == compared(other)
    assert [each["target"] for each in ours["volumes"] if each["type"] == "tmpfs"] == ["/tmp"]


def compared(service: Service) -> dict[str, str]:
    """All variables except the model's location, the gateways' waits, and their host names: Swarm
    publishes the edge on every node."""
    others = {"SHOAL_MODEL", "SHOAL_READY_WAIT_S", "SHOAL_ALLOWED_HOSTS"}
    return {
        name: value for name, value in service.get("environment", {}).items() if name not in others
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_gets_its_own_secret_key_and_all_public_ones(service: ServiceName):
    ours = SWARM["services"][service]
    (secret,) = ours["secrets"]
    assert secret["target"] == str(secret_path(KEYS, service))
    assert f"{service}/{service}.secret" in SWARM["secrets"][secret["source"]]["file"]
    assert (secret["uid"], secret["mode"]) == ("10001", 0o400)
    assert {each["target"]: SWARM["configs"][each["source"]]["file"].split("/", 1)[1]
            for each in ours["configs"]} == {
        str(public_path(KEYS, each)): f"public/{each}.key" for each in SERVICES
    }  # fmt: skip


@pytest.mark.parametrize("service", SERVICES)
def test_there_are_as_many_of_a_service_as_the_same_variable_says(service: str):
    replicas = SWARM["services"][service]["deploy"]["replicas"]
    assert replicas == COMPOSE["services"][service]["scale"]


@pytest.mark.parametrize("service", SERVICES)
def test_names_find_every_task_and_new_ones_come_before_old_ones_leave(service: str):
    deploy = SWARM["services"][service]["deploy"]
    assert deploy["endpoint_mode"] == "dnsrr"
    assert deploy["update_config"]["order"] == deploy["rollback_config"]["order"] == "start-first"


def test_only_the_edge_is_published_and_the_mesh_reaches_nothing_outside():
    published = [name for name, each in SWARM["services"].items() if "ports" in each]
    assert published == ["edge"]
    assert SWARM["networks"]["mesh"]["internal"]


@pytest.mark.parametrize(
    ("name", "service", "variable"),
    [
        ("api-keys", "gateway", "SHOAL_API_KEY_FILE"),
        ("tls", "edge", "EDGE_CERTIFICATE"),
    ],
)
def test_files_beside_it_bring_a_secret_that_the_service_reads(
    name: str, service: str, variable: str
):
    added = read(f"compose/swarm-{name}.yml")
    ours, other = added["services"][service], read(f"compose/{name}.yml")["services"][service]
    assert ours["environment"].keys() == other["environment"].keys() == {variable}
    (secret,) = ours["secrets"]
    assert ours["environment"][variable] == f"/run/secrets/{secret['source']}"
    assert (secret["uid"], secret["mode"]) == ("10001", 0o400)
    assert added["secrets"].keys() == {secret["source"]}


def test_all_files_have_one_version_as_older_clients_ask_for():
    files = (ROOT / "compose").glob("swarm*.yml")
    assert [yaml.safe_load(file.read_text())["version"] for file in files] == ["3.8"] * 4
