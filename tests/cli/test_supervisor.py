"""The rules of restarting, with fake processes."""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from benchmarks.processes import num_descriptors
from cli import supervisor as module
from cli.child import ASK_S, Child, exit_text
from cli.run_directory import RunDirectory
from cli.supervisor import StartFailedError, Supervisor, child_environment, worker_environments
from shared.errors import ConfigError
from shared.settings.gateway import GatewayConfig
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig
from shared.settings.speculative import SpeculativeConfig
from shared.wire.messages import ServiceName


class FakeChild:
    """Ends as in ``script``: for each start of its service (exit code, was ready)."""

    script: ClassVar[dict[str, list[tuple[int, bool]]]] = {}
    starts: ClassVar[list[str]] = []

    def __init__(self, service: str, instance: str, directory: Path) -> None:
        self.service, self.instance = service, instance
        self.was_ready = False
        self.num_unanswered = 0
        self.num_asks = 0
        self.last_words = f"last words of {service} {instance}"
        self.end_text = "ended"
        self.status: dict[str, str] = {}

    async def run(self, environment, on_line) -> int:
        self.starts.append(f"{self.service} {self.instance}")
        assert environment["SHOAL_INSTANCE"] == self.instance
        script = self.script.get(self.service, [])
        if not script:
            await asyncio.Event().wait()
        code, self.was_ready = script.pop(0)
        return code

    async def ask_status(self) -> None:
        self.num_asks += 1

    def signal(self, number) -> None:
        pass

    async def wait(self) -> None:
        pass


@pytest.fixture
def supervisor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Supervisor:
    """Takes its settings from its parameter, if any."""
    monkeypatch.setattr(module, "Child", FakeChild)
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(FakeChild, "script", {})
    monkeypatch.setattr(FakeChild, "starts", [])
    config = ServeConfig(mesh_dir=tmp_path, **getattr(request, "param", {}))
    return Supervisor(config, RunDirectory(tmp_path), lambda line: None)


async def run(supervisor: Supervisor) -> None:
    await asyncio.wait_for(supervisor.run(lambda: None), 10)


async def test_three_failures_before_it_was_ever_ready_end_everything(supervisor: Supervisor):
    FakeChild.script = {"worker": [(1, False), (-9, False), (1, False)]}
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailedError, match=r"words of worker 0\.3")):
        await run(supervisor)


async def test_a_wrong_setting_ends_everything_at_once(supervisor: Supervisor):
    FakeChild.script = {"gateway": [(2, False)]}
    with pytest.RaisesGroup(pytest.RaisesExc(StartFailedError, match=r"words of gateway 0\.1")):
        await run(supervisor)


async def test_a_child_that_was_ever_ready_is_always_restarted(supervisor: Supervisor):
    FakeChild.script = {"worker": [(-9, True), *[(2, False), (1, False)] * 3]}
    running = asyncio.create_task(run(supervisor))
    while FakeChild.script["worker"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert not running.done()
    assert [each for each in FakeChild.starts if "worker" in each] == [
        f"worker 0.{number}" for number in range(1, 9)
    ]
    running.cancel()


async def test_a_thousand_failed_starts_do_not_end_the_supervisor(
    supervisor: Supervisor, monkeypatch
):
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.0)
    FakeChild.script = {"worker": [(-9, True), *[(1, False)] * 1100]}
    running = asyncio.create_task(run(supervisor))
    while FakeChild.script["worker"]:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


@contextmanager
def files_limited_to(num: int) -> Iterator[None]:
    """No file above the number ``num`` can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


READY = "import os, time; os.write(int(os.environ['SHOAL_SUPERVISOR_FD']), b'r'); time.sleep(600)"


async def test_a_process_that_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch):
    """Not even its predecessor's sockets can be listed."""
    monkeypatch.setattr(Child, "_start", lambda self, *payload: start_script(READY, *payload))
    lines: list[str] = []
    supervisor = Supervisor(
        ServeConfig(mesh_dir=tmp_path), RunDirectory(tmp_path), lambda line: lines.append(line)
    )
    running = asyncio.create_task(run(supervisor))
    worker = await next_worker(supervisor, "worker 0.1")
    assert worker._process is not None
    with files_limited_to(3):
        worker.signal(signal.SIGKILL)
        await until(lambda: lines and "cannot be started" in lines[-1])
    assert lines[-1] == "worker 0.2 cannot be started: Too many open files; again in 0.4 s"
    assert worker.was_ready
    await next_worker(supervisor, "worker 0.3")
    assert not running.done()
    supervisor.stop()
    supervisor.stop()
    await running


async def next_worker(supervisor: Supervisor, name: str) -> Child:
    """Returns it when it runs and was ready."""
    await until(lambda: str(supervisor.children.get("worker-0")) == name)
    child = supervisor.children["worker-0"]
    await until(lambda: child._is_running)
    while not child.was_ready:
        child._read_ready()
        await asyncio.sleep(0.01)
    return child


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_every_way_of_failing_to_start_a_process_is_an_end_of_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Child, "_start", lambda self, *_: start_script("print('started')"))
    num_files = os.dup(0)
    os.close(num_files)
    codes, texts = [], set()
    for num_more in range(20):
        child = Child("worker", f"0.{num_more}", tmp_path)
        with files_limited_to(num_files + num_more):
            codes.append(await asyncio.wait_for(child.run({}, lambda line: None), 10))
        texts.add(child.end_text)
        await asyncio.wait_for(child.wait(), 1)
    assert codes[0] == 1
    assert codes == sorted(codes, reverse=True)
    assert codes[-1] == 0
    assert texts == {"cannot be started: Too many open files", "ended with exit code 0"}


async def test_without_a_thread_to_wait_in_a_start_has_failed(tmp_path: Path, monkeypatch):
    async def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_thread)
    child = Child("worker", "0.1", tmp_path)
    assert await child.run({}, lambda line: None) == 1
    assert child.end_text == "cannot be started: Resource temporarily unavailable"
    assert child.last_words.startswith("shoal worker: cannot be started: ")


@pytest.mark.parametrize(("was_ready", "max_unanswered"), [(True, 10), (False, 60)])
async def test_a_hanging_child_is_killed_even_while_it_starts(
    supervisor: Supervisor, monkeypatch, was_ready: bool, max_unanswered: int
):
    monkeypatch.setattr(module, "POLL_S", 0.001)
    ask_s = 1e-9 if was_ready else ASK_S
    monkeypatch.setattr(module, "ASK_S", ask_s)
    supervisor._config = supervisor._config.model_copy(update={"liveness_timeout_s": 10 * ask_s})
    killed_after: list[int] = []

    async def ask_status(self: FakeChild) -> None:
        self.was_ready = was_ready
        self.num_unanswered += 1

    monkeypatch.setattr(FakeChild, "ask_status", ask_status)
    monkeypatch.setattr(
        FakeChild, "signal", lambda self, _: killed_after.append(self.num_unanswered)
    )
    running = asyncio.create_task(run(supervisor))
    while len(killed_after) < 5:
        await asyncio.sleep(0.01)
    assert set(killed_after) == {max_unanswered}
    running.cancel()


async def test_a_ready_child_is_asked_less_often(supervisor: Supervisor, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.001)
    monkeypatch.setattr(module, "ASK_S", 1000)
    running = asyncio.create_task(run(supervisor))
    while len(supervisor.children) < 5:
        await asyncio.sleep(0)
    child: Any = supervisor.children["worker-0"]
    while child.num_asks < 4:
        await asyncio.sleep(0.01)
    child.was_ready = True
    num_asks = child.num_asks
    await asyncio.sleep(0.1)
    assert child.num_asks <= num_asks + 1
    running.cancel()


@pytest.mark.parametrize("supervisor", [{"gateways": 2, "workers": 3}], indirect=True)
async def test_every_replica_is_started_and_restarted_for_itself(supervisor: Supervisor):
    FakeChild.script = {"gateway": [(1, True)]}
    running = asyncio.create_task(run(supervisor))
    async with asyncio.timeout(10):
        while len(FakeChild.starts) < 9:
            await asyncio.sleep(0.01)
    gateway = "gateway-0" if "gateway 0.2" in FakeChild.starts else "gateway-1"
    assert set(supervisor.children) == {
        *("gateway-0", "gateway-1", "tokenizer-0", "scheduler-0", "scheduler-1"),
        *("worker-0", "worker-1", "worker-2"),
    }
    assert supervisor.children[gateway].instance.endswith(".2")
    running.cancel()


def test_each_scheduler_but_one_needs_a_worker(tmp_path: Path):
    Supervisor(ServeConfig(mesh_dir=tmp_path), RunDirectory(tmp_path), print)
    config = ServeConfig(mesh_dir=tmp_path, schedulers=4, workers=2)
    text = r"schedulers: 4: each but one needs a worker of its own, and there are 2 \(workers\)"
    with pytest.raises(ConfigError, match=text):
        Supervisor(config, RunDirectory(tmp_path), print)


def test_replicas_share_the_port_and_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    config = ServeConfig(gateways=2, schedulers=2, workers=3, device="cpu")
    environment = child_environment(config)
    assert environment["SHOAL_REUSE_PORT"] == "true"
    assert not {"SHOAL_GATEWAYS", "SHOAL_SCHEDULERS", "SHOAL_WORKERS"} & environment.keys()
    assert [each["SHOAL_NUM_THREADS"] for each in worker_environments(config)] == ["2"] * 3
    given = ServeConfig(workers=3, num_threads=4)
    assert child_environment(given)["SHOAL_NUM_THREADS"] == "4"
    assert not any("SHOAL_NUM_THREADS" in each for each in worker_environments(given))
    assert "SHOAL_REUSE_PORT" not in child_environment(ServeConfig())


def test_a_host_with_more_ranks_of_a_worker_has_nothing_else(tmp_path: Path):
    config = ServeConfig(
        tensor_parallel_size=4, nnodes=2, node_rank=1, master_addr="h", keys=tmp_path
    )
    supervisor = Supervisor(config, RunDirectory(tmp_path), print)
    assert list(supervisor._replicas()) == [("worker", 0)]
    for service in ("gateway", "worker"):
        environment = supervisor._environment_of(Child(service, "0.1", tmp_path), 0)
        assert ("SHOAL_KEYS" in environment) == (service == "worker")


def test_keys_reach_the_gateways_and_no_other_service(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", "one,two")
    config = load_settings(ServeConfig, ["--api-key-file", "/run/secrets/keys"], "shoal serve")
    supervisor = Supervisor(config, RunDirectory(tmp_path), print)
    for service in ("gateway", "tokenizer", "scheduler", "worker"):
        environment = supervisor._environment_of(Child(service, "0.1", tmp_path), 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", environment)
            passed = load_settings(GatewayConfig, [], "shoal gateway")
        keys = [key.get_secret_value() for key in passed.api_key]
        assert keys == (["one", "two"] if service == "gateway" else [])
        assert (passed.api_key_file is not None) == (service == "gateway")


def test_the_token_of_admin_ports_reaches_every_service(tmp_path: Path, monkeypatch):
    config = load_settings(ServeConfig, ["--admin-token", "one"], "shoal serve")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", child_environment(config))
        passed = load_settings(GatewayConfig, [], "shoal gateway")
    assert passed.admin_token is not None
    assert passed.admin_token.get_secret_value() == "one"


@pytest.mark.parametrize(
    ("service", "name", "own"),
    [("worker", "gpu_claims", "gpus"), ("gateway", "response_store", "responses.db")],
)
def test_replicas_share_a_path_of_one_serve_or_a_given_one(
    tmp_path: Path, service: ServiceName, name: str, own: str
):
    directory = RunDirectory(tmp_path)
    settings: Any
    for settings, path in (({}, directory.path / own), ({name: "/given"}, "/given")):
        config = ServeConfig(mesh_dir=tmp_path, workers=2, gateways=2, **settings)
        supervisor = Supervisor(config, directory, print)
        for index in range(2):
            child = Child(service, f"{index}.1", directory.path)
            environment = supervisor._environment_of(child, index)
            assert environment[f"SHOAL_{name.upper()}"] == str(path)


async def test_a_stop_reaches_a_process_that_is_only_being_started(tmp_path: Path):
    supervisor = Supervisor(ServeConfig(mesh_dir=tmp_path), RunDirectory(tmp_path), print)
    running = asyncio.create_task(run(supervisor))
    while len(supervisor.children) < 5:
        await asyncio.sleep(0)
    assert any(child._process is None for child in supervisor.children.values())
    supervisor.stop()
    supervisor.stop()
    await running


async def test_a_signal_to_a_killed_process_leaves_its_exit_code(tmp_path: Path, monkeypatch):
    async def start(self: Child, environment: dict[str, str], inherited: int) -> Any:
        return await asyncio.create_subprocess_exec("sleep", "60", stdout=asyncio.subprocess.PIPE)

    monkeypatch.setattr(Child, "_start", start)
    for _ in range(10):
        child = Child("gateway", "0.1", tmp_path)
        running = asyncio.create_task(child.run({}, lambda line: None))
        while child._process is None:
            await asyncio.sleep(0.001)
        child.signal(signal.SIGKILL)
        for _ in range(2000):
            child.signal(signal.SIGTERM)
        assert await running == -signal.SIGKILL


async def test_a_line_without_end_does_not_harm_the_supervisor(tmp_path: Path, monkeypatch):
    child = Child("worker", "0", tmp_path)
    script = "import sys; sys.stdout.write('x' * 300_000 + '\\nlast words')"
    monkeypatch.setattr(Child, "_start", lambda self, *_: start_script(script))
    lines: list[str] = []
    assert await asyncio.wait_for(child.run({}, lines.append), 10) == 0
    assert sum(map(len, lines)) == 300_010
    assert child.last_words == "last words"


async def test_an_error_of_several_lines_is_kept_whole(tmp_path: Path, monkeypatch):
    child = Child("worker", "0", tmp_path)
    script = "print('starting\\nshoal worker: model: not\\n  this\\n\\n  nor that')"
    monkeypatch.setattr(Child, "_start", lambda self, *_: start_script(script))
    await asyncio.wait_for(child.run({}, lambda line: None), 10)
    assert child.last_words == "shoal worker: model: not\n  this\n\n  nor that"


async def start_script(
    script: str, environment: dict[str, str] | None = None, inherited: int | None = None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script),
        env=os.environ | (environment or {}),
        pass_fds=() if inherited is None else (inherited,),
        stdout=asyncio.subprocess.PIPE,
    )


READY_AND_GONE = """
import asyncio, sys
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import Heartbeat, State
from shared.process.service import main

class Service:
    state = State.NOT_READY
    def __init__(self, config): pass
    def status(self): return Heartbeat(self.state, "", 0, 0)
    async def run(self):
        self.state = State[STATE]
        await asyncio.sleep(0.2)
        raise RuntimeError("and gone")

main("scheduler", SchedulerConfig, Service)
"""


@pytest.mark.parametrize("state", ["READY", "NOT_READY"])
async def test_a_child_that_was_ready_for_a_moment_counts_as_ready_without_a_probe(
    tmp_path: Path, monkeypatch, state: str
):
    child = Child("scheduler", "0.1", tmp_path)
    script = READY_AND_GONE.replace("STATE]", f"{state!r}]")
    monkeypatch.setattr(Child, "_start", lambda self, *payload: start_script(script, *payload))
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    environment = {"SHOAL_MESH_DIR": str(tmp_path), "SHOAL_INSTANCE": "0.1"}
    assert await asyncio.wait_for(child.run(environment, lambda line: None), 60) == 1
    assert child.was_ready == (state == "READY")


async def test_a_child_is_asked_over_one_connection(tmp_path: Path, monkeypatch):
    child = Child("scheduler", "0.1", tmp_path)
    monkeypatch.setattr(
        Child, "_start", lambda self, *_: start_script("import time; time.sleep(600)")
    )
    running = asyncio.create_task(child.run({}, lambda line: None))
    connections: list[object] = []

    async def status(request: web.Request) -> web.Response:
        connections.append(request.transport)
        return web.json_response({"state": "ready", "reason": "", "pid": len(connections)})

    app = web.Application()
    app.router.add_get("/status", status)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(child._admin)).start()
    while len(connections) < 5:
        await child.ask_status()
        await asyncio.sleep(0.01)
    assert len(set(connections)) == 1
    assert child.status["pid"] == 5
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()


async def test_a_child_not_asked_for_lack_of_files_counts_as_alive(tmp_path: Path, monkeypatch):
    child = Child("scheduler", "0.1", tmp_path)
    monkeypatch.setattr(
        Child, "_start", lambda self, *_: start_script("import time; time.sleep(600)")
    )
    running = asyncio.create_task(child.run({}, lambda line: None))
    await until(lambda: child._is_running)
    child.was_ready = True
    with files_limited_to(3):
        await child.ask_status()
    assert child.num_unanswered == 0
    await child.ask_status()
    assert child.num_unanswered == 1, "nobody listens"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


SPIN = "import time; end_s = time.monotonic() + 60\nwhile time.monotonic() < end_s: pass"


async def test_a_child_without_processor_time_counts_as_alive(tmp_path: Path, monkeypatch):
    """A process of the lowest priority shares a processor with one of the default priority."""
    child = Child("scheduler", "0.1", tmp_path)
    monkeypatch.setattr(Child, "_start", lambda self, *_: start_script(SPIN))
    running = asyncio.create_task(child.run({}, lambda line: None))
    await until(lambda: child._is_running)
    assert child._process is not None
    pid, core = child._process.pid, min(os.sched_getaffinity(0))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(child._admin))
        silent.listen()
        busy = await start_script(SPIN)
        try:
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
            for each in (pid, busy.pid):
                os.sched_setaffinity(each, {core})
            await child.ask_status()
            assert child.num_unanswered == 0
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
            child.signal(signal.SIGSTOP)
            await until(lambda: ") T " in Path(f"/proc/{pid}/stat").read_text())
            await child.ask_status()
            assert child.num_unanswered == 1, "it hangs"
        finally:
            busy.kill()
            running.cancel()
            await asyncio.gather(running, busy.wait(), return_exceptions=True)


def test_a_directory_of_the_dead_is_swept_and_one_of_the_living_is_not(tmp_path: Path):
    dead = RunDirectory(tmp_path)
    (dead.path / "worker-0.sock").touch()
    os.close(dead._lock)
    (tmp_path / "not-ours").mkdir()
    living = RunDirectory(tmp_path)
    assert not dead.path.exists()
    num_before = num_descriptors(os.getpid())
    again = RunDirectory(tmp_path)
    assert set(tmp_path.iterdir()) == {living.path, again.path, tmp_path / "not-ours"}
    assert again.path.stat().st_mode & 0o777 == 0o700
    again.remove()
    assert not again.path.exists()
    assert num_descriptors(os.getpid()) == num_before


def test_the_sockets_of_one_process_are_swept_and_no_others(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    swept = {"scheduler.workers-0.1.sock", "scheduler.tokenizers-0.1.sock",
             "admin.scheduler-0.1.sock"}  # fmt: skip
    kept = {"worker-0.1.sock", "admin.worker-0.1.sock", "scheduler.workers-0.2.sock"}
    for name in swept | kept:
        (directory.path / name).touch()
    directory.sweep("scheduler", "0.1")
    assert {path.name for path in directory.path.iterdir()} == kept


def test_a_speculative_config_reaches_the_worker_as_it_was_given() -> None:
    given = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    environment = child_environment(ServeConfig(speculative_config=given))
    found = SpeculativeConfig.model_validate_json(environment["SHOAL_SPECULATIVE_CONFIG"])
    assert found == given


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "SIGKILL"), (-40, "signal 40")]
)
def test_an_end_by_any_signal_has_a_text(code: int, text: str) -> None:
    assert exit_text(code) == text
