"""The local address given to ranks on other hosts, and their meeting point."""

import socket

import pytest

from services.worker.ranks.connect_hosts import address_of_first, address_towards
from services.worker.ranks.rank_group import HostsGroup
from shared.errors import ConfigError

ELSEWHERE = "192.0.2.7"  # reserved for documentation


def test_the_first_host_is_where_its_name_is_one_of_our_addresses() -> None:
    assert address_of_first("127.0.0.1") == address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(ConfigError, match=rf"master-addr: {ELSEWHERE} is not this host"):
        address_of_first(ELSEWHERE)


def test_a_name_that_means_nothing_is_refused() -> None:
    for choose in (address_of_first, address_towards):
        with pytest.raises(ConfigError, match=r"master-addr: no-such-host\.invalid"):
            choose("no-such-host.invalid")


def test_a_port_for_the_first_meeting_that_another_has_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"master-port: {port}, .* in use"):
            HostsGroup("127.0.0.1", port, "w", 0, 2)
