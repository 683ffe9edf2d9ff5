"""A second Docker engine on this machine: in a network namespace of its own, as on another host."""

import secrets
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.docker_engine import NoEngine, running_daemon

ADDRESS = "172.17.255.2"  # in the network of the first one's bridge
DATA = "second-data"


@contextmanager
def second_engine(first: dict[str, str], images: list[str]) -> Iterator[dict[str, str]]:
    """The environment in which ``docker`` reaches an engine at ``ADDRESS`` with the first one's
    ``images``. Raises NoEngine."""
    name = f"shoal-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder, _host(name):
        second = first | {"DOCKER_HOST": f"unix://{folder}/docker.sock"}
        within = ("nsenter", f"--net=/run/netns/{name}")
        own_network = ("--bip", "10.213.0.1/24")  # not the first one's
        with running_daemon(DATA, Path(folder), second, *own_network, within=within):
            _copy(images, first, second)
            yield second


@contextmanager
def _host(name: str) -> Iterator[None]:
    """A network namespace with a cable to the bridge of the first engine."""
    inside = ("ip", "-n", name)
    commands = [
        ("ip", "netns", "add", name),
        ("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name),
        ("ip", "link", "set", name, "master", "docker0", "up"),
        (*inside, "address", "add", f"{ADDRESS}/16", "dev", "eth0"),
        (*inside, "link", "set", "eth0", "up"),
        (*inside, "link", "set", "lo", "up"),
    ]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise NoEngine(f"{' '.join(command)}: {done.stderr.strip()}")
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _copy(images: list[str], first: dict[str, str], second: dict[str, str]) -> None:
    """Copies images that differ from an earlier run's."""
    for image in images:
        if _id(image, first) != _id(image, second):
            with subprocess.Popen(
                ["docker", "save", image], env=first, stdout=subprocess.PIPE
            ) as save:
                subprocess.run(["docker", "load", "-q"], env=second, stdin=save.stdout, check=True)


def _id(image: str, environment: dict[str, str]) -> str:
    command = ["docker", "image", "inspect", "-f", "{{.Id}}", image]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout
