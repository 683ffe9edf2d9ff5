"""A Docker engine with Compose: a running one, or one of our own.

Our own is Debian's, installed with its dependencies from Debian's mirrors: the engine (with its
data in the user's cache, so that a second run finds its layers), Compose from the next release, and
a base image made with debootstrap if no image registry can be reached.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "shoal-engine"
DOCKERFILE = ROOT / "compose" / "Dockerfile"
PACKAGES = ("docker.io", "containerd", "runc", "iptables", "debootstrap", "iproute2")
NEXT_RELEASE = "trixie"
BASE_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
START_S = 60
PULL_S = 60


class NoEngine(Exception):
    """No engine is available here; the message is the reason."""


@contextmanager
def running_engine() -> Iterator[dict[str, str]]:
    """The environment in which ``docker compose`` reaches an engine. Raises NoEngine."""
    if _works(dict(os.environ)):
        yield dict(os.environ)
        return
    _check_machine()
    _install_packages()
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as folder:
        environment = os.environ | {
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_CONFIG": str(_compose_plugin()),
        }
        try:
            with running_daemon("data", Path(folder), environment):
                yield environment
        finally:
            subprocess.run(["ip", "link", "delete", "docker0"], capture_output=True)


def provide_base_images(environment: dict[str, str]) -> None:
    """Pulls or makes the base images of the Dockerfile. Raises NoEngine, also if packages cannot be
    installed in them."""
    names = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    missing = [name for name in names if not _has_image(name, environment)]
    if missing:
        _install_packages()
        first, *others = missing
        _import_base(first, environment)
        for name in others:
            _run("docker", "tag", first, name, env=environment)
    look = ("python3", "-m", "pip", "download", "--quiet", "--no-deps", "--dest=/tmp", "msgspec")
    _run("docker", "run", "--rm", names[0], *look, env=environment)


def _works(environment: dict[str, str]) -> bool:
    if shutil.which("docker") is None:
        return False
    commands = (["docker", "version"], ["docker", "compose", "version"])
    return all(
        subprocess.run(each, env=environment, capture_output=True).returncode == 0
        for each in commands
    )


def _check_machine() -> None:
    if os.getuid() != 0:
        raise NoEngine("no Docker engine with Compose is running, and only root can start one")
    if shutil.which("apt-get") is None:
        raise NoEngine("no Docker engine with Compose is running, and this is not Debian")
    probe = ["ip", "link", "add", "shoal-probe", "type", "bridge"]
    if shutil.which("ip") and subprocess.run(probe, capture_output=True).returncode != 0:
        raise NoEngine("the kernel has no bridges for the engine's networks")
    subprocess.run(["ip", "link", "delete", "shoal-probe"], capture_output=True)


def _install_packages() -> None:
    missing = [each for each in PACKAGES if not _is_installed(each)]
    if missing:
        _run("apt-get", "update", "-qq")
        no_start = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        _run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing, env=no_start)
    if subprocess.run(["iptables", "-t", "nat", "-L", "-n"], capture_output=True).returncode != 0:
        raise NoEngine("the engine needs NAT by iptables, which this machine lacks")


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", package]
    return subprocess.run(query, capture_output=True, text=True).stdout.startswith("ii")


def _compose_plugin() -> Path:
    """A client configuration with Compose 2 of the next Debian release, one static binary, as
    plugin."""
    config = CACHE / "config"
    plugin = config / "cli-plugins" / "docker-compose"
    if plugin.exists():
        return config
    plugin.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = _apt_of_next_release(folder)
        _run("apt-get", *options, "update", "-qq")
        _run("apt-get", *options, "download", "docker-compose", cwd=folder)
        (package,) = folder.glob("docker-compose_*.deb")
        _run("dpkg", "-x", str(package), str(folder / "content"))
        shutil.copy(
            folder / "content/usr/libexec/docker/cli-plugins/docker-compose",
            plugin.with_suffix(".part"),
        )
    plugin.with_suffix(".part").rename(plugin)
    return config


def _apt_of_next_release(folder: Path) -> list[str]:
    """Options that make apt use only that release, without changes to the machine."""
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={keyring}] {_mirror()} {NEXT_RELEASE} main\n")
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True)
    places = {"Dir::Etc::sourcelist": sources, "Dir::State::Lists": lists}
    options = [f"-o{key}={value}" for key, value in places.items()]
    return [*options, "-oDir::Etc::sourceparts=-", "-oAPT::Sandbox::User=root"]


def _mirror() -> str:
    """This machine's Debian mirror."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]
    for file in files:
        text = file.read_text() if file.is_file() and file.suffix in (".list", ".sources") else ""
        for address in re.findall(r"^(?:URIs:|deb(?: \[.*\])?) +(\S+)", text, re.MULTILINE):
            if re.search(r"/debian/?$", address):
                return str(address)
    raise NoEngine("apt has no source of Debian")


@contextmanager
def running_daemon(
    data: str, folder: Path, environment: dict[str, str], *flags: str, within: tuple[str, ...] = ()
) -> Iterator[None]:
    """An engine with its data in the folder ``data`` of the cache and all else in ``folder``.
    ``within`` is a command prefix that starts it elsewhere, for example nsenter. Raises
    NoEngine."""
    command: list[str | Path] = [
        *(*within, "setpriv", "--pdeathsig", "TERM", "dockerd"),
        *("--data-root", CACHE / data, "--exec-root", folder / "exec"),
        *("--pidfile", folder / "dockerd.pid", "--host", environment["DOCKER_HOST"]),
        *flags,
    ]
    log_path = CACHE / f"{data}.log"
    with open(log_path, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _await_daemon(process, environment, log_path)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _await_daemon(
    process: subprocess.Popen[bytes], environment: dict[str, str], log_path: Path
) -> None:
    until_s = time.monotonic() + START_S
    while not _works(environment):
        if process.poll() is not None or time.monotonic() > until_s:
            raise NoEngine("the engine did not start: " + log_path.read_text()[-500:])
        time.sleep(0.2)


def _has_image(name: str, environment: dict[str, str]) -> bool:
    quiet: dict[str, Any] = {"env": environment, "capture_output": True}
    if subprocess.run(["docker", "image", "inspect", name], **quiet).returncode == 0:
        return True
    try:
        return subprocess.run(["docker", "pull", name], timeout=PULL_S, **quiet).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _import_base(name: str, environment: dict[str, str]) -> None:
    """A minimal Debian with Python and this machine's settings for pip and TLS."""
    (suite,) = re.findall("bookworm|trixie", name)
    with tempfile.TemporaryDirectory(prefix="shoal-base-", dir=CACHE) as folder:
        variant = ("--variant=minbase", f"--include={BASE_PACKAGES}")
        _run("debootstrap", *variant, suite, folder, _mirror())
        changes = [f"--change=ENV {change}" for change in _adapt(Path(folder))]
        for package in Path(folder).glob("var/cache/apt/archives/*.deb"):
            package.unlink()
        with (
            subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar,
            subprocess.Popen(
                ["docker", "import", *changes, "-", name],
                stdin=tar.stdout,
                env=environment,
                stdout=subprocess.DEVNULL,
            ) as docker,
        ):
            pass
    if tar.returncode or docker.returncode:
        raise NoEngine(
            f"no base image: tar ended with {tar.returncode}, docker import with"
            f" {docker.returncode}"
        )


def _adapt(base: Path) -> Iterator[str]:
    """Copies certificates and folders of wheels into ``base``; yields the variables for them."""
    bundle = Path("etc/ssl/certs/ca-certificates.crt")
    if ("/" / bundle).exists():
        shutil.copy("/" / bundle, base / bundle)
    command = [sys.executable, "-m", "pip", "config", "get"]
    for source in (":env:.find-links", "global.find-links"):
        found = subprocess.run([*command, source], capture_output=True, text=True)
        for wheels in filter(os.path.isdir, found.stdout.split()):
            shutil.copytree(wheels, base / wheels.lstrip("/"), dirs_exist_ok=True)
            yield f"PIP_FIND_LINKS={wheels}"
            return


def _run(*command: str, **options: Any) -> None:
    """Raises NoEngine with the end of the command's output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        what = (done.stdout + done.stderr).strip()[-800:]
        raise NoEngine(f"{' '.join(command[:3])} … ended with {done.returncode}: {what}")
