"""Adapters of experts, routers, embeddings and heads through real processes: each text is the one
of its merged checkpoint."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeForCausalLM

from benchmarks.harness.fleet import running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.mesh.forks import fork
from tests.mesh.test_adapters import SETTINGS, body_of, merged_texts, post, texts_of
from tests.services.worker.adapters.peft_adapters import STACKS, write_random, write_tensors
from tests.services.worker.adapters.test_experts import LINEARS, of_each_expert
from tests.services.worker.checkpoints import save_model

BASE = SETTINGS["SERVED_MODEL_NAME"]
MIXTURE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EACH: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["gate", *LINEARS]}
ALL: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["embed_tokens", "lm_head", "o_proj"],
    "target_parameters": [*STACKS, "gate.weight"],
}


def save_mixture(folder: Path) -> Path:
    """A random one for the embedded model's tokenizer."""
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    sizes = {name: config[name] for name in ("vocab_size", "eos_token_id")}
    save_model(folder, Qwen3MoeForCausalLM, "50MB", **(MIXTURE | sizes))
    for file in EMBEDDED_MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.timeout(300)
async def test_each_text_is_that_of_its_merged_checkpoint(tmp_path: Path) -> None:
    """Tensors of each expert at the start, of all experts at run time."""
    base = save_mixture(tmp_path / "base")
    written = {
        "sql": write_tensors(base, tmp_path / "sql", of_each_expert(base, 4, 1), **EACH),
        "poems": write_random(base, tmp_path / "poems", 2, **ALL),
    }
    folders = {BASE: base} | {name: each.merged for name, each in written.items()}
    bodies = {name: [body_of(name, number) for number in range(2)] for name in folders}
    expected = {name: merged_texts(folder, bodies[name]) for name, folder in folders.items()}
    assert len({texts[0] for texts in expected.values()}) == len(folders)

    directory, mesh = tmp_path / "adapters", tmp_path / "mesh"
    mesh.mkdir()
    shutil.copytree(written["sql"].adapter, directory / "sql")
    settings = SETTINGS | {"MODEL": str(base), "LORA_DIR": str(directory), "MAX_LORA_RANK": "4"}
    settings["MAX_CPU_LORAS"] = "256"  # sizes of linear layers alone
    async with running_fleet(mesh, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        url = fleet.of("gateway")[0].url
        running = asyncio.create_task(texts_of(url, bodies["sql"] + bodies[BASE]))
        shutil.copytree(written["poems"].adapter, directory / "poems")
        status, text = await post(url, "/v1/load_lora_adapter", {"lora_name": "poems"})
        assert status == 200, text
        assert await running == expected["sql"] + expected[BASE]
        crowd = [body for each in bodies.values() for body in each]
        wanted = [text for name in bodies for text in expected[name]]
        assert await texts_of(url, crowd) == wanted
        assert await texts_of(url, crowd) == wanted  # from cached prefixes
        (directory / "bad").mkdir()
        for file in (directory / "poems").iterdir():
            content = file.read_bytes().replace(b"mlp.experts.lora_A", b"mlp.experts.lora_X")
            (directory / "bad" / file.name).write_bytes(content)
        status, text = await post(url, "/v1/load_lora_adapter", {"lora_name": "bad"})
        assert (status, "experts.lora_X.weight is not supported" in text) == (400, True), text
