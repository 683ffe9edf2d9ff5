"""Which URLs and addresses ``allowed-media-domains`` allows."""

import pytest
from yarl import URL

from services.gateway.media.allowed_hosts import AllowedHosts
from shared.errors import ConfigError

NAMED = ["images.example", "minio:9000", "10.0.0.5:9000", "172.18.0.0/16", "[fd00::5]:81", "::1"]
PRIVATE = [
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.17.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "224.0.0.1",
    "255.255.255.255",
    "240.0.0.1",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
    "2002:a00:5::1",
    "2001:0:7f00:1::",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "fc00::1",
    "ff02::1",
    "2130706433",
    "0x7f000001",
    "127.1",
    "",
]
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "https://IMAGES.example:443/a.png?b#c",
        "https://images.example:80/a.png",
        "http://minio:9000/a.png",
        "http://10.0.0.5:9000/a.png",
        "http://172.18.255.1/a.png",
        "http://[::ffff:172.18.0.1]/a.png",
        "http://[fd00::5]:81/a.png",
        "https://[::1]/a.png",
    ],
)
def test_named_hosts_are_allowed(url: str) -> None:
    assert AllowedHosts(NAMED).refusal(URL(url)) == ""


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://images.example/a.png", "expected http or https"),
        ("//images.example/a.png", "expected http or https"),
        ("http://me@images.example/a.png", "it has a user or a password"),
        ("http://:secret@images.example/a.png", "it has a user or a password"),
        ("http://images.example:8080/a.png", "does not name its host at port 8080"),
        ("http://images.example./a.png", "does not name its host at port 80"),
        ("http://a.images.example/a.png", "does not name its host"),
        ("http://images.example.evil/a.png", "does not name its host"),
        ("http://minio/a.png", "does not name its host at port 80"),
        ("http://10.0.0.5/a.png", "does not name its host at port 80"),
        ("http://10.0.0.6:9000/a.png", "does not name its host"),
        ("http://172.18.0.1:22/a.png", "does not name its host at port 22"),
        ("http://0xac120001/a.png", "does not name its host"),
        ("http://2886860801/a.png", "does not name its host"),
        ("http://8.8.8.8/a.png", "does not name its host"),
    ],
)
def test_other_urls_are_refused_by_name(url: str, text: str) -> None:
    assert text in AllowedHosts(NAMED).refusal(URL(url))


def test_any_host_is_one_with_a_public_address_at_a_usual_port() -> None:
    hosts = AllowedHosts(["*"])
    for url in ("http://a.example/", "https://8.8.8.8/", "https://[2606:4700::1111]/"):
        assert hosts.refusal(URL(url)) == ""
    for url in ("http://a.example:8080/", "http://10.0.0.5/", "http://[::ffff:7f00:1]/"):
        assert "does not name its host" in hosts.refusal(URL(url))


@pytest.mark.parametrize("names", [["*"], ["images.example", "localhost"]])
def test_no_name_opens_a_private_address(names: list[str]) -> None:
    hosts = AllowedHosts(names)
    assert [each for each in PRIVATE if hosts.takes(each, 80)] == []
    assert [each for each in PUBLIC if not hosts.takes(each, 80)] == []


def test_named_addresses_are_open_at_their_ports() -> None:
    hosts = AllowedHosts(NAMED)
    assert hosts.takes("10.0.0.5", 9000)
    assert hosts.takes("::ffff:10.0.0.5", 9000)
    assert not hosts.takes("10.0.0.5", 9001)
    assert hosts.takes("172.18.3.4", 9000)
    assert hosts.takes("fd00::5", 81)
    assert hosts.takes("::1", 5)
    assert not hosts.takes("172.19.0.1", 80)


@pytest.mark.parametrize("name", ["http://a", "a b", "*.a", "10.0.0.1/8", "a/b", "a:x", "", "ü"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed-media-domains"):
        AllowedHosts([name])
