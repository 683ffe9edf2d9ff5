"""Real services with traffic, and peers of every role that send invalid messages."""

import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.harness.checked_load import Load
from benchmarks.harness.engines import make_engine
from benchmarks.harness.fleet import Fleet, running_fleet
from shared.link.address import ipc_address, socket_path
from shared.model_folder import EMBEDDED_MODEL, read_model_info
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    Abort,
    Cancel,
    Capacity,
    Convert,
    Credit,
    Failed,
    Generate,
    Hello,
    ModelInfo,
    ServiceName,
    StepResult,
    Submit,
    Tokens,
)
from tests.mesh.forks import fork
from tests.mesh.gateway_arena import GatewayArena
from tests.mesh.hostile import odd_versions, with_turned_bits
from tests.mesh.intruders import Attack, be_called, call_all, frames_of
from tests.mesh.scheduler_arena import SchedulerArena
from tests.mesh.test_chaos import SETTINGS, loaded, ready_urls
from tests.mesh.tokenizer_arena import TokenizerArena
from tests.mesh.worker_arena import WorkerArena

MODEL = read_model_info(EMBEDDED_MODEL, ["m"], int(SETTINGS["MAX_MODEL_LEN"]))
# Too small for any sequence: the intruder gets no plan, and no sequence is lost with it.
TINY = Capacity(1, 16, 1, 64, MODEL.max_model_len, MODEL.vocab_size)


def hello(
    service: ServiceName, model: ModelInfo | None = None, capacity: Capacity | None = None
) -> Hello:
    return Hello(PROTOCOL_MAJOR, 0, service, "intruder", model, capacity)


def attacks_on(arena, num: int, dice: random.Random, kinds: tuple[type, ...]) -> list[Attack]:
    """``num`` attacks, half of them by flipped bits."""
    examples = [(i, each) for i, each in enumerate(arena.examples) if isinstance(each[0], kinds)]
    attacks = [
        Attack(odd.name, odd.frames, _before(arena, index))
        for index, example in examples
        for odd in odd_versions(*example)
    ]
    attacks = dice.sample(attacks, min(len(attacks), num // 2))
    for _ in range(num - len(attacks)):
        index, (message, arrays) = dice.choice(examples)
        odd = with_turned_bits(message, arrays, dice)
        attacks.append(Attack(odd.name, odd.frames, _before(arena, index)))
    return attacks


def _before(arena, index: int) -> tuple[list[bytes], ...]:
    """A worker gets preceding plans, other services the request in question."""
    if isinstance(arena, WorkerArena):
        return tuple(frames_of(*example) for example in arena.examples[:index])
    first, arrays = arena.examples[0]
    has_first = index > 0 and not isinstance(arena.examples[index][0], (StepResult, Tokens, Failed))
    return (frames_of(first, arrays),) if has_first else ()


@pytest.fixture(scope="module")
def arenas(tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("arenas")
    engine = make_engine(EMBEDDED_MODEL, "native", max_model_len=MODEL.max_model_len)
    return {
        "gateway": GatewayArena(),
        "tokenizer": TokenizerArena(directory),
        "worker": WorkerArena(engine),
    }


async def attack_all(fleet: Fleet, tmp_path: Path, arenas: dict, scheduler: SchedulerArena, num):
    """Peers of all roles attack at the same time."""
    dice = random.Random(num)
    directories = {}
    for kind in ("gateway", "tokenizer", "worker"):
        directories[kind] = tmp_path / kind
        directories[kind].mkdir(mode=0o700)
        await fleet.start(kind, MESH_DIR=str(directories[kind]))
    (tokenizer,), (below,) = fleet.of("tokenizer")[:1], fleet.of("scheduler")
    requests = socket_path(tmp_path, "tokenizer", tokenizer.instance)
    sequences = socket_path(tmp_path, "scheduler", below.instance, "tokenizers")
    results = socket_path(tmp_path, "scheduler", below.instance, "workers")
    every = tuple(type(message) for arena in arenas.values() for message, _ in arena.examples)
    down = (Submit, Convert, Cancel, Credit, Abort)
    up = (Tokens, Failed)
    to_scheduler = (Generate, Cancel, Credit)
    async with asyncio.TaskGroup() as tasks:

        def call(path, who, arena, kinds):
            attacks = attacks_on(arena, num, dice, kinds)
            tasks.create_task(call_all(ipc_address(path), who, attacks))

        def answer(kind, service, role, model, arena, kinds):
            path = socket_path(directories[kind], service, "i", role)
            attacks = attacks_on(arena, num // 3, dice, kinds)
            tasks.create_task(be_called(path, hello(service, model), attacks))

        call(requests, hello("gateway"), arenas["tokenizer"], down)
        call(sequences, hello("tokenizer", MODEL), scheduler, to_scheduler)
        call(results, hello("worker", MODEL, TINY), scheduler, (StepResult,))
        answer("worker", "scheduler", "workers", None, arenas["worker"], every)
        answer("tokenizer", "scheduler", "tokenizers", None, arenas["tokenizer"], up)
        answer("gateway", "tokenizer", "", MODEL, arenas["gateway"], every)


async def besiege(tmp_path: Path, arenas: dict, num: int) -> None:
    (tmp_path / "beside").mkdir()
    scheduler = SchedulerArena(tmp_path / "beside")
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        load = Load(3, 24, lambda number: ready_urls(fleet)[0])
        await load.learn()
        async with loaded(fleet, load):
            await attack_all(fleet, tmp_path, arenas, scheduler, num)
        assert len(fleet.members) == 7, "a service has ended"
    await scheduler.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_intruders_of_all_roles_end_no_service_and_no_request(tmp_path: Path, arenas: dict):
    await besiege(tmp_path, arenas, 30)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_intruders_end_no_service_and_no_request(tmp_path: Path, arenas: dict):
    await besiege(tmp_path, arenas, 3000)
