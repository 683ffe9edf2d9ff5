"""Pods of the chart as processes of this machine, with the environment of Kubernetes and the group
controller, but without either. A pod's address is a loopback address."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.harness.docker_engine import DOCKERFILE, ROOT
from cli.keys import write_keys
from tests.compose.helm import Object

NAMESPACE = "default"
RESTART_S = 0.5  # a kubelet restarts at once first, later with delays
READY_S = 120


def pods_of(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Name and template of one pod of each Deployment and of all pods of a LeaderWorkerSet's first
    group."""
    for each in objects:
        name = each["metadata"]["name"]
        if each["kind"] == "Deployment":
            yield f"{name}-x", each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            yield from group_of(each)


def group_of(workers: Object, group: int = 0) -> Iterator[tuple[str, Object]]:
    """Name and template of each pod, with the controller's variables before ours."""
    name, template = workers["metadata"]["name"], workers["spec"]["leaderWorkerTemplate"]
    for index in range(template["size"]):
        pod = template["workerTemplate" if index else "leaderTemplate"]
        (only,) = pod["spec"]["containers"]
        given = {
            "LWS_LEADER_ADDRESS": f"{name}-{group}.{name}.{NAMESPACE}",
            "LWS_GROUP_SIZE": str(template["size"]),
            "LWS_WORKER_INDEX": str(index),
        }
        env = [{"name": name, "value": value} for name, value in given.items()] + only["env"]
        spec = {**pod["spec"], "containers": [{**only, "env": env}]}
        yield f"{name}-{group}{(index and f'-{index}') or ''}", {**pod, "spec": spec}


def variables_of(template: Object, address: str) -> dict[str, str]:
    """The container's variables, expanded like the kubelet's, without those from Secrets."""
    found: dict[str, str] = {}
    for each in template["spec"]["containers"][0]["env"]:
        if "value" in each:
            found[each["name"]] = re.sub(
                r"\$\((\w+)\)", lambda name: found.get(name[1], name[0]), each["value"]
            )
        elif each["valueFrom"].get("fieldRef") == {"fieldPath": "status.podIP"}:
            found[each["name"]] = address
    return found


@dataclass
class Pod:
    """A pod: restarts its container until it is deleted."""

    name: str
    template: Object
    address: str
    root: Path  # of its file system
    names: dict[str, str]  # addresses by name
    codes: list[int] = field(default_factory=list)  # exit codes of its container
    is_deleted: bool = False
    _process: asyncio.subprocess.Process | None = None

    @property
    def container(self) -> Object:
        return self.template["spec"]["containers"][0]

    async def run(self) -> None:
        command, image_variables = _image(self.container["image"].partition(":")[0])
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("SHOAL_")},
            "SHOAL_MESH_DIR": str(self.root / "tmp" / "mesh"),
            **{name: self._here(text) for name, text in image_variables.items()},
            **{
                name: self._here(text)
                for name, text in variables_of(self.template, self.address).items()
            },
        }
        shoal = (sys.executable, "-c", "from cli.main import main; main()", command)
        while not self.is_deleted:
            process = await asyncio.create_subprocess_exec(*shoal, env=environment, cwd=ROOT)
            self._process = process
            if self.is_deleted:  # it was deleted meanwhile
                self.signal(signal.SIGTERM)
            self.codes.append(await process.wait())
            await asyncio.sleep(RESTART_S)

    def _here(self, text: str) -> str:
        """Translates a pod's variable to this machine's files, names and addresses."""
        if text.startswith("/"):
            return f"{self.root}{text}"
        text = text.replace("0.0.0.0", self.address).replace("*", self.address)
        for name, address in self.names.items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", address, text)
        return text

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        """The result of the readiness probe."""
        (port,) = [x["containerPort"] for x in self.container["ports"] if x["name"] == "admin"]
        path = self.container["readinessProbe"]["httpGet"]["path"]
        try:
            async with session.get(f"http://{self.address}:{port}{path}") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    def delete(self) -> None:
        self.is_deleted = True
        self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


class Cluster:
    """Pods of rendered ``objects``, with the model on the host as they require. ``subnet`` is for
    example 127.1.2."""

    def __init__(self, objects: list[Object], folder: Path, subnet: str) -> None:
        self.objects = objects
        self.pods: dict[str, Pod] = {}
        self._folder = folder
        self._subnet = subnet
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses: dict[str, str] = {}
        write_keys(folder / "secrets")
        for name, _ in pods_of(objects):
            self._addresses[name] = f"{subnet}.{len(self._addresses) + 1}"

    def start(self, name: str) -> None:
        """Starts a pod, at the address of any earlier one of its name."""
        template = dict(pods_of(self.objects))[name]
        root = self._folder / f"{name}.{len(list(self._folder.iterdir()))}"
        self._mount(template["spec"], root)
        pod = Pod(name, template, self._addresses[name], root, dict(self._names()))
        self.pods[name] = pod
        self._tasks[name] = asyncio.create_task(pod.run())

    def start_all(self) -> None:
        for name in self._addresses:
            self.start(name)

    def _names(self) -> Iterator[tuple[str, str]]:
        """Names of headless Services by selected pods, and names of a group's first pod."""
        templates = dict(pods_of(self.objects))
        for each in self.objects:
            if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None":
                wanted = each["spec"]["selector"].items()
                for name, template in templates.items():
                    if wanted <= template["metadata"]["labels"].items():
                        yield each["metadata"]["name"], self._addresses[name]
            elif each["kind"] == "LeaderWorkerSet":
                service = each["metadata"]["name"]
                yield f"{service}-0.{service}.{NAMESPACE}", self._addresses[f"{service}-0"]

    def _mount(self, spec: Object, root: Path) -> None:
        volumes = {each["name"]: each for each in spec["volumes"]}
        (root / "tmp").mkdir(parents=True)
        for mount in spec["containers"][0]["volumeMounts"]:
            volume, path = volumes[mount["name"]], Path(f"{root}{mount['mountPath']}")
            path.parent.mkdir(parents=True, exist_ok=True)
            if "hostPath" in volume:
                path.symlink_to(volume["hostPath"]["path"])
            elif "secret" in volume:
                kind = volume["secret"]["secretName"].removeprefix("shoal-keys-")
                path.symlink_to(self._folder / "secrets" / kind)
            elif "configMap" in volume:
                path.mkdir()
                for name, text in self._config_map(volume["configMap"]["name"]).items():
                    (path / name).write_text(text)

    def _config_map(self, name: str) -> dict[str, str]:
        (data,) = [
            each["data"]
            for each in self.objects
            if each["kind"] == "ConfigMap" and each["metadata"]["name"] == name
        ]
        return data

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_S), aiohttp.ClientSession() as session:
            for pod in self.pods.values():
                while not await pod.is_ready(session):
                    await asyncio.sleep(0.1)

    async def deleted(self, pods: Iterable[Pod]) -> None:
        """All pods are stopped at the same time, and killed after their grace period."""
        pods = list(pods)
        for pod in pods:
            pod.delete()
        for pod in pods:
            grace_s = pod.template["spec"]["terminationGracePeriodSeconds"]
            try:
                await asyncio.wait_for(asyncio.shield(self._tasks[pod.name]), grace_s)
            except TimeoutError:
                pod.signal(signal.SIGKILL)
                await self._tasks[pod.name]


@asynccontextmanager
async def running(objects: list[Object], folder: Path, subnet: str) -> AsyncIterator[Cluster]:
    """Starts all pods, and ends them afterwards."""
    cluster = Cluster(objects, folder, subnet)
    cluster.start_all()
    try:
        yield cluster
    finally:
        await cluster.deleted(cluster.pods.values())


def _image(name: str) -> tuple[str, dict[str, str]]:
    """The command and the settings of one of our images."""
    stages = {
        words[2]: text
        for text in DOCKERFILE.read_text().split("\nFROM ")[1:]
        if (words := text.split("\n")[0].split())[1] == "AS"
    }
    own = stages[name.removeprefix("shoal-")]
    (command,) = re.findall(r'^CMD \["(\w+)"\]', own, re.MULTILINE)
    pairs = re.findall(r"(SHOAL_\w+)=(\S+)", stages["runtime"] + own)
    return command, dict(pairs)
