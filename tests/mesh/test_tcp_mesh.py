"""The whole mesh over tcp with keys, every service in its own directory."""

import asyncio
from pathlib import Path

import aiohttp

from benchmarks.harness.checked_load import body_of, stream
from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.harness.ports import free_port
from cli.keys import main as make_keys
from tests.mesh.forks import fork

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "512"}


async def start_all(fleet: Fleet, directory: Path, keys: Path) -> None:
    port = free_port(3)  # a scheduler has two
    tokenizer_address, scheduler_address = (f"tcp://127.0.0.1:{port + n}" for n in range(2))
    own = {
        "scheduler": {"LISTEN_ADDRESS": scheduler_address},
        "tokenizer": {"LISTEN_ADDRESS": tokenizer_address, "SCHEDULER_ADDRESS": scheduler_address},
        "worker": {"SCHEDULER_ADDRESS": scheduler_address},
        "gateway": {"TOKENIZER_ADDRESS": tokenizer_address},
    }
    for kind, settings in own.items():
        folder = directory / kind
        folder.mkdir(mode=0o700)
        await fleet.start(kind, **settings, MESH_DIR=str(folder), KEYS=str(keys))
    await fleet.until_ready()


async def test_it_serves_over_tcp_with_a_key_for_each_role(tmp_path: Path):
    keys = tmp_path / "keys"
    assert make_keys([str(keys)]) == 0
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await start_all(fleet, tmp_path, keys)
        (gateway,) = fleet.of("gateway")
        async with aiohttp.ClientSession() as session:
            bodies = [body_of(number, 16) for number in range(8)]
            texts = await asyncio.gather(*(stream(session, gateway.url, body) for body in bodies))
        assert all(texts)
        await fleet.until_idle()
