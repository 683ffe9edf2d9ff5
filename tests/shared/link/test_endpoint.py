"""Valid addresses in settings, and their default ports."""

import pytest

from shared.errors import ConfigError
from shared.link.endpoint import Endpoint, tcp_address
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from shared.settings.scheduler import SchedulerConfig
from shared.settings.serve import ServeConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import WorkerConfig


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://scheduler", "scheduler", None),
        ("tcp://scheduler.mesh.svc.cluster.local:6000", "scheduler.mesh.svc.cluster.local", 6000),
        ("tcp://tasks.tokenizer_1", "tasks.tokenizer_1", None),
        ("tcp://[fe80::1%eth0]:6000", "fe80::1%eth0", 6000),
        ("tcp://*:0", "*", 0),
    ],
)
def test_an_address_has_a_host_and_perhaps_a_port(text: str, host: str, port: int | None):
    assert Endpoint.parse(text) == (host, port)


def test_each_socket_has_its_port_and_one_that_is_given_moves_all_of_a_service():
    default, given, free = (Endpoint("x", port) for port in (None, 7000, 0))
    assert default.port_of("tokenizer", "gateway") == 5570
    assert default.port_of("scheduler", "tokenizer") == 5571
    assert default.port_of("scheduler", "worker") == 5572
    assert given.port_of("tokenizer", "gateway") == 7000
    assert given.port_of("scheduler", "tokenizer") == 7000
    assert given.port_of("scheduler", "worker") == 7001
    assert free.port_of("scheduler", "worker") == 0


def test_ipv6_stands_in_brackets():
    assert tcp_address("::1", 5570) == "tcp://[::1]:5570"
    assert tcp_address("10.0.0.3", 5570) == "tcp://10.0.0.3:5570"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "scheduler",
        "udp://x",
        "tcp://",
        "tcp://:5570",
        "tcp://x:",
        "tcp://x:65535",
        "tcp://x:y",
        "tcp://::1",
        "tcp://a b",
        "tcp://x:5570/",
        "tcp://*.x",
        "TCP://x",
        "tcp://x:1\n",
    ],
)
def test_a_malformed_address_is_refused_with_its_value_and_the_form(text: str):
    with pytest.raises(ConfigError) as caught:
        load_settings(
            SchedulerConfig, [f"--listen-address={text}", "--insecure-tcp"], "shoal scheduler"
        )
    assert f"listen-address: {text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["tcp://*", "tcp://x:0", "tcp://a,udp://b"])
def test_undialable_addresses_are_refused(text: str):
    for config in (TokenizerConfig, WorkerConfig):
        with pytest.raises(ConfigError, match=r"scheduler-address.*must be tcp://HOST"):
            load_settings(config, [f"--scheduler-address={text}", "--insecure-tcp"], "shoal")


def test_tcp_without_keys_must_be_asked_for():
    for config, flag in (
        (GatewayConfig, "--tokenizer-address=tcp://x"),
        (TokenizerConfig, "--listen-address=tcp://x"),
        (SchedulerConfig, "--listen-address=tcp://x"),
        (WorkerConfig, "--scheduler-address=tcp://x"),
    ):
        with pytest.raises(ConfigError, match=r"keys.*insecure-tcp"):
            load_settings(config, [flag], "shoal")
        load_settings(config, [flag, "--insecure-tcp"], "shoal")
        load_settings(config, [flag, "--keys=/keys"], "shoal")


def test_several_names_stand_between_commas(monkeypatch):
    monkeypatch.setenv("SHOAL_TOKENIZER_ADDRESS", "tcp://a,tcp://b:6000")
    monkeypatch.setenv("SHOAL_INSECURE_TCP", "true")
    assert load_settings(GatewayConfig, [], "shoal").tokenizer_address == [
        "tcp://a",
        "tcp://b:6000",
    ]


@pytest.mark.parametrize(
    "name", ["LISTEN_ADDRESS", "SCHEDULER_ADDRESS", "TOKENIZER_ADDRESS", "KEYS"]
)
def test_a_mesh_on_one_machine_has_no_addresses(monkeypatch, name: str):
    monkeypatch.setenv(f"SHOAL_{name}", "tcp://x")
    with pytest.raises(ConfigError, match="is a setting of one service alone"):
        load_settings(ServeConfig, [], "shoal serve")
