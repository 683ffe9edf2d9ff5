"""Prefill workers compute long prompts, and decode workers go on with their sequences."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec.structs import replace

from services.scheduler.moves.roles import LONG_TOKENS
from shared.wire.messages import WorkerRole
from tests.services.scheduler.moves.cell_of_workers import INBOX, CellOfWorkers, Worker

ROOM = {"max_model_len": 2048, "max_num_batched_tokens": 128, "num_blocks": 1024}


def prompt_of(number: int, num_tokens: int = LONG_TOKENS + 8) -> np.ndarray:
    return (np.arange(num_tokens, dtype=np.int32) * 7 + number * 13) % 1000


def cell_of(tmp_path: Path, *roles: WorkerRole) -> tuple[CellOfWorkers, list[Worker]]:
    cell = CellOfWorkers(tmp_path)
    workers = [
        Worker(cell, f"{role}{number}", replace(INBOX, role=role, num_blocks=1000), **ROOM)
        for number, role in enumerate(roles)
    ]
    return cell, workers


async def test_a_long_prompt_is_computed_by_one_worker_and_decoded_by_the_other(tmp_path: Path):
    cell, (decode, prefill) = cell_of(tmp_path, "decode", "prefill")
    cell.ask("r", prompt_of(1), max_tokens=50)
    cell.run(30)
    assert prefill.admitted == [("r", 0)]
    ((_, num_cached),) = decode.admitted
    assert num_cached >= LONG_TOKENS
    assert not prefill.running
    cell.finish()


async def test_its_blocks_are_pushed_while_the_prompt_is_computed(tmp_path: Path):
    cell, (_, prefill) = cell_of(tmp_path, "decode", "prefill")
    cell.ask("r", prompt_of(1), max_tokens=50)
    cell.run(4)
    (sequence,) = prefill.running
    assert not sequence.emitted
    assert prefill.pushes


async def test_the_first_token_comes_before_the_move(tmp_path: Path):
    cell, (decode, _) = cell_of(tmp_path, "decode", "prefill")
    cell.ask("r", prompt_of(1), max_tokens=50)
    while not decode.admitted:
        cell.run(1)
    (sequence,) = cell.core.sequences.values()
    assert sequence.emitted


async def test_short_prompts_are_kept_from_prefill_workers(tmp_path: Path):
    cell, (prefill, decode) = cell_of(tmp_path, "prefill", "decode")
    for number in range(4):
        cell.ask(f"r{number}", prompt_of(number, 20), max_tokens=10)
    cell.run(60)
    assert not prefill.admitted
    assert len(decode.admitted) == 4
    cell.finish()


async def test_a_long_prompt_that_a_decode_worker_knows_stays_there(tmp_path: Path):
    cell, (decode, prefill) = cell_of(tmp_path, "decode", "prefill")
    cell.ask("r", prompt_of(1), max_tokens=50)
    cell.finish()
    cell.ask("again", prompt_of(1), max_tokens=5)
    cell.run(20)
    assert [each for each, _ in prefill.admitted] == ["r"]
    assert decode.admitted[-1][0] == "again"


async def test_a_full_role_gives_way(tmp_path: Path):
    cell, (prefill, decode) = cell_of(tmp_path, "prefill", "decode")
    for number in range(8):
        cell.ask(f"r{number}", prompt_of(number, 20), max_tokens=60)
    cell.run(20)
    assert len(decode.admitted) == 4, "all its slots"
    assert len(prefill.admitted) == 4
    cell.finish()


async def test_a_role_alone_does_everything(tmp_path: Path):
    cell, (prefill,) = cell_of(tmp_path, "prefill")
    cell.ask("long", prompt_of(1), max_tokens=10)
    cell.ask("short", prompt_of(2, 20), max_tokens=10)
    cell.run(60)
    assert len(prefill.admitted) == 2
    cell.finish()


async def test_a_worker_of_both_roles_takes_blocks_of_a_prefill_worker(tmp_path: Path):
    cell, (both, prefill) = cell_of(tmp_path, "both", "prefill")
    both.transfers.worker.admits = False
    cell.ask("r", prompt_of(1), max_tokens=50)
    cell.run(4)
    both.transfers.worker.admits = True
    cell.run(20)
    assert [each for each, _ in prefill.admitted] == ["r"]
    assert both.admitted[0][1] >= LONG_TOKENS
    cell.finish()


async def test_without_a_worker_for_it_a_sequence_decodes_where_it_is(tmp_path: Path):
    cell, (prefill, decode) = cell_of(tmp_path, "prefill", "decode")
    cell.ask("r", prompt_of(1), max_tokens=50)
    cell.run(3)
    decode.die()
    cell.run(20)
    assert len(prefill.running) == 1
    assert prefill.running[0].emitted
    cell.finish()


@pytest.mark.parametrize("seed", range(6))
async def test_mixtures_of_roles_with_losses_serve_everything(tmp_path: Path, seed: int):
    random = Random(seed)
    roles: list[WorkerRole] = ["both", "prefill", "decode"]
    cell, _ = cell_of(tmp_path, *random.choices(roles, k=random.randint(1, 4)))
    number = 10
    for each in range(30):
        match random.choice(["ask", "ask", "run", "run", "die", "join", "drain", "look"]):
            case "ask":
                num = random.choice([20, 60, LONG_TOKENS, LONG_TOKENS + 200])
                cell.ask(f"r{each}", prompt_of(each, num), max_tokens=random.randint(1, 40))
            case "run":
                cell.run(random.randint(1, 30), delivers=random.random() < 0.8)
            case "die":
                # Each loss has another cause than sequences: they must not be refused.
                worker = random.choice([*cell.workers.values()])
                if len(cell.workers) > 1:
                    worker.peer.is_explained = True
                    worker.die()
            case "join":
                number += 1
                inbox = replace(INBOX, role=random.choice(roles), num_blocks=100)
                Worker(cell, f"w{number}", inbox, **ROOM)
            case "drain":
                if len(cell.workers) > 1:
                    random.choice([*cell.workers.values()]).drain()
            case "look":
                cell.look()
    Worker(cell, "last", replace(INBOX, role=random.choice(roles)), **ROOM)
    cell.run(3000)
    cell.look(40)
    cell.finish()
