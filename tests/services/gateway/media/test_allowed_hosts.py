"""Which URLs and addresses ``allowed-media-domains`` allows."""

import re

import pytest
from yarl import URL

from services.gateway.media.allowed_hosts import AllowedHosts
from shared.errors import ConfigError

NAMED = [
    "images.example", "minio:9000", "10.0.0.5:9000", "10.0.0.7", "172.18.0.0/16", "[fd00::5]:81",
    "::1", "168.63.129.17",
]  # fmt: skip
MINIO, ANYONE = URL("http://minio:9000/a.png"), URL("http://images.example/a.png")
PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.17.0.1", "192.168.0.1", "169.254.169.254",
    "100.64.0.1", "192.0.2.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::", "::1",
    "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::",
    "2002:a00:5::1", "2001:0:7f00:1::", "fe80::1", "fe80::1%eth0", "fec0::1", "168.63.129.16",
    "::ffff:168.63.129.16", "192.0.0.192", "192.88.99.1", "2002:c058:6301::1", "3fff::1",
    "3fff:fff::1", "fc00::1", "ff02::1", "2130706433", "0x7f000001", "127.1", "",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::"]


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example/a.png",
        "https://IMAGES.example:443/a.png?b#c",
        "https://images.example:80/a.png",
        "http://minio:9000/a.png",
        "http://10.0.0.5:9000/a.png",
        "http://10.0.0.7/a.png",
        "http://[::ffff:10.0.0.7]/a.png",
        "http://168.63.129.17/a.png",
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
        ("http://10.0.0.7:22/a.png", "does not name its host at port 22"),
        ("http://172.18.0.1/a.png", "does not name its host at port 80"),
        ("https://[::ffff:172.18.0.1]/a.png", "does not name its host at port 443"),
        ("http://172.18.0.1:9000/a.png", "does not name its host"),
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
    assert [each for each in PRIVATE if hosts.takes(ANYONE, each)] == []
    assert [each for each in PUBLIC if not hosts.takes(ANYONE, each)] == []


def test_named_hosts_have_the_named_addresses_and_networks() -> None:
    hosts = AllowedHosts(NAMED)
    for address in ("10.0.0.5", "::ffff:10.0.0.5", "10.0.0.7", "172.18.3.4", "::1"):
        assert hosts.takes(MINIO, address), address
    for address in ("172.19.0.1", "10.0.0.6", "fd00::5", "127.0.0.1"):
        assert not hosts.takes(MINIO, address), address
    assert not hosts.takes(ANYONE, "10.0.0.5"), "is named at another port"
    assert hosts.takes(URL("http://[fd00::5]:81/"), "fd00::5")


def test_any_host_has_no_named_address() -> None:
    hosts = AllowedHosts(["*", *NAMED])
    for address in ("10.0.0.7", "172.18.3.4", "::1"):
        assert hosts.takes(MINIO, address)
        assert not hosts.takes(URL("http://evil.example/"), address)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((each, "is not *, a host") for each in ("http://a", "a b", "*.a", "a/b", "a:x", "", "ü")),
        *((each, "is not *, a host") for each in ("10.0.0.1/8", "10.0.0.0/8:80", "[fd00::/8]:80")),
        *((each, "is not *, a host") for each in ("a..b", ".a", "a.", "-a", "a-.b")),
        *((each, "is not *, a host") for each in ("999.1.1.1", "127.1", "0x7f000001", "1:80")),
        ("a.example:99999", "has the port 99999; expected 1 to 65535"),
        ("a.example:0", "has the port 0; expected 1 to 65535"),
        ("::ffff:10.0.0.0/104", "expected their network in IPv4"),
        ("64:ff9b::/96", "expected their network in IPv4"),
        ("10.0.0.0/8", "expected a host too"),
    ],
)
def test_other_names_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match="allowed-media-domains: .*" + re.escape(text)):
        AllowedHosts([name])
