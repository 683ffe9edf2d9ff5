"""Keeps one process per replica alive, and ends them in order."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from math import ceil

from cli.child import ASK_S, Child
from cli.exit_codes import WRONG
from cli.placement import choose_num_workers, num_gpus
from cli.run_directory import RunDirectory
from shared.errors import ConfigError, ShoalError
from shared.process.cores import num_cores, numa_nodes
from shared.process.placement import place
from shared.settings.environment import unread_variables, with_settings
from shared.settings.serve import ServeConfig
from shared.wire.messages import ServiceName

SERVICES: tuple[ServiceName, ...] = ("gateway", "tokenizer", "scheduler", "worker")
MAX_FAILED_STARTS = 3
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
MAX_DOUBLINGS = 10
POLL_S = 0.2
START_PATIENCE = 6  # loading may block the interpreter much longer than serving
KILL_AFTER_S = 5.0
SECRETS_OF_GATEWAYS = {"SHOAL_API_KEY", "SHOAL_API_KEY_FILE"}
TCP_OF_RANKS = {"SHOAL_KEYS", "SHOAL_INSECURE_TCP"}
HIDDEN: dict[ServiceName, set[str]] = {
    "gateway": TCP_OF_RANKS,
    "tokenizer": SECRETS_OF_GATEWAYS | TCP_OF_RANKS,
    "scheduler": SECRETS_OF_GATEWAYS | TCP_OF_RANKS,
    "worker": SECRETS_OF_GATEWAYS,
}
NOT_PASSED_ON = {
    "config",
    "admin_port",
    "gateways",
    "tokenizers",
    "schedulers",
    "workers",
    "liveness_timeout_s",
}


class StartFailedError(ShoalError):
    """A service cannot be started; the text holds its last words, ``code`` its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Supervisor:
    """Starts every replica at once, restarts dead ones, and drains from the gateways down. On a
    host with only further ranks of a worker it starts these alone. Raises ConfigError for more than
    one scheduler without workers."""

    def __init__(
        self, config: ServeConfig, directory: RunDirectory, on_line: Callable[[str], None]
    ) -> None:
        self._config = config
        self._directory = directory
        self._on_line = on_line
        self._environment = child_environment(config)
        self._workers = worker_environments(config)
        self._stop = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self.children: dict[str, Child] = {}  # by replica
        if config.schedulers > len(self._workers) + 1:
            raise ConfigError(
                f"schedulers: {config.schedulers}: each but one needs a worker of its own, and"
                f" there are {len(self._workers)} (workers)"
            )

    async def run(self, on_change: Callable[[], None]) -> None:
        """Runs until ``stop``. Raises StartFailedError for a service that never becomes ready."""
        self._on_change = on_change
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(self._drain())
            await asyncio.wait(
                [tasks.create_task(self._keep_alive(*each)) for each in self._replicas()]
            )
            draining.cancel()

    @property
    def _max_failed_starts(self) -> int | None:
        """None (no limit) with ranks on other hosts: a start may fail until these come back."""
        return MAX_FAILED_STARTS if self._config.nnodes == 1 else None

    def _replicas(self) -> Iterator[tuple[ServiceName, int]]:
        nums = {
            "gateway": self._config.gateways,
            "tokenizer": self._config.tokenizers,
            "scheduler": self._config.schedulers,
            "worker": len(self._workers),
        }
        for service in SERVICES[-1:] if self._config.node_rank else SERVICES:
            for index in range(nums[service]):
                yield service, index

    def stop(self) -> None:
        """Drains; a second call ends everything at once."""
        if self._stop.is_set():
            self._signal(self.children.values(), signal.SIGKILL)
        self._stop.set()

    async def _drain(self) -> None:
        """Gateways first: they finish open requests while everything below still runs."""
        await self._stop.wait()
        for service in SERVICES:
            children = [child for child in self.children.values() if child.service == service]
            self._signal(children, signal.SIGTERM)
            try:
                async with asyncio.timeout(self._config.drain_timeout_s + KILL_AFTER_S):
                    await asyncio.gather(*(child.wait() for child in children))
            except TimeoutError:
                self._signal(children, signal.SIGKILL)

    def _signal(self, children: Iterable[Child], number: signal.Signals) -> None:
        for child in children:
            child.signal(number)

    async def _keep_alive(self, service: ServiceName, index: int) -> None:
        """Restarts a replica for ever once it has been ready; before that at most
        ``MAX_FAILED_STARTS`` times."""
        replica = f"{service}-{index}"
        num_starts = num_failed = 0
        was_ever_ready = False
        while not self._stop.is_set():
            num_starts += 1
            child = Child(service, f"{index}.{num_starts}", self._directory.path)
            self.children[replica] = child
            code = await self._run(child, index)
            self._directory.sweep(service, child.instance)
            if self._stop.is_set():
                return
            was_ever_ready = was_ever_ready or child.was_ready
            num_failed = 0 if child.was_ready else num_failed + 1
            is_hopeless = code == WRONG or num_failed == self._max_failed_starts
            if is_hopeless and not was_ever_ready:
                raise StartFailedError(
                    child.last_words or f"{service} ended with code {code}", code
                )
            await self._pause(child, num_failed)

    async def _run(self, child: Child, index: int) -> int:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(child))
            code = await child.run(self._environment_of(child, index), self._on_line)
            watching.cancel()
        self._on_change()
        return code

    async def _watch(self, child: Child) -> None:
        """Kills a hanging process. Counts unanswered requests instead of seconds, since this
        process may have been suspended."""
        while child.num_unanswered < self._max_unanswered(child) or self._stop.is_set():
            asked_s = time.monotonic()
            await child.ask_status()
            self._on_change()
            next_s = asked_s + (ASK_S if child.was_ready else POLL_S)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        self._on_line(f"{child} did not answer {child.num_unanswered} times; it is killed")
        child.signal(signal.SIGKILL)

    def _max_unanswered(self, child: Child) -> int:
        timeout_s = self._config.liveness_timeout_s
        return ceil((timeout_s if child.was_ready else START_PATIENCE * timeout_s) / ASK_S)

    async def _pause(self, child: Child, num_failed: int) -> None:
        backoff_s = min(FIRST_BACKOFF_S * 2 ** min(num_failed, MAX_DOUBLINGS), MAX_BACKOFF_S)
        self._on_line(f"{child} {child.end_text}; again in {backoff_s:g} s")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), backoff_s)

    def _environment_of(self, child: Child, index: int) -> dict[str, str]:
        """Workers get one GPU each; a configured folder, or file of responses, may be shared with
        other meshes."""
        directory = self._directory.path
        own = self._workers[index] if child.service == "worker" else {}
        hidden = HIDDEN[child.service]
        return {
            "SHOAL_GPU_CLAIMS": str(directory / "gpus"),
            "SHOAL_RESPONSE_STORE": str(directory / "responses.db"),
            **{name: text for name, text in self._environment.items() if name not in hidden},
            **own,
            "SHOAL_MESH_DIR": str(directory),
            "SHOAL_INSTANCE": child.instance,
        }


def child_environment(config: ServeConfig) -> dict[str, str]:
    """This process's environment, with every given setting as ``SHOAL_…``.

    Gateways share the port.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name in unread_variables(ServeConfig.model_fields.keys()):  # already logged
        del environment[name]
    environment.pop("SHOAL_CONFIG", None)
    environment.pop("SHOAL_ADMIN_PORT", None)
    environment = with_settings(environment, config, config.model_fields_set - NOT_PASSED_ON)
    if config.gateways > 1:
        environment["SHOAL_REUSE_PORT"] = "true"
    return environment


def worker_environments(config: ServeConfig) -> list[dict[str, str]]:
    """The individual settings of each worker, except those given for all of them."""
    gpus = 0 if config.device == "cpu" else num_gpus()
    nodes, num_ranks = numa_nodes(), config.num_ranks
    if config.workers == "auto":
        num = max(1, choose_num_workers(gpus, nodes) // num_ranks)
    else:
        num = config.workers
    if num_ranks > 1:  # each rank has its own nodes
        nodes = []
    given = {f"SHOAL_{name.upper()}" for name in config.model_fields_set}
    return [
        {name: text for name, text in own.items() if name not in given}
        for own in place(num, gpus, nodes, num_cores())
    ]
